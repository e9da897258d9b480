"""Ranks as threads that each have a world of their own, so that all of hvdlite's functions can be called on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ranks import attempt_ranks, generation_of, run_ranks

from hvdlite.comm.group import Group
from hvdlite.control import thread_labels
from hvdlite.control.connect import make_controller
from hvdlite.control.generation import Generation
from hvdlite.environment import Environment
from hvdlite.rendezvous.placement import Topology
from hvdlite.runtime import world
from hvdlite.runtime.bootstrap import World
from hvdlite.runtime.process_set_registry import Registry

PLAIN = Environment(stall_check=False)


class WorldOfThread:
    """Stands in the one module variable: the world of whichever thread looks. Other threads have the first one's."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._threads: list[tuple[World, threading.Thread]] = []

    def enter(self, own: World) -> None:
        self._here.world = own
        self._threads.append((own, threading.current_thread()))

    def names_beside(self, thread: threading.Thread) -> list[str]:
        """Of the other threads of the rank whose thread it is, which here are not all of the process."""
        owners = [own for own, other in self._threads if other is thread]
        return [
            other.name for own, other in self._threads if own in owners and other is not thread and other.is_alive()
        ]

    @property
    def here(self) -> World:
        """For the threads that a rank starts itself."""
        own: World = self._here.world
        return own

    def starts(self, function: Callable[[], Any], name: str) -> threading.Thread:
        """A thread of the rank's own, which has the rank's world; it is to be started."""
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
    """``function(rank)`` on every rank, after an `init`; results by rank. The first rank's exception is raised.

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
) -> list[Any]:
    """Like `run_worlds`, but an exception is the rank's outcome."""
    shared = WorldOfThread()

    def run(group: Group) -> Any:
        generation = generation_of(group)
        controller = make_controller(group, generation, ["here"] * group.size, environment, timeout_s=10.0)
        sets = Registry(group, controller, generation)
        own = World(_topology(group), group, generation, controller, environment, sets, leave=lambda: None, pid=0)
        shared.enter(own)
        try:
            return function(group.rank)
        finally:
            controller.close()
            sets.close()

    with _instead_of_the_world(shared):
        return attempt_ranks(size, run, make_wrapper, engine)


@contextmanager
def _instead_of_the_world(shared: WorldOfThread) -> Iterator[None]:
    earlier, names_beside = world._world, thread_labels.names_beside
    world._world = shared  # type: ignore[assignment]  # it has all that a world has
    thread_labels.names_beside = shared.names_beside
    try:
        yield
    finally:
        world._world = earlier
        thread_labels.names_beside = names_beside


def run_generations(sizes: Sequence[int], function: Callable[[Iterator[int]], Any], engine: str = "gloo") -> list[Any]:
    """One world after the other, of so many ranks each, the first ones; what each rank's ``function`` returns.

    It is called once on each of the ranks that the largest world has, with the generations that the rank is in: while
    it is at one, this is the world.
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

    with _instead_of_the_world(shared):
        return run_ranks(max(sizes), run, engine=engine)


def _world_within(base: Group, size: int, token: str) -> World:
    """A world of the first ranks of a group."""
    engine_factory = base._engine_factory.among(range(size), base.rank, token)
    signer = base.signer.derive(token)
    generation = Generation()
    group = Group(
        engine_factory, base.rank, size, base.hosts[:size], signer=signer, watch=generation.watch, label=token
    )
    controller = make_controller(group, generation, ["here"] * size, PLAIN, timeout_s=10.0)
    sets = Registry(group, controller, generation)
    return World(_topology(group), group, generation, controller, PLAIN, sets, leave=lambda: None, pid=0)


def _topology(group: Group) -> Topology:
    return Topology(group.rank, group.size, group.rank, group.size, 0, 1, group.hosts, is_homogeneous=True)
