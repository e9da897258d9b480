"""allgather, broadcast, alltoall and barrier give the ranks each other's data, in every dtype and dimension."""

from __future__ import annotations

import threading

import pytest
import torch
from samples import DTYPES, SHAPES, sample
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd

SIZES = [1, 2, pytest.param(3, marks=pytest.mark.slow), 4]
ROWS = [(5,), (4, 0), (3, 2), (2, 1, 3)]


def rows_of(rank, dtype, shape):
    """Returns a first dimension that differs by rank; rank 0 has no rows."""
    return sample(rank, dtype, (shape[0] * rank, *shape[1:])) if shape else sample(rank, dtype, ())


@pytest.mark.parametrize("size", SIZES)
def test_allgather_joins_unequal_first_dimensions_in_rank_order(size):
    def rank(number):
        handles, results = [], []
        for dtype in DTYPES:
            mine = [rows_of(number, dtype, shape) for shape in SHAPES]
            kept = [tensor.clone() for tensor in mine]
            handles.append(hvd.grouped_allgather_async(mine, name=f"{dtype}"))
            handles += [hvd.allgather_async(tensor, f"{dtype}.{i}") for i, tensor in enumerate(mine[:3])]
            results.append(hvd.allgather(mine[4], name=f"{dtype}.sync"))
            results += hvd.grouped_allgather(mine[3:], name=f"{dtype}.sync")
            assert all(torch.equal(tensor, copy) for tensor, copy in zip(mine, kept, strict=True))
        for handle in handles:
            result = hvd.synchronize(handle)
            results += result if isinstance(result, tuple) else [result]
        return results

    expected = []
    for dtype in DTYPES:
        shapes = [SHAPES[4], *SHAPES[3:]]
        expected += [[rows_of(number, dtype, shape) for number in range(size)] for shape in shapes]
    for dtype in DTYPES:
        expected += [[rows_of(number, dtype, shape) for number in range(size)] for shape in [*SHAPES, *SHAPES[:3]]]
    for results in run_worlds(size, rank):
        for got, parts in zip(results, expected, strict=True):
            joined = torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
            assert got.dtype == joined.dtype
            assert torch.equal(got, joined)


def test_allgather_of_scalars_is_a_vector():
    assert [r.tolist() for r in run_worlds(3, lambda rank: hvd.allgather(torch.tensor(rank)))] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_the_roots_tensor_in_every_form(size):
    root = size - 1

    def rank(number):
        for dtype in DTYPES:
            for shape in SHAPES:
                name, wanted = f"{dtype}{shape}", sample(root, dtype, shape)
                mine, kept = sample(number, dtype, shape), sample(number, dtype, shape)
                handle = hvd.broadcast_async(mine, root, name)
                assert torch.equal(hvd.synchronize(handle), wanted)
                assert torch.equal(mine, kept)
                strided = torch.stack([mine, mine], dim=-1)[..., 0]
                assert hvd.synchronize(hvd.broadcast_async_(strided, root, name)) is strided
                assert torch.equal(strided, wanted)
            assert hvd.broadcast(mine, root).dtype == dtype
            assert hvd.broadcast_(mine, root) is mine
            assert torch.equal(mine, wanted)

    run_worlds(size, rank)


def test_what_broadcast_returns_on_the_root_is_not_the_roots_tensor_itself():
    def rank(number):
        mine = torch.zeros(2)
        hvd.broadcast(mine, 0).add_(1)
        return mine.tolist()

    assert run_worlds(2, rank) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_with_splits_gives_each_rank_its_rows_and_how_many_came_from_whom(size):
    # Rank r sends (r + 2 s) % 3 rows to rank s, and keeps one that is sent to no rank.
    counts = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]

    def mine(number, dtype, shape):
        return sample(number, dtype, (sum(counts[number]) + 1, *shape[1:]))

    def rank(number):
        splits = torch.tensor(counts[number], dtype=torch.int32)
        results = []
        for dtype in DTYPES:
            for shape in ROWS:
                tensor = mine(number, dtype, shape)
                results.append(hvd.synchronize(hvd.alltoall_async(tensor, splits, f"{dtype}{shape}")))
            results.append(hvd.alltoall(tensor, counts[number], f"{dtype}"))
        return results

    for number, results in enumerate(run_worlds(size, rank)):
        answers = iter(results)
        for dtype in DTYPES:
            for shape in [*ROWS, ROWS[-1]]:
                got, received = next(answers)
                parts = [mine(source, dtype, shape).split([*counts[source], 1])[number] for source in range(size)]
                assert torch.equal(got, torch.cat(parts))
                assert got.dtype == dtype
                assert received.dtype == torch.int32
                assert received.tolist() == [counts[source][number] for source in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_without_splits_gives_all_as_many_and_no_counts(size):
    results = run_worlds(size, lambda rank: hvd.alltoall(torch.arange(2 * size).reshape(2 * size, 1) + 100 * rank))
    for number, got in enumerate(results):
        wanted = [[100 * source + 2 * number + i] for source in range(size) for i in (0, 1)]
        assert got.tolist() == wanted


def test_alltoall_of_unequal_first_dimensions_needs_no_splits():
    results = run_worlds(2, lambda rank: hvd.alltoall(torch.full((2 * rank,), rank)).tolist())
    assert results == [[1], [1]]


def test_barrier_returns_when_every_rank_has_called_it():
    arrived = []
    lock = threading.Lock()

    def rank(number):
        with lock:
            arrived.append(number)
        hvd.barrier()
        return len(arrived)

    assert run_worlds(3, rank) == [3, 3, 3]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: hvd.alltoall(torch.ones(2), torch.ones(1, 1, dtype=torch.int32)), ValueError, "1D splits tensor"),
        (lambda: hvd.alltoall(torch.ones(2), [[1]]), ValueError, "alltoall expects a 1D splits tensor"),
        (
            lambda: hvd.alltoall(torch.ones(2), torch.tensor([2])),
            ValueError,
            "32-bit integer.*plain list of ints",
        ),
        (lambda: hvd.alltoall(torch.ones(2), [1.5]), ValueError, r"alltoall: splits=\[1.5\] are not whole numbers"),
        (lambda: hvd.alltoall(torch.ones(2), [True]), ValueError, r"splits=\[True\]"),
        (lambda: hvd.alltoall(torch.ones(2), "all", "x"), ValueError, "alltoall of 'x': splits='all'"),
        (lambda: hvd.alltoall(torch.ones(2), [2**40]), ValueError, "Sum of splits entries is greater than the first"),
        (lambda: hvd.allgather(torch.ones(2, device="meta"), "x"), ValueError, "'x': the tensor is on the meta device"),
        (lambda: hvd.alltoall(torch.ones(2), [3], "x"), ValueError, "Sum of splits entries is greater than the first"),
        (lambda: hvd.alltoall(torch.ones(2), [1, 1]), ValueError, "Number of entries in splits does not equal number"),
        (lambda: hvd.alltoall(torch.ones(2), [-1]), ValueError, "below 0"),
        (lambda: hvd.alltoall(torch.tensor(2.0)), ValueError, "a scalar has no rows"),
        (lambda: hvd.broadcast(torch.ones(2), 5), ValueError, "root_rank=5 is not one of the 1 ranks"),
        (lambda: hvd.broadcast_(torch.ones(2), True), ValueError, "root_rank=True"),
        (lambda: hvd.broadcast_async([1.0], 0, "it"), TypeError, "broadcast of 'it': list is not a tensor"),
        (lambda: hvd.grouped_allgather([1.0]), TypeError, "grouped_allgather: tensor 0: float is not a tensor"),
    ],
)
def test_wrong_arguments_are_named(call, error, words):
    (outcome,) = attempt_worlds(1, lambda rank: call())
    with pytest.raises(error, match=words):
        raise outcome


def test_rows_that_do_not_come_out_even_need_splits():
    for outcome in attempt_worlds(2, lambda rank: hvd.alltoall(torch.ones(3))):
        with pytest.raises(ValueError, match="splits not provided, but first dimension of tensor is not an even"):
            raise outcome
