"""allreduce, allgather, broadcast and barrier on single tensors, as users call them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from ranks import attempt_ranks, run_ranks

import hvdlite as hvd
from hvdlite import operations
from hvdlite.collective import Group

SIZES = [1, 2, 3]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def _world_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These functions read the world; here every thread has its own."""
    import threading  # noqa: PLC0415 - used only here

    here = threading.local()

    class Worlds:
        @property
        def group(self) -> Group:
            return here.group

    monkeypatch.setattr(operations, "current_world", Worlds)
    monkeypatch.setattr(operations, "_here", here, raising=False)
    with contextlib.nullcontext():
        yield


def ranks(size: int, function):
    def run(group: Group):
        operations._here.group = group
        return function(group.rank)

    return run_ranks(size, run)


def attempts(size: int, function):
    def run(group: Group):
        operations._here.group = group
        return function(group.rank)

    return attempt_ranks(size, run)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_allreduce_averages_floats_of_any_shape(size, dtype, shape):
    results = ranks(size, lambda rank: hvd.allreduce(torch.full(shape, rank + 1.0).to(dtype)))
    for got in results:
        assert got.dtype == dtype
        torch.testing.assert_close(got, torch.full(shape, (size + 1) / 2).to(dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_allreduce_sums_and_leaves_its_argument_alone(dtype):
    def rank(number: int):
        mine = torch.tensor([1, 2, 3]).mul(number + 1).to(dtype)
        kept = mine.clone()
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert torch.equal(mine, kept)
        return total

    for got in ranks(2, rank):
        assert got.dtype == dtype
        assert torch.equal(got, torch.tensor([3, 6, 9]).to(dtype))


def test_ranks_with_1_2_and_minus_3_sum_to_0():
    assert ranks(3, lambda rank: hvd.allreduce(torch.tensor([1, 2, -3])[rank], op=hvd.Sum).item()) == [0, 0, 0]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_averages_are_rounded_towards_zero(dtype):
    assert [r.item() for r in ranks(2, lambda rank: hvd.allreduce(torch.tensor(rank + 2).to(dtype)))] == [2, 2]


def test_allreduce_of_a_view_that_is_not_contiguous_keeps_its_shape():
    results = ranks(2, lambda rank: hvd.allreduce((torch.arange(6.0) * (rank + 1)).reshape(2, 3).t()))
    for got in results:
        assert torch.equal(got, torch.arange(6.0).reshape(2, 3).t() * 1.5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
def test_allgather_joins_unequal_first_dimensions_in_rank_order(size, dtype):
    results = ranks(size, lambda rank: hvd.allgather(torch.full((rank, 2), rank).to(dtype)))
    expected = torch.cat([torch.full((rank, 2), rank).to(dtype) for rank in range(size)])
    assert all(torch.equal(got, expected) for got in results)


def test_allgather_of_scalars_is_a_vector():
    assert [r.tolist() for r in ranks(3, lambda rank: hvd.allgather(torch.tensor(rank)))] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
def test_broadcast_gives_the_roots_tensor(size, dtype):
    results = ranks(size, lambda rank: hvd.broadcast(torch.tensor([rank, 0, 1]).to(dtype), root_rank=size - 1))
    assert all(torch.equal(got, torch.tensor([size - 1, 0, 1]).to(dtype)) for got in results)


def test_barrier_returns_on_every_rank():
    assert ranks(3, lambda rank: hvd.barrier()) == [None] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rank: hvd.allreduce(torch.zeros(2 + rank), name="loss"), "allreduce of 'loss'"),
        (lambda rank: hvd.allreduce(torch.zeros(2), name=["loss", "accuracy"][rank]), "'accuracy'"),
        (lambda rank: hvd.allreduce(torch.zeros(2, dtype=FLOATS[rank])), "torch.bfloat16"),
        (lambda rank: hvd.allreduce(torch.zeros(2), op=hvd.ReduceOp(rank)), "Sum"),
        (lambda rank: hvd.allgather(torch.zeros(1, 2 + rank)), r"\(3,\)"),
        (lambda rank: hvd.broadcast(torch.zeros(2), rank), "root_rank"),
    ],
)
def test_ranks_that_pass_different_things_get_one_error_that_says_which(call, words):
    for outcome in attempts(2, call):
        assert isinstance(outcome, hvd.MismatchError)
        with pytest.raises(hvd.MismatchError, match=words):
            raise outcome


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: hvd.allreduce(1.5, name="loss"), TypeError, "allreduce of 'loss': float is not a tensor"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), TypeError, "to_dense"),
        (lambda: hvd.allreduce(torch.ones(2), op="mean"), ValueError, "op='mean'"),
        (lambda: hvd.broadcast(torch.ones(2), 5), ValueError, "root_rank=5"),
    ],
)
def test_wrong_arguments_are_named(call, error, words):
    (outcome,) = attempts(1, lambda rank: call())
    with pytest.raises(error, match=words):
        raise outcome
