"""The workers of an elastic job that run, and which of them are the ranks of the current generation.

`membership` decides which there are; this says who is who among them. A generation is a world: see there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hvdlite_wire.assignments import NewWorkerPolicy

from .host_slots import HostSlots, Place


@dataclass(frozen=True)
class Member:
    """One rank of a generation. ``since`` is the first generation that it was in."""

    worker: int
    place: Place
    since: int


@dataclass(frozen=True)
class ElasticGeneration:
    """A world: its members by rank, and why the one before has ended ("" if only because hosts have changed)."""

    number: int
    members: tuple[Member, ...]
    why: str


@dataclass
class PlacedWorker:
    """A running worker, and what it has asked for.

    ``since`` is the first generation that it was in. ``asks_after`` is the last one (0 if none), once it asks for the
    next; ``newcomers`` is what it says then of workers that have been in none. ``why_dismissed``: why it was told to
    end, if it was; its end is then no failure.
    """

    number: int
    place: Place
    since: int | None = None
    asks_after: int | None = None
    newcomers: NewWorkerPolicy = NewWorkerPolicy.WELCOME
    why_dismissed: str | None = None
    is_being_ended: bool = False

    @property
    def is_dismissed(self) -> bool:
        return self.why_dismissed is not None

    @property
    def may_be_rank(self) -> bool:
        return not self.is_dismissed and not self.is_being_ended

    def __str__(self) -> str:
        return f"worker {self.number} on {self.place.host}"


class ElasticWorkers:
    """The running workers by their numbers, and the current generation, which is None before there is any."""

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots
        self._next_number = 0
        self.running: dict[int, PlacedWorker] = {}
        self.current: ElasticGeneration | None = None

    def add(self, place: Place) -> PlacedWorker:
        """Returns a new worker in a slot. Its number was never used."""
        worker = self.running[self._next_number] = PlacedWorker(self._next_number, place)
        self._next_number += 1
        return worker

    def next_generation(self, candidates: Iterable[PlacedWorker], why: str) -> ElasticGeneration:
        """Makes these workers the ranks of the next generation, in this order."""
        number = 1 if self.current is None else self.current.number + 1
        members = []
        for each in candidates:
            each.since = number if each.since is None else each.since
            each.asks_after = None
            members.append(Member(each.number, each.place, each.since))
        self.current = ElasticGeneration(number, tuple(members), why)
        return self.current

    def is_member(self, worker: PlacedWorker) -> bool:
        return self.current is not None and any(each.worker == worker.number for each in self.current.members)

    def on_host(self, host: str) -> list[PlacedWorker]:
        return [each for each in self.running.values() if each.place.host == host]

    def started(self) -> list[PlacedWorker]:
        """Returns the running workers that are not being ended, whether they have called hvd.init() or not."""
        return [each for each in self.running.values() if each.may_be_rank]

    def asking(self) -> list[PlacedWorker]:
        """Returns those that ask for the next generation."""
        return [each for each in self.running.values() if each.asks_after is not None]

    def members(self) -> list[PlacedWorker]:
        """Returns the running members of the current generation that are not being ended, by rank."""
        living = [self.running.get(each.worker) for each in self.current.members] if self.current is not None else []
        return [each for each in living if each is not None and each.may_be_rank]

    def joiners(self) -> list[PlacedWorker]:
        """Returns the workers that ask for their first generation, in the order of their numbers."""
        return [
            each
            for each in self.asking()
            if each.since is None and each.may_be_rank and self._slots.is_there(each.place)
        ]

    def waiting_joiners(self, most: int) -> list[PlacedWorker]:
        """Returns those of `joiners` with which the ranks can go on, and for which there is room among ``most``."""
        members = self.members()
        # What the ranks said as they asked the last time holds for this generation, too.
        can_go_on = all(each.newcomers is not NewWorkerPolicy.NEVER for each in members)
        return self.joiners() if can_go_on and len(members) < most else []
