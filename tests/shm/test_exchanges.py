"""Broadcast, all-gather, all-to-all, and `torch.distributed`'s functions that use them, at every size and root."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm.engines import attempt_threads, begin_broadcast, run_engines
from torch._C._distributed_c10d import AllToAllOptions

from hvdlite.errors import MismatchError
from hvdlite.shm.backend import ShmProcessGroup
from hvdlite.shm.control_block import PAYLOAD_BYTES
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.shm.shm_operation import CHUNK_BYTES

FEW = [0, 1, 77, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, CHUNK_BYTES + 1]
MANY = [*FEW, PAYLOAD_BYTES - 1, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 77]
PATTERN = torch.arange(251, dtype=torch.uint8).repeat(MANY[-1] // 251 + 3)


def bytes_of(rank: int, numel: int, number: int = 0) -> torch.Tensor:
    shift = (rank * 31 + number * 5) % 251
    return PATTERN[shift : shift + numel].clone()


def check_broadcasts_and_gathers(size: int, sizes: list[int]) -> None:
    def on_rank(engine: ShmEngine) -> None:
        for numel in sizes:
            for root in {0, engine.size // 2, engine.size - 1}:
                tensor = bytes_of(engine.rank, numel)
                begin_broadcast(engine, tensor, root).wait()
                assert torch.equal(tensor, bytes_of(root, numel)), (numel, root)
            outputs = [torch.empty(numel, dtype=torch.uint8) for _ in range(engine.size)]
            engine.allgather([outputs], [bytes_of(engine.rank, numel)]).wait()
            for rank, output in enumerate(outputs):
                assert torch.equal(output, bytes_of(rank, numel)), (numel, rank)

    run_engines(size, on_rank)


def test_a_root_and_all_ranks_give_what_they_have_to_all() -> None:
    check_broadcasts_and_gathers(3, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_so_it_is_at_other_sizes(size: int) -> None:
    check_broadcasts_and_gathers(size, MANY)


@pytest.mark.parametrize("staged_on", ["no rank", "rank 1", "all ranks"])
@pytest.mark.parametrize(
    "counts",
    [[3, 0, 5], [CHUNK_BYTES + 1, 77, 2 * CHUNK_BYTES], [0, 0, 0], [PAYLOAD_BYTES] * 3],
    ids=str,
)
def test_each_rank_takes_what_it_wants_of_the_others_parts(counts: list[int], staged_on: str) -> None:
    bounds = [sum(counts[:rank]) for rank in range(4)]

    def on_rank(engine: ShmEngine) -> None:
        is_staged = staged_on in ("all ranks", f"rank {engine.rank}")
        for number in range(3):
            flat = torch.empty(bounds[-1], dtype=torch.uint8)
            if not is_staged:
                resident = engine.zeros(bounds[-1], torch.uint8)
                assert resident is not None
                flat = resident
            flat.fill_(255)
            start, stop = bounds[engine.rank : engine.rank + 2]
            flat[start:stop].copy_(bytes_of(engine.rank, stop - start, number))
            wanted = []
            for rank in range(3):
                if rank != engine.rank and counts[rank] > 1:
                    # All but the first byte, in two pieces, of which one begins within a chunk.
                    middle = bounds[rank] + 1 + counts[rank] // 3
                    for begin, end in ((bounds[rank] + 1, middle), (middle, bounds[rank + 1])):
                        wanted.append((begin, torch.empty(end - begin, dtype=torch.uint8)))
            engine.allgather_parts(flat, counts, [(begin, piece) for begin, piece in wanted if piece.numel()]).wait()
            for begin, piece in wanted:
                rank = next(rank for rank in range(3) if bounds[rank] <= begin < bounds[rank + 1])
                whole = bytes_of(rank, counts[rank], number)
                at = begin - bounds[rank]
                assert torch.equal(piece, whole[at : at + piece.numel()]), (rank, begin)

    run_engines(3, on_rank)


def test_ranks_that_gather_different_parts_get_an_error_on_all_of_them() -> None:
    def on_rank(engine: ShmEngine) -> None:
        counts = [4, 6] if engine.rank else [5, 5]
        with pytest.raises(MismatchError, match="all-gather of parts of 10 elements"):
            engine.allgather_parts(torch.zeros(10), counts, []).wait()
        with pytest.raises(
            ValueError, match=r"all-gather of parts: the counts \[3, 3\] of 2 ranks are not those of 10 elements"
        ):
            engine.allgather_parts(torch.zeros(10), [3, 3], [])

    run_engines(2, on_rank)


def test_tensors_of_any_dtype_travel() -> None:
    def on_rank(engine: ShmEngine) -> None:
        for dtype in (torch.complex128, torch.bool, torch.float8_e8m0fnu, torch.float64):
            tensor = bytes_of(engine.rank, 32).clamp(max=1).view(dtype)
            expected = bytes_of(1, 32).clamp(max=1)
            begin_broadcast(engine, tensor, 1).wait()
            assert torch.equal(tensor.view(torch.uint8), expected)

    run_engines(2, on_rank)


def part(sender: int, receiver: int, unit: int) -> torch.Tensor:
    """Returns the number of elements: none for the rank after the next; otherwise more for each receiver."""
    numel = 0 if (receiver - sender) % 3 == 2 else (receiver + 1) * unit + sender
    return bytes_of(sender, numel, receiver)


def check_all_to_all(size: int, units: list[int]) -> None:
    def on_rank(engine: ShmEngine) -> None:
        ranks = range(engine.size)
        for unit in units:
            parts = [part(engine.rank, other, unit) for other in ranks]
            expected = [part(other, engine.rank, unit) for other in ranks]
            outputs = [torch.empty_like(each) for each in expected]
            engine.alltoall(outputs, parts).wait()
            assert all(map(torch.equal, outputs, expected)), unit
            output = torch.empty(sum(each.numel() for each in expected), dtype=torch.uint8)
            counts = [[each.numel() for each in side] for side in (expected, parts)]
            engine.alltoall_base(output, torch.cat(parts), *counts, AllToAllOptions()).wait()
            assert torch.equal(output, torch.cat(expected)), unit

    run_engines(size, on_rank)


def test_ranks_give_each_other_parts_of_different_sizes() -> None:
    check_all_to_all(3, [0, 1, PAYLOAD_BYTES])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_so_it_is_with_large_parts(size: int) -> None:
    check_all_to_all(size, [0, 5, CHUNK_BYTES // size + 64, CHUNK_BYTES + 3])


def test_nothing_is_given_to_nobody() -> None:
    def on_rank(engine: ShmEngine) -> None:
        empty = torch.empty(0)
        engine.alltoall([empty] * 2, [empty] * 2).wait()
        engine.alltoall_base(empty, empty, [], [], AllToAllOptions()).wait()
        engine.barrier().wait()

    run_engines(2, on_rank)


def test_parts_that_are_not_what_is_expected_are_an_error_on_every_rank() -> None:
    def on_rank(engine: ShmEngine) -> str:
        outputs = [torch.empty(2), torch.empty(3 if engine.rank == 2 else 2), torch.empty(2)]
        with pytest.raises(MismatchError) as caught:
            engine.alltoall(outputs, [torch.ones(2)] * 3).wait()
        return str(caught.value)

    for words in run_engines(3, on_rank):
        assert "rank 1 of this group" in words
        assert "sends 8 bytes to rank 2 of this group" in words
        assert "expects 12" in words


def test_arguments_that_do_not_fit_are_refused_before_anything_is_begun() -> None:
    def on_rank(engine: ShmEngine) -> None:
        one, two = torch.ones(1), torch.ones(2)
        with pytest.raises(ValueError, match="there is no rank 2 among the 2"):
            begin_broadcast(engine, one, 2)
        with pytest.raises(ValueError, match="all-gather needs an output for each of the 2 ranks"):
            engine.allgather([[one, two]], [one])
        with pytest.raises(ValueError, match="all-to-all needs an input for each of the 2 ranks, not 1"):
            engine.alltoall([one, one], [one])
        with pytest.raises(ValueError, match="has 2 rows"):
            engine.alltoall_base(two, two, [1, 1], [1, 2], AllToAllOptions())
        with pytest.raises(ValueError, match="cannot be divided evenly among 2 ranks"):
            engine.alltoall_base(two, torch.ones(3), [], [], AllToAllOptions())
        engine.barrier().wait()

    run_engines(2, on_rank)


def run_process_groups(size: int, function: Any) -> None:
    """Runs ``function(group)`` on threads, each with a process group of the backend."""
    store = dist.HashStore()

    def on_rank(rank: int) -> None:
        group = ShmProcessGroup(store, rank, size, timedelta(seconds=30))
        try:
            function(group)
        finally:
            group.shutdown()

    for outcome in attempt_threads(size, on_rank):
        if outcome is not None:
            raise outcome


@pytest.mark.parametrize("numel", [2, PAYLOAD_BYTES])
def test_the_backend_gathers_scatters_and_reduces_to_one(numel: int) -> None:
    def on_rank(group: Any) -> None:
        rank, size, root = group.rank(), group.size(), 1
        mine, is_root = torch.full((numel,), rank + 1.0), rank == root
        each = [torch.full((numel,), other + 1.0) for other in range(size)]

        options: Any = dist.GatherOptions()
        options.rootRank = root
        gathered = [torch.empty(numel) for _ in range(size)] if is_root else []
        group.gather([gathered] if is_root else [], [mine], options).wait()
        assert all(map(torch.equal, gathered, each))

        options = dist.ScatterOptions()
        options.rootRank = root
        output = torch.empty(numel)
        group.scatter([output], [[2 * value for value in each]] if is_root else [], options).wait()
        assert torch.equal(output, 2 * mine)

        options = dist.ReduceOptions()
        options.rootRank = root
        reduced = mine.clone()
        group.reduce([reduced], options).wait()
        assert torch.equal(reduced, sum(each) if is_root else mine)

    run_process_groups(3, on_rank)


def test_the_backend_has_the_forms_that_torch_calls() -> None:
    def on_rank(group: Any) -> None:
        rank = group.rank()
        output = torch.empty(4)
        group._allgather_base(output, torch.full((2,), float(rank))).wait()
        assert output.tolist() == [0, 0, 1, 1]
        part = torch.empty(2)
        group._reduce_scatter_base(part, torch.arange(4.0), dist.ReduceScatterOptions()).wait()
        assert part.tolist() == [[0, 2], [4, 6]][rank]
        first, second = torch.ones(2), torch.ones(3, dtype=torch.int32)
        group.allreduce_coalesced([first, second]).wait()
        assert first.tolist() == [2, 2]
        assert second.tolist() == [2, 2, 2]
        received = torch.empty(2)
        group.alltoall_base(received, torch.tensor([rank, rank + 10.0]), [], []).wait()
        assert received.tolist() == [[0, 1], [10, 11]][rank]
        group.barrier().wait()
        assert group.getBackendName() == "hvdshm"
        for form in (group.send, group.recv, group.recv_anysource):
            with pytest.raises(NotImplementedError, match="use a gloo group"):
                form([torch.ones(1)], 0, 0)
        with pytest.raises(ValueError, match="5 elements cannot be divided evenly among 2 ranks"):
            group._allgather_base(torch.empty(5), torch.empty(2))

    run_process_groups(2, on_rank)
