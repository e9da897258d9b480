"""Ranks as threads: each has a gloo process group of its own over one store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.collective import Group

TIMEOUT = timedelta(seconds=20)


def run_ranks(size: int, function: Callable[[Group], Any], engine: Callable[[Any], Any] = lambda e: e) -> list[Any]:
    """``function(group)`` on every rank; results by rank. The first rank's exception, if any, is raised.

    ``engine`` may wrap each rank's process group, to count or to disturb what goes through it.
    """
    outcomes = attempt_ranks(size, function, engine)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise errors[0]
    return outcomes


def attempt_ranks(size: int, function: Callable[[Group], Any], engine: Callable[[Any], Any] = lambda e: e) -> list[Any]:
    """Like `run_ranks`, but an exception is the rank's outcome."""
    store = dist.HashStore()
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            backend = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
            group = Group(engine(backend), rank, size, [f"node{i}" for i in range(size)])
            outcomes[rank] = function(group)
        except BaseException as error:
            outcomes[rank] = error

    # Intra-op threads of several ranks would fight over the cores.
    torch.set_num_threads(1)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


class CountingEngine:
    """A process group that notes every collective as (operation, elements)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[tuple[str, int]] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("allreduce", tensors[0].numel()))
        return self._engine.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("broadcast", tensors[0].numel()))
        return self._engine.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        self.calls.append(("allgather", inputs[0].numel()))
        return self._engine.allgather(outputs, inputs)
