"""Ranks as threads, each with an engine in shared memory that takes it for a process, as their pids differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import attempt_threads

from hvdlite.comm.gloo import InitTimeout
from hvdlite.shm.setup import exchange_control_blocks, open_segment
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.signing import Signer

TIMEOUT_S = 60.0


def run_engines(size: int, function: Callable[[ShmEngine], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Runs ``function(engine)`` on every rank; returns the results by rank, or raises the first rank's exception."""
    outcomes = attempt_engines(size, function, timeout_s)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def attempt_engines(size: int, function: Callable[[ShmEngine], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Does what `run_engines` does, but returns a rank's exception instead of raising it."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        engine = make_engine(dist.PrefixStore("engine", store), rank, size, timeout_s)
        try:
            return function(engine)
        finally:
            engine.close()

    return attempt_threads(size, run)


class PatientStart(InitTimeout):
    """Waits for `TIMEOUT_S` while ranks open their engines, however short the timeout of their collectives is."""

    def left(self) -> timedelta:
        return timedelta(seconds=TIMEOUT_S)


def make_engine(store: dist.Store, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> ShmEngine:
    """Makes one rank's engine in its own memory, whose collectives wait for ``timeout_s``.

    All ranks must make theirs at the same time.
    """
    return ShmEngine(
        exchange_control_blocks(
            store, rank, size, open_segment, PatientStart(timedelta(seconds=timeout_s)), Signer(b"test")
        ),
        "test",
    )


def begin_all_reduce(engine: ShmEngine, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    """Begins an all-reduce and returns its work."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return engine.allreduce([tensor], options)


def begin_broadcast(engine: ShmEngine, tensor: torch.Tensor, root: int = 0) -> Any:
    """Begins a broadcast and returns its work."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return engine.broadcast([tensor], options)


def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds: a thread in the background takes some time."""
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
