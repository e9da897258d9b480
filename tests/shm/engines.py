"""Ranks as threads, each with an engine in shared memory, between which there is no difference but their pid."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import ThreadEngineFactory, attempt_threads

from hvdlite.comm.gloo import InitTimeout
from hvdlite.shm.setup import meet, open_segment
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.signing import Signer

TIMEOUT_S = 30.0


def run_engines(size: int, function: Callable[[ShmEngine], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """``function(engine)`` on every rank; results by rank. The first rank's exception, if any, is raised."""
    outcomes = attempt_engines(size, function, timeout_s)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def attempt_engines(size: int, function: Callable[[ShmEngine], Any], timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Like `run_engines`, but an exception is the rank's outcome."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        engine = make_engine(dist.PrefixStore("engine", store), rank, size, timeout_s)
        try:
            return function(engine)
        finally:
            engine.close()

    return attempt_threads(size, run)


def make_engine(store: dist.Store, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> ShmEngine:
    """One rank's, in memory of its own. All ranks must make theirs at the same time."""
    return ShmEngine(
        meet(store, rank, size, open_segment(), InitTimeout(timedelta(seconds=timeout_s)), Signer(b"test")), "test"
    )


class SharedEngineFactory(ThreadEngineFactory):
    """Stands in for `ranks.ThreadEngineFactory`: the same ranks, with engines in shared memory."""

    def open(self) -> Any:
        store = dist.PrefixStore(f"channel{self._opened}", self._store)
        self._opened += 1
        return self._wrap(make_engine(store, self._rank, self._size))

    def close(self, engine: Any, /) -> None:
        engine.close()

    def among(self, places: Sequence[int], place: int, token: str, /) -> SharedEngineFactory:
        return SharedEngineFactory(dist.PrefixStore(token, self._store), place, len(places), self._wrap)


def begin_all_reduce(engine: ShmEngine, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    """Its work."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return engine.allreduce([tensor], options)


def begin_broadcast(engine: ShmEngine, tensor: torch.Tensor, root: int = 0) -> Any:
    """Its work."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return engine.broadcast([tensor], options)


def until(condition: Callable[[], bool]) -> None:
    """Return when it is so: what a thread in the background does, it does at some time."""
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
