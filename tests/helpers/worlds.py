"""Runs ranks as threads that each have their own world, so that they can call all of hvdlite's public functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ranks import attempt_ranks, generation_of, run_ranks

from hvdlite.calls.generation import Generation
from hvdlite.comm.gloo import InitTimeout
from hvdlite.comm.group import Group
from hvdlite.control import callers
from hvdlite.control.control_client import make_controller
from hvdlite.environment import Environment
from hvdlite.rendezvous.placement import Topology
from hvdlite.runtime import world
from hvdlite.runtime.make_world import World
from hvdlite.runtime.process_set import Registry

PLAIN = Environment(stall_check=False)


class WorldOfThread:
    """Replaces the current world in `runtime.world`: each thread sees the world that it has entered."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._threads: list[tuple[World, threading.Thread]] = []

    def enter(self, own: World) -> None:
        self._here.world = own
        self._threads.append((own, threading.current_thread()))

    def call(self, group: Group, function: Callable[[int], Any], environment: Environment = PLAIN) -> Any:
        """Calls ``function(rank)`` within a world of the group's ranks; all of them must call it."""
        generation = generation_of(group)
        controller = make_controller(
            group, generation, ["here"] * group.size, environment, InitTimeout(timedelta(seconds=60))
        )
        sets = Registry(group, controller, generation)
        own = World(_topology(group), group, generation, controller, environment, sets, leave=lambda: None, pid=0)
        self.enter(own)
        try:
            return function(group.rank)
        finally:
            controller.close()
            sets.close()

    def names_beside(self, thread: threading.Thread) -> list[str]:
        """Returns the names of the live threads that belong to the same rank as ``thread``, without ``thread``."""
        owners = [own for own, other in self._threads if other is thread]
        return [
            other.name for own, other in self._threads if own in owners and other is not thread and other.is_alive()
        ]

    @property
    def here(self) -> World:
        """The calling thread's world."""
        own: World = self._here.world
        return own

    def starts(self, function: Callable[[], Any], name: str) -> threading.Thread:
        """Returns a new thread, not yet started, that has the calling rank's world."""
        own = self.here

        def run() -> None:
            self._here.world = own
            function()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append((own, thread))
        return thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here.world, name)


def run_worlds(
    size: int,
    function: Callable[[int], Any],
    environment: Environment = PLAIN,
    make_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
    engine: str = "gloo",
) -> list[Any]:
    """Calls ``function(rank)`` on every rank within a world; returns results by rank, raises the first exception.

    ``make_wrapper`` and ``engine`` are as in `run_ranks`.
    """
    outcomes = attempt_worlds(size, function, environment, make_wrapper, engine)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        raise errors[0]
    return outcomes


def attempt_worlds(
    size: int,
    function: Callable[[int], Any],
    environment: Environment = PLAIN,
    make_wrapper: Callable[[], Callable[[Any], Any]] | None = None,
    engine: str = "gloo",
    hosts: Sequence[str] | None = None,
) -> list[Any]:
    """Does what `run_worlds` does, but returns a rank's exception instead of raising it.

    ``hosts`` is as in `attempt_ranks`.
    """
    shared = WorldOfThread()
    with instead_of_the_world(shared):
        return attempt_ranks(size, lambda group: shared.call(group, function, environment), make_wrapper, engine, hosts)


@contextmanager
def instead_of_the_world(shared: WorldOfThread) -> Iterator[None]:
    """A context in which each thread sees the world that it has entered in ``shared``."""
    earlier, names_beside = world._world, callers.names_beside
    world._world = shared  # type: ignore[assignment]  # it has all attributes of a World
    callers.names_beside = shared.names_beside
    try:
        yield
    finally:
        world._world = earlier
        callers.names_beside = names_beside


def run_generations(sizes: Sequence[int], function: Callable[[Iterator[int]], Any], engine: str = "gloo") -> list[Any]:
    """Runs several worlds in a row, as between `init` and `shutdown`; ``sizes`` has the number of ranks of each.

    Each world has the first ranks. ``function`` is called once per rank of the largest world, with an iterator over the
    numbers of the worlds that the rank is in; while the iterator is at a number, that world is the current one. Returns
    the results by rank.
    """
    shared = WorldOfThread()

    def run(base: Group) -> Any:
        def generations() -> Iterator[int]:
            for number, size in enumerate(sizes):
                if base.rank < size:
                    own = _world_within(base, size, f"generation {number}")
                    shared.enter(own)
                    try:
                        yield number
                    finally:
                        own.group.close()
                        own.sets.close()
                        own.controller.close()

        return function(generations())

    with instead_of_the_world(shared):
        return run_ranks(max(sizes), run, engine=engine)


def _world_within(base: Group, size: int, token: str) -> World:
    """Makes a world of the first ``size`` ranks of a group."""
    engine_factory = base._engine_factory.among(range(size), base.rank, token)
    signer = base.signer.derive(token)
    generation = Generation()
    group = Group(
        engine_factory, base.rank, size, base.hosts[:size], signer=signer, watch=generation.watch, label=token
    )
    controller = make_controller(group, generation, ["here"] * size, PLAIN, InitTimeout(timedelta(seconds=60)))
    sets = Registry(group, controller, generation)
    return World(_topology(group), group, generation, controller, PLAIN, sets, leave=lambda: None, pid=0)


def _topology(group: Group) -> Topology:
    return Topology(group.rank, group.size, group.rank, group.size, 0, 1, group.hosts, is_homogeneous=True)
