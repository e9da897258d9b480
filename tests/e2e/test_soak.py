"""``python tests/bench/soak.py``: jobs of its own, with faults and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.night  # what is run at night is tried at night

PATIENCE_S = 400
SOAK = (str(Path(__file__).parents[1] / "bench" / "soak.py"),)


def test_a_short_soak_has_faults_in_half_of_its_windows_and_all_ranks_stay_equal(launch, tmp_path):
    file = tmp_path / "soak.json"
    words = ("-np", "3", "--for", "14", "--every", "4", "--json", str(file))
    job = launch(*words, program=SOAK, env={"OMP_NUM_THREADS": "1"})
    code, out, err = job.ended(PATIENCE_S)
    job.assert_gone()
    assert code == 0, (out.decode(), err.decode())
    found = json.loads(file.read_text())
    without, with_faults = found["rows"]
    assert (without["count"], without["faults"], with_faults["count"]) == (1, 0, 1)
    assert sum(found["faults"].values()) == with_faults["faults"] >= 1
    assert without["compared"] > 0
    assert with_faults["compared"] > 0
    assert (found["steps_unequal"], found["processes_left"], found["failures"]) == (0, 0, [])
    assert found["complete"]
    assert b"processes left behind: 0" in out
