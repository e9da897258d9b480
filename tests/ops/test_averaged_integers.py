"""Averages of integers are truncated as in Horovod; unlike Horovod, a warning is shown once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.ops import reduction


@pytest.fixture(autouse=True)
def nothing_said_yet():
    reduction._warned_of_integers.clear()
    yield
    reduction._warned_of_integers.clear()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "averages integers" in record.getMessage()]


CALLS = {
    "allreduce": lambda tensor: hvd.allreduce(tensor, name="count"),
    "allreduce_": lambda tensor: hvd.allreduce_(tensor, name="count"),
    "allreduce_async": lambda tensor: hvd.synchronize(hvd.allreduce_async(tensor, name="count")),
    "grouped_allreduce": lambda tensor: hvd.grouped_allreduce([torch.ones(1), tensor], name="count")[1],
    "reducescatter": lambda tensor: hvd.reducescatter(tensor, name="count"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_the_first_average_of_integers_is_warned_of_on_one_rank_with_its_name_and_the_way_out(caplog, call, dtype):
    def twice(_rank):
        tensor = torch.full((2,), 3 + hvd.rank(), dtype=dtype)
        return CALLS[call](tensor.clone()).tolist(), CALLS[call](tensor.clone()).tolist()

    results = run_worlds(2, twice)
    assert all(value == 3 for result in results for values in result for value in values)
    (said,) = warnings_of(caplog)
    assert said.startswith(f"{call.removesuffix('_async').removesuffix('_')} of 'count")
    assert str(dtype) in said
    assert "tensor.float()" in said
    assert "op=hvd.Sum" in said


def test_nothing_is_said_of_sums_floats_booleans_one_rank_and_the_zero_that_is_averaged_as_a_barrier(caplog):
    def others(_rank):
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Sum)
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Max)
        hvd.allreduce(torch.ones(2))
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
        hvd.allreduce(torch.tensor(0), name="barrier")

    run_worlds(2, others)
    run_worlds(1, lambda _rank: hvd.allreduce(torch.ones(2, dtype=torch.int64)))
    assert warnings_of(caplog) == []


def test_the_recipe_for_the_accuracy_of_all_ranks_gives_that_of_all_examples():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (recipe,) = re.findall(r"```python\n(right = .*?)```", page, re.DOTALL)

    def accuracy_of_all_ranks(_rank):
        # Rank 0 has four examples, three of them classified correctly; rank 1 has one, classified wrongly.
        x = torch.eye(4)[[0, 1, 2, 3] if hvd.rank() == 0 else [0]]
        y = torch.tensor([0, 1, 2, 0] if hvd.rank() == 0 else [1])
        names = {"hvd": hvd, "torch": torch, "model": torch.nn.Identity(), "x": x, "y": y}
        exec(recipe, names)
        return names["accuracy"]

    assert run_worlds(2, accuracy_of_all_ranks) == pytest.approx([0.6, 0.6])
