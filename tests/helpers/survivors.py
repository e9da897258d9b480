"""Runs ranks as threads of which some are lost within their steps, while the others go on (``--survive``)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from hvdlite_wire.store_requests import RankAssignment
from ranks import attempt_ranks
from torch import Tensor
from worlds import PLAIN, WorldOfThread, _topology, instead_of_the_world

from hvdlite import faults
from hvdlite.calls.generation import Generation
from hvdlite.comm.gloo import InitTimeout
from hvdlite.comm.group import Group
from hvdlite.comm.work import Work
from hvdlite.control.control_client import make_controller
from hvdlite.errors import PeerLostError
from hvdlite.runtime import survival as module
from hvdlite.runtime.make_world import World
from hvdlite.runtime.process_set import Registry
from hvdlite.runtime.survival import Survival


class Death(NamedTuple):
    """A rank is lost when it passes a point of `hvdlite.faults` in its step with this number, counted from 0."""

    rank: int
    point: str
    step: int


class Unheard(NamedTuple):
    """A rank does not hear of the end of its vote in this step. Others have passed it, and one of these is lost."""

    rank: int
    step: int


class LostError(BaseException):
    """Ends the thread of a rank that is lost."""


class _Job:
    """The ranks that are left, and what tells them of each loss, in the place of hvdlite-run."""

    def __init__(
        self, hosts: Sequence[str], deaths: Sequence[Death], shared: WorldOfThread, unheard: Sequence[Unheard] = ()
    ) -> None:
        self._hosts = hosts
        self._deaths = set(deaths)
        self._unheard = set(unheard)
        self._shared = shared
        self._steps: Counter[int] = Counter()
        self._ranks: dict[int, int] = {}  # by the ident of its thread
        self._worlds: dict[int, World] = {}
        self._lock = threading.Lock()
        self._votes: Counter[int] = Counter()
        self._has_voted = threading.Condition()
        self.living = list(range(len(hosts)))

    def take(self, base: Group) -> Survival:
        self._ranks[threading.get_ident()] = base.rank
        survival = Survival(lambda: self._enter_again(base, survival), lambda *_: None)
        self._enter(base, survival)
        return survival

    def pass_point(self, name: str) -> None:
        """What `hvdlite.faults.point` calls, on the thread of a rank."""
        rank = self._ranks[threading.get_ident()]
        with self._has_voted:
            self._votes[rank] += name == "voted"
            self._has_voted.notify_all()
        if Death(rank, name, self._steps[rank]) in self._deaths:
            self._lose(rank)
            raise LostError
        self._steps[rank] += name == "stepped"

    def end_vote(self, work: Work) -> None:
        """Raises an error instead of the end of a vote, on a rank that is not to hear of it."""
        rank = self._ranks[threading.get_ident()]
        if (vote := Unheard(rank, self._steps[rank])) not in self._unheard:
            return
        self._unheard.remove(vote)
        work.wait()
        with self._has_voted:
            # Whoever is to be lost after this vote waits for it.
            self._votes[rank] += 1
            self._has_voted.notify_all()
            assert self._has_voted.wait_for(lambda: len(self.living) < len(self._hosts), 60)
            self._votes[rank] -= 1
        raise PeerLostError("a rank was lost in the vote")

    def bury(self) -> None:
        """Closes the worlds of the ranks that were lost, as the end of their processes would."""
        for rank in self._worlds.keys() - set(self.living):
            _close(self._worlds[rank])

    def leave(self, rank: int) -> None:
        _close(self._worlds[rank])

    def _lose(self, rank: int) -> None:
        # A rank is lost in a step that the others have come to: which step it is must not depend on their threads.
        with self._has_voted:
            votes = self._votes
            assert self._has_voted.wait_for(lambda: all(votes[each] >= votes[rank] for each in self.living), 60)
        with self._lock:
            for each in self.living:
                self._worlds[each].controller.revoke(f"rank {rank} was lost")
                self._worlds[each].group.revoke(f"rank {rank} was lost")
            self.living.remove(rank)
        with self._has_voted:
            self._has_voted.notify_all()

    def _enter_again(self, base: Group, survival: Survival) -> None:
        own = self._worlds[base.rank]
        survival.end()
        own.controller.revoke("a rank was lost")
        own.group.revoke("a rank was lost")
        _close(own)
        self._enter(base, survival)

    def _enter(self, base: Group, survival: Survival) -> None:
        with self._lock:
            # Both at once: `_lose` may have told this rank of the loss, and not yet taken the lost rank off the list.
            members = list(self.living)
            number = len(self._hosts) - len(members)
        place, token = members.index(base.rank), f"generation {number}"
        generation = Generation()
        group = Group(
            base._engine_factory.among(members, place, token),
            place,
            len(members),
            [self._hosts[member] for member in members],
            signer=base.signer.derive(token),
            watch=generation.watch,
            label=token,
        )
        controller = make_controller(
            group, generation, ["here"] * group.size, PLAIN, InitTimeout(timedelta(seconds=60))
        )
        sets = Registry(group, controller, generation)
        own = World(_topology(group), group, generation, controller, PLAIN, sets, leave=lambda: None, pid=0)
        with self._lock:
            self._worlds[base.rank] = own = replace(own, survival=survival)
        self._shared.enter(own)
        survival.begin(group, RankAssignment(number + 1, place, len(members), 0))


def _close(own: World) -> None:
    own.group.close()
    own.sets.close()
    own.controller.close()


def run_survivors(
    monkeypatch: pytest.MonkeyPatch,
    hosts: Sequence[str],
    program: Callable[[int], Any],
    *deaths: Death,
    cannot_repeat: Mapping[str, str] | None = None,
    unheard: Sequence[Unheard] = (),
) -> dict[int, Any]:
    """Calls ``program(rank)`` on a rank on each of the hosts; returns the results of those that are left, by rank.

    ``program`` may call hvdlite's public functions. The engines are those of shared memory, whose waits end at once,
    also between these hosts; with ``cannot_repeat`` they say that of themselves (see `Engine.cannot_repeat`).
    """
    shared = WorldOfThread()
    job = _Job(hosts, deaths, shared, unheard)
    all_reduce = Group.all_reduce

    def all_reduce_or_vote(group: Group, tensor: Tensor, what: str, *more: Any) -> Work:
        work = all_reduce(group, tensor, what, *more)
        if what.startswith("the end of a step"):
            job.end_vote(work)
        return work

    def wrap(engine: Any) -> Any:
        if cannot_repeat is not None:
            engine.cannot_repeat = cannot_repeat
        return engine

    def rank(base: Group) -> Any:
        job.take(base)
        result = program(base.rank)
        job.leave(base.rank)
        return result

    with monkeypatch.context() as patch, instead_of_the_world(shared):
        patch.setattr(module, "KeyListener", lambda *_: SimpleNamespace(close=lambda: None))
        patch.setattr(module, "StoreClient", SimpleNamespace(from_url=lambda _: Mock()))
        patch.setenv("HVDLITE_STORE", "unix:///nowhere")
        patch.setattr(faults, "_armed", job)
        if unheard:
            patch.setattr(Group, "all_reduce", all_reduce_or_vote)
        try:
            outcomes = attempt_ranks(len(hosts), rank, lambda: wrap, engine="shared memory")
        finally:
            job.bury()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, LostError):
            raise outcome
    return {rank: outcomes[rank] for rank in job.living}
