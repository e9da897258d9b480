"""Ignite's `idist` on its Horovod backend, which is hvdlite under the shim, in real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("ignite_program.py"))
SHIM = ("-m", "hvdlite.horovod")


@pytest.fixture(autouse=True, scope="module")
def _needs_ignite() -> None:
    # Here, and not for the module: where only other tests are asked for, this is no skipped one.
    pytest.importorskip("ignite")


def test_idist_trains_the_weights_of_one_process_and_has_collectives_under_hvdlite_run(ranks_results, rank_server):
    (one,), _ = ranks_results("alone", size=1, program=(*rank_server.python(), PROGRAM))
    ranks, err = ranks_results("--horovod", "-np", "2", sys.executable, PROGRAM, "own")
    for number, rank in enumerate(ranks):
        assert rank["place"] == {
            "backend": "horovod",
            "model": "horovod-dist",
            "size": 2,
            "rank": number,
            "local_rank": number,
            "per node": 2,
            "nodes": 1,
            "node": 0,
        }
        assert rank["drawn"] == one["drawn"][number::2]
        for mine, alone in zip(rank["weights"], one["weights"], strict=True):
            torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-6)
        assert rank["collectives"] == {
            "sum": 3,
            "average": [1.5],
            "max": [1, 5],
            "gathered": [0, 7, 1, 7],
            "gathered in a group": [number],
            "strings": ["", "x"],
            "objects": [{"rank": 0}, {"rank": 1}],
            "broadcast": [1],
            "text": "from 1",
        }
    assert "averages integers" not in err, "idist.barrier() is an all-reduce of the integer 0"


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--horovod", "-np", "2", sys.executable, PROGRAM, "parallel"), {}),
        (("parallel that starts",), {"program": (*SHIM, PROGRAM)}),
    ],
    ids=["under hvdlite-run", "starts its ranks itself"],
)
def test_idist_parallel_runs_a_function_on_all_ranks(ranks_results, arguments, options):
    ranks, _ = ranks_results(*arguments, **options)
    for number, rank in enumerate(ranks):
        assert (rank["local_rank"], rank["word"], rank["sum"]) == (number, "given", 2)
        assert (rank["place"]["backend"], rank["place"]["rank"], rank["place"]["size"]) == ("horovod", number, 2)
