"""reducescatter in its grouped and asynchronous forms, and sparse_allreduce_async."""

from __future__ import annotations

import pytest
import torch
from ranks import counting
from samples import DTYPES, close, combined, sample
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.runtime.world import current_world

SHAPES = [(5,), (0,), (4, 0), (3, 2), (6, 1, 3), (1, 2)]


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_each_dtype_is_one_reduce_scatter_of_the_engine_and_no_all_to_all(compression):
    def rank(number):
        # The calls of all engines of this rank.
        calls = current_world().group.engine.calls
        calls.clear()
        tensors = [torch.ones(5), torch.ones(4, 2), torch.ones(7, dtype=torch.int64)]
        hvd.grouped_reducescatter(tensors, op=hvd.Sum, compression=compression)
        return calls.copy()

    assert run_worlds(2, rank, make_wrapper=counting) == [[("reduce_scatter", 13), ("reduce_scatter", 7)]] * 2


def spread(rows: int, size: int) -> list[int]:
    return [len(range(rank, rows, size)) for rank in range(size)]


@pytest.mark.parametrize(
    ("size", "engine"),
    [(1, "gloo"), (2, "gloo"), pytest.param(3, "gloo", marks=pytest.mark.slow), (4, "gloo"), (3, "shared memory")],
)
def test_each_rank_gets_its_rows_of_what_one_process_would_sum_up(size, engine):
    ops = [hvd.Average, hvd.Sum]

    def rank(number):
        results = []
        for dtype in DTYPES:
            for op in ops:
                mine = [sample(number, dtype, shape) for shape in SHAPES]
                kept = [tensor.clone() for tensor in mine]
                name = f"{dtype}{op}"
                handles = [hvd.reducescatter_async(tensor, f"{name}.{i}", op) for i, tensor in enumerate(mine)]
                grouped = hvd.grouped_reducescatter_async(mine, name, op)
                results.append([hvd.synchronize(handle) for handle in handles])
                results.append(hvd.synchronize(grouped))
                assert all(torch.equal(tensor, copy) for tensor, copy in zip(mine, kept, strict=True))
        results.append([hvd.reducescatter(tensor, op=op) for tensor in mine])
        results.append(hvd.grouped_reducescatter(mine, op=op))
        return results

    for number, results in enumerate(run_worlds(size, rank, engine=engine)):
        cases = [(dtype, op) for dtype in DTYPES for op in ops for _ in range(2)]
        cases += [(DTYPES[-1], ops[-1])] * 2
        for (dtype, op), got in zip(cases, results, strict=True):
            for place, shape in enumerate(SHAPES):
                whole = combined(op, [sample(source, dtype, shape) for source in range(size)])
                close(got[place], whole.split(spread(shape[0], size))[number])


def test_half_precision_is_added_up_in_single():
    # In float16, 2048 + 1 is 2048.
    terms = torch.tensor([2048.0, 1.0, 1.0, 1.0], dtype=torch.float16)

    def rank(number):
        return hvd.reducescatter(terms[number].expand(4), op=hvd.Sum).item()

    assert run_worlds(4, rank) == [2052.0] * 4


def test_factors_and_compression_are_those_of_allreduce():
    def rank(number):
        mine = torch.tensor([2.0, 4.0]) * (number + 1)
        scaled = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        fine = torch.full((2,), 1.0 + number / 1024)
        sent = hvd.reducescatter(fine, compression=hvd.Compression.bf16, op=hvd.Sum)
        return scaled.item(), sent.item(), sent.dtype

    assert run_worlds(2, rank) == [(9.0, 2.0, torch.float32), (18.0, 2.0, torch.float32)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max),
            r"Reducescatter currently only supports AVERAGE and SUM\.",
        ),
        (lambda: hvd.grouped_reducescatter_async([torch.ones(2)], op=2), "only supports AVERAGE and SUM"),
        (lambda: hvd.reducescatter(torch.tensor(1.0), name="x"), "reducescatter of 'x': a scalar has no rows"),
    ],
)
def test_what_cannot_be_scattered_is_an_error(call, words):
    (outcome,) = attempt_worlds(1, lambda rank: call())
    with pytest.raises(ValueError, match=words):
        raise outcome


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse_tensors_are_joined_and_averages_divided(size):
    def dense(number, dtype):
        return torch.zeros(4, 3, dtype=dtype).index_put((torch.arange(number + 1),), torch.tensor(2, dtype=dtype))

    def rank(number):
        for dtype in (torch.float32, torch.float16, torch.int64, torch.complex64):
            for op in (hvd.Average, hvd.Sum):
                mine = dense(number, dtype)
                hybrid = mine.to_sparse(1)
                # Of one all zeros are left out, of the other whole rows of zeros.
                results = [
                    hvd.sparse_allreduce_async(mine.to_sparse(), f"{dtype}{op}", op)(),
                    hvd.synchronize(hvd.sparse_allreduce_async(hybrid, "hybrid", op)),
                ]
                assert not results[0].is_coalesced()
                expected = combined(hvd.Sum, [dense(source, dtype) for source in range(size)])
                if op is hvd.Average:
                    # Each value is divided before the sum, so that integers lose more than their sum would.
                    parts = [dense(source, dtype) for source in range(size)]
                    rounding = "trunc" if dtype is torch.int64 else None
                    expected = sum(torch.div(part, size, rounding_mode=rounding) for part in parts)
                for result in results:
                    close(result.to_dense(), expected.to(dtype))

    run_worlds(size, rank)


def test_a_rank_without_a_value_takes_part_in_a_sparse_sum():
    def rank(number):
        mine = torch.zeros(2) if number == 0 else torch.tensor([0.0, 3.0])
        return hvd.sparse_allreduce_async(mine.to_sparse(), name="x", op=hvd.Sum)().to_dense().tolist()

    assert run_worlds(2, rank) == [[0.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: hvd.sparse_allreduce_async(torch.ones(2), "x", hvd.Sum), TypeError, r"use hvd\.allreduce"),
        (
            lambda: hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), "x", hvd.Min),
            ValueError,
            r"hvd\.Min does not work",
        ),
    ],
)
def test_what_is_no_sparse_sum_is_an_error(call, error, words):
    (outcome,) = attempt_worlds(1, lambda rank: call())
    with pytest.raises(error, match=words):
        raise outcome
