"""If ranks of an engine call different operations, each gets an error that names both, and the engine stops working."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm.engines import begin_all_reduce, begin_broadcast, run_engines

from hvdlite.errors import MismatchError
from hvdlite.shm.control_block import PAYLOAD_BYTES
from hvdlite.shm.shm_engine import ShmEngine

LARGE = PAYLOAD_BYTES + 1


def gathered(engine: ShmEngine, tensor: torch.Tensor) -> Any:
    return engine.allgather([[torch.empty_like(tensor) for _ in range(engine.size)]], [tensor])


def reduce_scattered(engine: ShmEngine, numel: int) -> Any:
    parts = [torch.ones(numel)] * engine.size
    return engine.reduce_scatter(torch.empty(numel), parts, dist.ReduceOp(dist.ReduceOp.SUM))


def exchanged(engine: ShmEngine) -> Any:
    return engine.alltoall([torch.empty(2)] * engine.size, [torch.ones(2)] * engine.size)


# What most ranks call, what one rank calls, and the words for both.
CASES: dict[str, tuple[Callable[[ShmEngine], Any], Callable[[ShmEngine], Any], str, str]] = {
    "kind, small": (
        lambda engine: begin_all_reduce(engine, torch.ones(2)),
        lambda engine: engine.barrier(),
        "begins an all-reduce of 2 elements of torch.float32 by SUM",
        "waits at a barrier",
    ),
    "kind, large and small": (
        lambda engine: gathered(engine, torch.ones(LARGE)),
        lambda engine: begin_broadcast(engine, torch.ones(3), 1),
        f"begins an all-gather of {LARGE} elements of torch.float32",
        "begins a broadcast of 3 elements of torch.float32 from rank 1",
    ),
    "kind, both large": (
        lambda engine: reduce_scattered(engine, LARGE),
        exchanged,
        f"begins a reduce-scatter of {LARGE} elements of torch.float32 by SUM",
        "begins an all-to-all",
    ),
    "op": (
        lambda engine: begin_all_reduce(engine, torch.ones(LARGE), dist.ReduceOp.MIN),
        lambda engine: begin_all_reduce(engine, torch.ones(LARGE), dist.ReduceOp.MAX),
        "by MIN",
        "by MAX",
    ),
    "dtype": (
        lambda engine: begin_all_reduce(engine, torch.ones(2)),
        lambda engine: begin_all_reduce(engine, torch.ones(2, dtype=torch.int32)),
        "torch.float32",
        "torch.int32",
    ),
    "size, one resident": (
        lambda engine: begin_all_reduce(engine, torch.ones(LARGE)),
        lambda engine: begin_all_reduce(engine, engine.zeros(LARGE + 1, torch.float32)),  # type: ignore[arg-type]
        f"of {LARGE} elements",
        f"of {LARGE + 1} elements",
    ),
    "root": (
        lambda engine: begin_broadcast(engine, torch.ones(LARGE), 0),
        lambda engine: begin_broadcast(engine, torch.ones(LARGE), 1),
        "from rank 0",
        "from rank 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_both_are_named_on_every_rank_and_the_engine_is_of_no_use_any_more(case: str) -> None:
    usual, other, usual_words, other_words = CASES[case]

    def on_rank(engine: ShmEngine) -> None:
        begin_all_reduce(engine, torch.ones(2)).wait()
        with pytest.raises(MismatchError) as caught:
            (other if engine.rank == 1 else usual)(engine).wait()
        words = str(caught.value)
        assert "rank 0 of this group (pid " in words.partition(usual_words)[0]
        assert "rank 1 of this group (pid " in words.partition(other_words)[0]
        assert usual_words in words
        assert other_words in words
        with pytest.raises(RuntimeError, match=r"this process group has failed before \(.*\): make a new one") as later:
            engine.barrier()
        assert isinstance(later.value.__cause__, MismatchError)

    run_engines(3, on_rank)


def test_what_was_begun_before_is_done_and_what_is_begun_after_is_not() -> None:
    def on_rank(engine: ShmEngine) -> None:
        before = [begin_all_reduce(engine, torch.ones(2)) for _ in range(3)]
        wrong = begin_all_reduce(engine, torch.ones(2 + engine.rank))
        # Refused, if this rank knows of it by now.
        with pytest.raises((MismatchError, RuntimeError)):
            begin_all_reduce(engine, torch.ones(2)).wait()
        for work in before:
            work.wait()
        with pytest.raises(MismatchError):
            wrong.wait()

    run_engines(2, on_rank)
