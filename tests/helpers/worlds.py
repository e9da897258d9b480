"""Ranks as threads that each have a world of their own, so that all of hvdlite's functions can be called on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ranks import attempt_ranks

from hvdlite.comm.group import Group
from hvdlite.control import thread_labels
from hvdlite.control.connect import make_controller
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
    earlier, shared = world._world, WorldOfThread()
    names_beside = thread_labels.names_beside

    def run(group: Group) -> Any:
        controller = make_controller(group, ["here"] * group.size, environment, timeout_s=10.0)
        sets = Registry(group, controller)
        own = World(_topology(group), group, controller, environment, sets, leave=lambda: None, pid=0)
        shared.enter(own)
        try:
            return function(group.rank)
        finally:
            controller.close()
            sets.close()

    world._world = shared  # type: ignore[assignment]  # it has all that a world has
    thread_labels.names_beside = shared.names_beside
    try:
        return attempt_ranks(size, run, make_wrapper, engine)
    finally:
        world._world = earlier
        thread_labels.names_beside = names_beside


def _topology(group: Group) -> Topology:
    return Topology(group.rank, group.size, group.rank, group.size, 0, 1, group.hosts, is_homogeneous=True)
