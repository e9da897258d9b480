"""
Pending operations, which only some ranks have asked for: data types for `negotiation`, and the search for deadlocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from .operation import Kind
from .thread_labels import CallingThread

Id = int
"""An operation that is pending; never used again."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one rank has said of an operation; `kind`, `name`, `same` and `own` as in `Operation`.

    ``ticket`` is the rank's own number for it, by which it is answered. ``caller`` is the thread, where no name of the
    user's says what is meant.
    """

    ticket: int
    set_id: int
    kind: Kind
    name: str | None
    what: str
    members: tuple[int, ...]
    same: dict[str, Any]
    own: Any
    caller: CallingThread | None = None

    @property
    def pairs_with(self) -> tuple[int, str, str | None]:
        """What it has in common with those of other ranks that mean the same operation."""
        return self.set_id, self.kind.name, self.name

    @property
    def of_set(self) -> str:
        return "the global process set" if self.set_id == 0 else f"process set {list(self.members)}"


@dataclass(slots=True)
class Refusal:
    """Why one or several operations will not be; ``kind`` is the name of the error's class."""

    kind: str
    words: str
    covers: list[Pending]
    told: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Pending:
    """An operation, from the first rank that asks for it on; times are seconds of whatever clock.

    ``place`` is its own among those that mean the same.
    """

    id_: Id
    first: Ask
    since_s: float
    place: int
    asks: dict[int, Ask] = field(default_factory=dict)
    differs: bool = False
    is_doubtful: bool = False
    differs_since_s: float | None = None
    refusal: Refusal | None = None

    def waits_for(self, rank: int) -> bool:
        """Whether the rank is still to ask for it, or to be told that it will not be."""
        return rank not in self.asks and (self.refusal is None or rank not in self.refusal.told)

    def callers(self) -> dict[int, CallingThread]:
        """By rank, where no name of the user's says what is meant."""
        return {rank: ask.caller for rank, ask in self.asks.items() if ask.caller is not None}

    def missing(self, joined: Collection[int]) -> set[int]:
        """The members that have neither asked nor joined."""
        return {rank for rank in self.first.members if rank not in self.asks and rank not in joined}


class Alike:
    """A queue of pending operations of one name and kind: a rank's next one is the first that waits for it.

    What has once not waited for a rank never does again. So each rank has a place up to which there is nothing for
    it, and nothing is looked through twice.
    """

    __slots__ = ("_at", "_end", "_first", "_place_of")

    def __init__(self) -> None:
        self._at: dict[int, Pending] = {}
        self._first = self._end = 0
        self._place_of: dict[int, int] = {}

    def next_of(self, rank: int) -> Pending | None:
        """The first that waits for this rank, if there is one; it is thought to ask for it now."""
        place = max(self._place_of.get(rank, 0), self._first)
        while place < self._end:
            pending = self._at.get(place)
            place += 1
            if pending is not None and pending.waits_for(rank):
                break
        else:
            pending = None
        self._place_of[rank] = place
        return pending

    def add(self, id_: Id, first: Ask, rank: int, since_s: float) -> Pending:
        """One more, after all others, which this rank is the first to ask for."""
        pending = Pending(id_, first, since_s, self._end)
        self._at[self._end] = pending
        self._end += 1
        self._place_of[rank] = self._end
        return pending

    def remove(self, pending: Pending) -> bool:
        """Forget it; whether there is another."""
        del self._at[pending.place]
        while self._first < self._end and self._first not in self._at:
            self._first += 1
        return bool(self._at)


def stuck_ranks(waiting: Mapping[int, Iterable[Id]], missing: Mapping[Id, Set[int]]) -> frozenset[int]:
    """Those that wait for operations which need ranks that wait too, and so on, in a circle.

    ``waiting``: by rank, what it is blocked in; it goes on as soon as one of these can be. ``missing``: the ranks that
    each of them still needs.
    """
    stuck = set(waiting)
    while freed := {rank for rank in stuck if any(not missing[wait] & stuck for wait in waiting[rank])}:
        stuck -= freed
    return frozenset(stuck)
