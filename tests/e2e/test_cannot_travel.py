"""The calls of tests/ops/test_cannot_travel.py by real ranks, over shared memory: checked and unchecked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.conftest import PATIENCE_S

pytestmark = pytest.mark.slow

PROGRAM = """
import warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import hvdlite as hvd
import kinds
import test_cannot_travel as calls
hvd.init()
with kinds.a_mesh():
    calls.require_sound([calls.calls_with_all_kinds(hvd.rank())], at_least=3000)
"""


@pytest.mark.night
@pytest.mark.parametrize("env", [{}, {"HVDLITE_CHECK": "0"}], ids=["checked", "unchecked"])
def test_real_ranks_end_every_call_in_step(launch, env):
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests / "ops"), str(tests / "helpers")])
    job = launch("-np", "2", "python", "-X", "faulthandler", "-c", PROGRAM, env={"PYTHONPATH": paths, **env})
    code, _, err = job.ended(5 * PATIENCE_S)
    assert code == 0, err.decode()
    job.assert_gone()
