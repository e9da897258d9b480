"""All-reduce and reduce-scatter in shared memory are right in every op, dtype and size, wherever the data are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm.engines import begin_all_reduce, run_engines

from hvdlite.shm.arithmetic import DTYPES, OPS, Arithmetic
from hvdlite.shm.control_block import PAYLOAD_BYTES
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.shm.shm_operation import CHUNK_BYTES

Op: Any = dist.ReduceOp.RedOpType
BITWISE = {Op.BAND: operator.and_, Op.BOR: operator.or_, Op.BXOR: operator.xor}
# In torch the sum of bools is their or, and the product their and.
OF_BOOLS = {Op.SUM: operator.or_, Op.PRODUCT: operator.and_, Op.MIN: min, Op.MAX: max, **BITWISE}
OF_INTS = {Op.SUM: operator.add, Op.PRODUCT: operator.mul, Op.MIN: min, Op.MAX: max, **BITWISE}


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def is_refused(op: Any, dtype: torch.dtype) -> bool:
    return (
        (op in BITWISE and is_inexact(dtype))
        or (op == Op.AVG and not is_inexact(dtype))
        or (op in (Op.MIN, Op.MAX) and dtype.is_complex)
    )


def values_of(dtype: torch.dtype, numel: int, rank: int) -> torch.Tensor:
    """Returns numbers of both signs, also near the ends of integers' range; they differ by rank, not by run."""
    random = torch.Generator().manual_seed(numel * 10 + rank)
    if is_inexact(dtype):
        real = torch.randn(numel, generator=random, dtype=torch.float64)
        if dtype.is_complex:
            real = torch.complex(real, torch.randn(numel, generator=random, dtype=torch.float64))
            return real.to(torch.complex64).to(dtype) if dtype == torch.complex32 else real.to(dtype)
        return real.to(dtype)
    if dtype == torch.bool:
        return torch.rand(numel, generator=random) < 0.6
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=random, dtype=torch.uint8)
    return raw.view(dtype)


def reference(op: Any, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns what one process computes, in rank order."""
    dtype = terms[0].dtype
    if dtype == torch.bool:
        return torch.tensor([reduce(OF_BOOLS[op], column) for column in columns(terms)], dtype=dtype)
    if not is_inexact(dtype):
        return as_tensor([reduce(OF_INTS[op], column) for column in columns(terms)], dtype)
    wide = dtype
    if dtype.itemsize <= 2:
        wide = torch.float32
    elif dtype == torch.complex32:
        wide = torch.complex64
    fold = {Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}.get(op, torch.add)
    total = reduce(fold, [term.to(wide) for term in terms])
    if op == Op.AVG:
        total = total / len(terms)
    return total.to(dtype)


def columns(terms: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return list(zip(*(term.tolist() for term in terms), strict=True))


def as_tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor of integers of any size, modulo the dtype's range."""
    raw = b"".join((value % 2 ** (8 * dtype.itemsize)).to_bytes(dtype.itemsize, "little") for value in values)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def placed(engine: ShmEngine, values: torch.Tensor, where: str) -> torch.Tensor:
    """Places the values in ordinary memory, in shared memory (not at its beginning), or in either, by rank."""
    if where == "ordinary" or (where == "mixed" and engine.rank % 2):
        return values.clone()
    before = engine.rank + 3
    memory = engine.zeros(before + values.numel() + 5, values.dtype)
    assert memory is not None
    tensor = memory[before : before + values.numel()]
    tensor.copy_(values)
    return tensor


def check_every_op_and_dtype(size: int, numel: int, where: str) -> None:
    def on_rank(engine: ShmEngine) -> dict[Any, bytes]:
        results = {}
        for op in OPS:
            for dtype in DTYPES:
                tensor = placed(engine, values_of(dtype, numel, engine.rank), where)
                if is_refused(op, dtype):
                    with pytest.raises(ValueError, match=str(op).rpartition(".")[2]):
                        begin_all_reduce(engine, tensor, op)
                    continue
                begin_all_reduce(engine, tensor, op).wait()
                results[op, dtype] = bits(tensor)
        return results

    by_rank = run_engines(size, on_rank)
    for (op, dtype), result in by_rank[0].items():
        expected = reference(op, [values_of(dtype, numel, rank) for rank in range(size)])
        assert result == bits(expected), (op, dtype)
        assert all(other[op, dtype] == result for other in by_rank), (op, dtype)
    assert len(by_rank[0]) == sum(not is_refused(op, dtype) for op in OPS for dtype in DTYPES)


def test_every_op_and_dtype_is_what_one_process_computes() -> None:
    check_every_op_and_dtype(3, 7, "ordinary")


@pytest.mark.parametrize("numel", [7, PAYLOAD_BYTES, 2 * CHUNK_BYTES // 4 + 5])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG, Op.MAX])
def test_the_result_may_lie_elsewhere_than_the_tensor_on_some_ranks(op: Any, size: int, numel: int) -> None:
    def on_rank(engine: ShmEngine) -> bytes:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        # Rank 1's tensor is in shared memory and reduced in place; rank 0's is there too, and must not change.
        tensor = placed(
            engine, values_of(torch.float32, numel, engine.rank), "resident" if engine.rank < 2 else "ordinary"
        )
        if engine.rank == 1:
            engine.allreduce([tensor], options).wait()
            return bits(tensor)
        output = torch.full((numel,), torch.nan)
        engine.allreduce_into(output, tensor, options).wait()
        assert torch.equal(tensor, values_of(torch.float32, numel, engine.rank))
        return bits(output)

    expected = bits(reference(op, [values_of(torch.float32, numel, rank) for rank in range(size)]))
    assert run_engines(size, on_rank) == [expected] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_an_average_has_the_bits_of_the_sum_divided(size: int, dtype: torch.dtype) -> None:
    real = torch.tensor([0.0, -0.0, 1.0, 3.0, 1e-45, 3e-45, 1.2e-38, 3.4e38, torch.inf, -torch.inf, torch.nan])
    terms = [real.roll(rank).to(dtype) for rank in range(size)]
    result = torch.empty_like(terms[0])
    Arithmetic(Op.AVG, dtype, size).into(terms, result, is_apart=True)
    assert bits(result) == bits(reduce(torch.add, terms) / size)


def test_a_result_of_another_size_or_dtype_is_refused() -> None:
    def on_rank(engine: ShmEngine) -> None:
        for output in (torch.empty(4), torch.empty(3, dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"3 elements of torch\.float32 into"):
                engine.allreduce_into(output, torch.empty(3), dist.AllreduceOptions())

    run_engines(2, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "numel", "where"),
    [
        (1, 7, "ordinary"),
        (1, PAYLOAD_BYTES + 1, "resident"),
        (2, PAYLOAD_BYTES + 1, "resident"),
        (2, 7, "ordinary"),
        (3, PAYLOAD_BYTES + 3, "ordinary"),
        (4, PAYLOAD_BYTES + 3, "mixed"),
    ],
)
def test_so_it_is_wherever_the_data_lie(size: int, numel: int, where: str) -> None:
    check_every_op_and_dtype(size, numel, where)


def sizes_of(dtype: torch.dtype) -> list[int]:
    """Returns numbers of elements around every boundary."""
    edges = [PAYLOAD_BYTES // dtype.itemsize, CHUNK_BYTES // dtype.itemsize]
    return [0, 1, 2, 77, *(edge + more for edge in edges for more in (-1, 0, 1)), 3 * edges[1] + 77, 4 * edges[1]]


def check_sizes(size: int, dtype: torch.dtype, op: Any, numels: list[int] | None = None) -> None:
    def on_rank(engine: ShmEngine) -> None:
        for numel in numels or sizes_of(dtype):
            terms = [values_of(dtype, numel, rank) for rank in range(engine.size)]
            # All are integers, or so few that torch adds them in this order too.
            expected = reduce(torch.add, terms)
            for where in ("ordinary", "resident", "mixed"):
                tensor = placed(engine, terms[engine.rank], where)
                begin_all_reduce(engine, tensor, op).wait()
                assert torch.equal(tensor, expected), (numel, where)
                # Overwriting the tensor right after the return must not disturb the other ranks.
                tensor.fill_(engine.rank)

    run_engines(size, on_rank)


def test_wherever_tensors_lie_each_rank_has_the_whole_sum() -> None:
    check_sizes(3, torch.float32, Op.SUM, [PAYLOAD_BYTES // 4 + 1, CHUNK_BYTES // 4 + 77])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_size_is_summed_to_its_last_element(size: int) -> None:
    check_sizes(size, torch.uint8, Op.SUM)
    check_sizes(size, torch.float32, Op.SUM)


@pytest.mark.slow
def test_eight_ranks_sum_every_size() -> None:
    check_sizes(8, torch.int16, Op.SUM)


def test_a_tensor_of_any_shape_and_one_stored_channels_last_are_summed() -> None:
    def on_rank(engine: ShmEngine) -> None:
        picture = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last) * (engine.rank + 1)
        number = torch.tensor(1.5)
        begin_all_reduce(engine, picture).wait()
        begin_all_reduce(engine, number).wait()
        assert torch.equal(picture, torch.arange(24.0).view(1, 2, 3, 4) * 3)
        assert number.item() == 3
        with pytest.raises(ValueError, match="not contiguous"):
            begin_all_reduce(engine, torch.ones(4, 4).t()[:2])

    run_engines(2, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ordinary", "resident", "mixed"])
def test_the_bits_are_the_same_in_every_run(where: str) -> None:
    def on_rank(engine: ShmEngine) -> bytes:
        tensor = placed(engine, values_of(torch.bfloat16, CHUNK_BYTES + 777, engine.rank), where)
        begin_all_reduce(engine, tensor).wait()
        return bits(tensor)

    results = {result for _ in range(2) for result in run_engines(3, on_rank)}
    terms = [values_of(torch.bfloat16, CHUNK_BYTES + 777, rank) for rank in range(3)]
    assert results == {bits(reference(Op.SUM, terms))}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_reduce_scatter_leaves_each_rank_its_part(size: int) -> None:
    def on_rank(engine: ShmEngine) -> None:
        for dtype, op in ((torch.float16, Op.SUM), (torch.bfloat16, Op.MAX), (torch.float32, Op.AVG)):
            for numel in sizes_of(dtype):
                parts_of = [
                    [values_of(dtype, numel, rank * size + part) for part in range(size)] for rank in range(size)
                ]
                output = torch.empty(numel, dtype=dtype)
                engine.reduce_scatter(output, parts_of[engine.rank], dist.ReduceOp(op)).wait()
                expected = reference(op, [parts[engine.rank] for parts in parts_of])
                assert bits(output) == bits(expected), (dtype, numel)

    run_engines(size, on_rank)


@pytest.mark.parametrize("where", ["ordinary", "resident", "mixed"])
def test_the_parts_may_be_one_tensor_and_the_output_one_of_them(where: str) -> None:
    def on_rank(engine: ShmEngine) -> None:
        for numel in (0, 3, PAYLOAD_BYTES, CHUNK_BYTES // 4 + 5):
            terms = [values_of(torch.float32, numel * engine.size, rank) for rank in range(engine.size)]
            whole = placed(engine, terms[engine.rank], where)
            output = whole[numel * engine.rank :][:numel]
            counts = [numel] * engine.size
            engine.reduce_scatter_base(output, whole, counts, dist.ReduceScatterOptions()).wait()
            assert torch.equal(output, sum(terms)[numel * engine.rank :][:numel]), numel

    run_engines(3, on_rank)


def test_reduce_scatter_refuses_parts_that_do_not_fit() -> None:
    def on_rank(engine: ShmEngine) -> None:
        for parts in ([torch.ones(2)], [torch.ones(2), torch.ones(3)]):
            with pytest.raises(ValueError, match="reduce-scatter needs an input for each of the 2 ranks"):
                engine.reduce_scatter(torch.empty(2), parts, dist.ReduceOp(Op.SUM))
        with pytest.raises(ValueError, match="BAND needs integers"):
            engine.reduce_scatter(torch.empty(2), [torch.ones(2)] * 2, dist.ReduceOp(Op.BAND))
        # It had not begun.
        engine.barrier().wait()

    run_engines(2, on_rank)
