"""Ranks as threads: each has a gloo process group of its own over one store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.comm.gloo import InitTimeout
from hvdlite.comm.group import Group
from hvdlite.comm.torch_engine import TorchEngine
from hvdlite.control.generation import Generation
from hvdlite.runtime.process_set import Membership, ProcessSet
from hvdlite.shm.setup import meet, open_segment
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.signing import Signer

TIMEOUT = timedelta(seconds=20)


class ThreadEngineFactory:
    """Gloo process groups of one rank, over a store in memory that the other threads share."""

    def __init__(self, store: dist.Store, rank: int, size: int, wrap: Callable[[Any], Any]) -> None:
        self._store, self._rank, self._size, self._wrap = store, rank, size, wrap
        self._opened = 0

    def open(self) -> Any:
        store = dist.PrefixStore(f"channel{self._opened}", self._store)
        self._opened += 1
        group = dist.ProcessGroupGloo(store, self._rank, self._size, TIMEOUT)
        # One that is dropped at once must not be gone before the others have connected to it.
        group.allreduce([torch.zeros(1)]).wait()
        return self._wrap(TorchEngine(group))

    def close(self, engine: Any, /) -> None:
        return

    def among(self, places: Sequence[int], place: int, token: str, /) -> ThreadEngineFactory:
        return ThreadEngineFactory(dist.PrefixStore(token, self._store), place, len(places), self._wrap)


class SharedEngineFactory(ThreadEngineFactory):
    """The same ranks over engines in shared memory."""

    def open(self) -> Any:
        store = dist.PrefixStore(f"channel{self._opened}", self._store)
        self._opened += 1
        context = meet(store, self._rank, self._size, open_segment(), InitTimeout(TIMEOUT), Signer(b"test"))
        return self._wrap(ShmEngine(context, "test"))

    def close(self, engine: Any, /) -> None:
        engine.close()

    def among(self, places: Sequence[int], place: int, token: str, /) -> SharedEngineFactory:
        return SharedEngineFactory(dist.PrefixStore(token, self._store), place, len(places), self._wrap)


ENGINES: dict[str, type[ThreadEngineFactory]] = {"gloo": ThreadEngineFactory, "shared memory": SharedEngineFactory}


def generation_of(group: Group) -> Generation:
    """What the optimizers and operations of a group share that has no world: the same at each call.

    It is kept in the group itself: it refers to the group, so that a table would keep both, and the group's threads.
    """
    return group.__dict__.setdefault("_generation_of_tests", Generation(watch=group._watch))


def set_of(group: Group) -> ProcessSet:
    """The ranks of a group as what the functions that take a ``process_set`` want."""
    process_set = ProcessSet(group.ranks)
    process_set.register(Membership(group.set_id, group.ranks[group.rank], group, generation_of(group)))
    return process_set


def run_ranks(
    size: int,
    function: Callable[[Group], Any],
    make_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
    engine: str = "gloo",
) -> list[Any]:
    """``function(group)`` on every rank; results by rank. The first rank's exception, if any, is raised.

    ``make_wrapper`` is called once per rank; what it returns wraps each of the rank's engines, which are of the kind
    ``engine``, one of `ENGINES`.
    """
    outcomes = attempt_ranks(size, function, make_wrapper, engine)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise errors[0]
    return outcomes


def attempt_ranks(
    size: int,
    function: Callable[[Group], Any],
    make_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
    engine: str = "gloo",
) -> list[Any]:
    """Like `run_ranks`, but an exception is the rank's outcome."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        wrap = make_wrapper() if make_wrapper else lambda made: made
        hosts = [f"node{i}" for i in range(size)]
        engine_factory = ENGINES[engine](store, rank, size, wrap)
        return function(Group(engine_factory, rank, size, hosts, signer=Signer(b"threads of one process")))

    return attempt_threads(size, run)


def attempt_threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """What ``function(rank)`` returns or raises on each of so many threads."""
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - it is handed to the test
            outcomes[rank] = error

    # Of one name, as the main threads of processes are: names tell threads apart that call what has none itself.
    # Intra-op threads of several ranks would fight over the cores.
    torch.set_num_threads(1)
    threads = [threading.Thread(target=run, args=(rank,), name="rank", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


class CountingEngine:
    """A process group that notes every collective as (operation, elements), in one list per rank."""

    def __init__(self, engine: Any, calls: list[tuple[str, int]]) -> None:
        self._engine = engine
        self.calls = calls

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("allreduce", tensors[0].numel()))
        return self._engine.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("broadcast", tensors[0].numel()))
        return self._engine.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        self.calls.append(("allgather", inputs[0].numel()))
        return self._engine.allgather(outputs, inputs)

    def alltoall_base(self, output: torch.Tensor, tensor: torch.Tensor, *counts_and_options: Any) -> Any:
        self.calls.append(("alltoall", tensor.numel()))
        return self._engine.alltoall_base(output, tensor, *counts_and_options)

    def reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, *counts_and_options: Any) -> Any:
        self.calls.append(("reduce_scatter", tensor.numel()))
        return self._engine.reduce_scatter_base(output, tensor, *counts_and_options)

    def revoke(self, reason: str) -> None:
        self._engine.revoke(reason)

    def quiesce(self, reason: str) -> None:
        self._engine.quiesce(reason)


def counting() -> Callable[[Any], Any]:
    """For `run_ranks`: every engine of a rank counts into ``group.engine.calls``."""
    calls: list[tuple[str, int]] = []
    return lambda engine: CountingEngine(engine, calls)
