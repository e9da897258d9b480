"""Runs ranks as threads of one process; each has its own gloo or shared-memory engines, over one store in memory."""

from __future__ import annotations

import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.calls.generation import Generation
from hvdlite.comm.engine import DelegatingEngine
from hvdlite.comm.gloo import InitTimeout
from hvdlite.comm.group import Group
from hvdlite.comm.torch_engine import TorchEngine
from hvdlite.runtime.process_set import ProcessSet, SetMembership
from hvdlite.shm.setup import exchange_control_blocks, open_segment
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.signing import Signer

TIMEOUT = timedelta(seconds=60)

# Pages of shared memory are mapped when they are touched, since most tests touch few of an engine's.
mmap.MAP_POPULATE = 0


@functools.cache
def _gloo_device(pid: int) -> Any:
    """Returns the event loop for all groups of this process: each would take 10 ms to end."""
    return dist.ProcessGroupGloo.create_default_device()


class ThreadEngineFactory:
    """Makes one rank's gloo process groups, over a store in memory that all threads share."""

    def __init__(self, store: dist.Store, rank: int, size: int, wrap: Callable[[Any], Any]) -> None:
        self._store, self._rank, self._size, self._wrap = store, rank, size, wrap
        self._opened = 0

    def open(self) -> Any:
        store = dist.PrefixStore(f"channel{self._opened}", self._store)
        self._opened += 1
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_gloo_device(os.getpid())], 2, TIMEOUT
        group = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        # Wait until the others have connected: the group may be dropped right after this.
        group.allreduce([torch.zeros(1)]).wait()
        return self._wrap(TorchEngine(group))

    def among(self, places: Sequence[int], place: int, token: str, /) -> ThreadEngineFactory:
        return ThreadEngineFactory(dist.PrefixStore(token, self._store), place, len(places), self._wrap)


class SharedEngineFactory(ThreadEngineFactory):
    """Makes one rank's shared-memory engines."""

    def open(self) -> Any:
        store = dist.PrefixStore(f"channel{self._opened}", self._store)
        self._opened += 1
        context = exchange_control_blocks(
            store, self._rank, self._size, open_segment, InitTimeout(TIMEOUT), Signer(b"test")
        )
        return self._wrap(ShmEngine(context, "test"))

    def among(self, places: Sequence[int], place: int, token: str, /) -> SharedEngineFactory:
        return SharedEngineFactory(dist.PrefixStore(token, self._store), place, len(places), self._wrap)


ENGINES: dict[str, type[ThreadEngineFactory]] = {"gloo": ThreadEngineFactory, "shared memory": SharedEngineFactory}


def generation_of(group: Group) -> Generation:
    """Returns the generation of a group that has no world; the same one at each call.

    It is stored in the group itself: it refers to the group, so a table here would keep the group and its threads.
    """
    return group.__dict__.setdefault("_generation_of_tests", Generation(watch=group._watch))


def set_of(group: Group) -> ProcessSet:
    """Makes a registered process set of the group's ranks, for functions that take a ``process_set``."""
    process_set = ProcessSet(group.ranks)
    process_set.register(SetMembership(group.set_id, group.ranks[group.rank], group, generation_of(group)))
    return process_set


def run_ranks(
    size: int,
    function: Callable[[Group], Any],
    make_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
    engine: str = "gloo",
) -> list[Any]:
    """Calls ``function(group)`` on every rank and returns the results by rank; raises the first rank's exception.

    ``make_wrapper`` is called once per rank; the function that it returns wraps each of the rank's engines. ``engine``
    is the kind of the engines, a key of `ENGINES`.
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
    hosts: Sequence[str] | None = None,
) -> list[Any]:
    """Does what `run_ranks` does, but returns a rank's exception instead of raising it.

    ``hosts`` are the ranks' hosts; without them each rank has its own.
    """
    places = [f"node{i}" for i in range(size)] if hosts is None else list(hosts)
    store = dist.HashStore()
    groups: list[Group] = []

    def run(rank: int) -> Any:
        wrap = make_wrapper() if make_wrapper else lambda made: made
        engine_factory = ENGINES[engine](store, rank, size, wrap)
        group = Group(engine_factory, rank, size, places, signer=Signer(b"threads of one process"))
        groups.append(group)
        return function(group)

    outcomes = attempt_threads(size, run)
    # Not left to the garbage collector, which comes seldom: by then there are thousands of gloo's threads.
    for error in attempt_threads(len(groups), lambda number: groups[number].close()):
        if error is not None:
            raise error
    return outcomes


def attempt_threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Calls ``function(rank)`` in ``size`` threads; returns what each returned, or the exception that it raised."""
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        # In each thread: MKL's number of threads is this thread's own, and decides about the last bits.
        torch.set_num_threads(1)
        try:
            outcomes[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - the test gets it
            outcomes[rank] = error

    # The threads have one name, as the main threads of real ranks do: hvdlite distinguishes unnamed collectives by the
    # name of their thread. One intra-op thread each, because the ranks share the cores.
    torch.set_num_threads(1)
    threads = [threading.Thread(target=run, args=(rank,), name="rank", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


class CountingEngine(DelegatingEngine):
    """Wraps an engine and notes every collective as (operation, elements), in one list per rank."""

    def __init__(self, engine: Any, calls: list[tuple[str, int]]) -> None:
        super().__init__(engine)
        self.calls = calls

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("allreduce", tensors[0].numel()))
        return super().allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        self.calls.append(("broadcast", tensors[0].numel()))
        return super().broadcast(tensors, opts)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        self.calls.append(("allgather", inputs[0].numel()))
        return super().allgather(outputs, inputs)

    def alltoall_base(self, output: torch.Tensor, tensor: torch.Tensor, *counts_and_options: Any) -> Any:
        self.calls.append(("alltoall", tensor.numel()))
        return super().alltoall_base(output, tensor, *counts_and_options)

    def reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, *counts_and_options: Any) -> Any:
        self.calls.append(("reduce_scatter", tensor.numel()))
        return super().reduce_scatter_base(output, tensor, *counts_and_options)


def counting() -> Callable[[Any], Any]:
    """A ``make_wrapper`` for `run_ranks`: all engines of a rank note their collectives in ``group.engine.calls``."""
    calls: list[tuple[str, int]] = []
    return lambda engine: CountingEngine(engine, calls)
