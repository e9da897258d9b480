"""How many bytes an all-reduce writes, counted by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import attempt_threads, run_ranks
from shm.engines import make_engine
from torch.utils._python_dispatch import TorchDispatchMode

from hvdlite.comm.group import Group
from hvdlite.comm.reduce_op import Average
from hvdlite.ops.reduction import Reduction
from hvdlite.shm.arithmetic import Arithmetic
from hvdlite.shm.collectives import SharedAllReduce
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.shm.shm_operation import CHUNK_BYTES, SLOTS_BYTES, ShmOperation

SUM = dist.ReduceOp.RedOpType.SUM


class WrittenBytes(TorchDispatchMode):
    """Counts the bytes that operators write: into given memory, and into any other."""

    def __init__(self, memories: Sequence[tuple[int, int]] = ()) -> None:
        """``memories`` has the address at which each begins, and at which it ends."""
        super().__init__()
        self._memories = memories
        self.inside = self.outside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments)
        if isinstance(result, torch.Tensor) and not is_view and "empty" not in func.name():
            if any(start <= result.data_ptr() < stop for start, stop in self._memories):
                self.inside += result.nbytes
            else:
                self.outside += result.nbytes
        return result


def in_turns(steps: Sequence[Any], engines: Sequence[ShmEngine]) -> None:
    """Runs all ranks' steps, each when the condition that it waits for holds."""
    awaited: dict[int, Any] = dict.fromkeys(range(len(steps)))
    while awaited:
        before = len(awaited), list(awaited.values())
        for rank in list(awaited):
            try:
                while awaited[rank] is None or engines[rank]._context.peers.reached(*awaited[rank]):
                    awaited[rank] = next(steps[rank])
            except StopIteration:
                del awaited[rank]
        assert before != (len(awaited), list(awaited.values())), "no rank can go on"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_each_byte_goes_through_the_segment_once_and_into_the_result_once(size: int, in_place: bool) -> None:
    store = dist.HashStore()
    engines = attempt_threads(size, lambda rank: make_engine(store, rank, size))
    numel = (5 * CHUNK_BYTES // 2) // 4
    sources = [torch.arange(numel, dtype=torch.float32) + rank for rank in range(size)]
    results = sources if in_place else [torch.empty(numel) for _ in sources]
    expected = torch.arange(numel, dtype=torch.float32) * size + sum(range(size))
    ends = [engine._context.slots[engine.rank][0].data_ptr() + SLOTS_BYTES for engine in engines]
    slots = [(end - SLOTS_BYTES, end) for end in ends]
    steps = []
    for engine, source, result in zip(engines, sources, results, strict=True):
        operation = ShmOperation(engine._context, 1, 0, 0, 0, 0, numel)
        into, read = (tensor.view(torch.uint8) for tensor in (result, source))
        arithmetic = Arithmetic(SUM, torch.float32, size)
        collective = SharedAllReduce(operation, into, torch.float32, arithmetic, into if in_place else read)
        steps.append(collective.steps())
    with WrittenBytes(slots) as written:
        in_turns(steps, engines)
    assert all(torch.equal(result, expected) for result in results)
    nbytes = numel * 4
    # A rank stages the part of its tensor that others sum, and then its own sums. A sum of three terms writes twice.
    passes = nbytes * (size - 2)
    assert written.inside == size * nbytes + passes
    assert written.outside == size * nbytes
    for engine in engines:
        engine.close()


def test_an_average_of_a_tensor_that_stays_copies_nothing_before_and_divides_on_the_way() -> None:
    numel = 4 * CHUNK_BYTES // 4

    def on_rank(group: Group) -> tuple[torch.Tensor, int]:
        tensor = torch.full((numel,), group.rank + 1.0)
        with WrittenBytes() as written:
            (result,) = Reduction(Average).all_reduced(group, [tensor], group.size, "test")
        assert torch.equal(tensor, torch.full((numel,), group.rank + 1.0))
        return result, written.outside

    for result, written in run_ranks(2, on_rank, engine="shared memory"):
        assert torch.equal(result, torch.full((numel,), 1.5))
        # Slots and result, once, and half of it divided; the engine's other thread is not counted.
        assert written <= 2.5 * numel * 4
