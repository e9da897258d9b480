"""
`Pending`, an operation that some ranks have requested, `PairingQueue`, which pairs requests up, and `Refusal`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ..calls.messages import OperationRequest
from ..calls.operation import Kind, kind_named
from ..calls.thread_labels import CallingThread

Id = int
"""Number of a pending operation on rank 0; never reused."""


@dataclass(slots=True)
class Refusal:
    """The refusal of one or several operations; ``kind`` is the name of the error's class.

    ``covers`` are these operations, and ``sent_to`` the ranks that have received the refusal.
    """

    kind: str
    words: str
    covers: list[Pending]
    sent_to: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Pending:
    """An operation since its first request; times are seconds of whatever clock the caller uses.

    ``index`` is its index in its `PairingQueue`.
    """

    id_: Id
    first: OperationRequest
    since_s: float
    index: int
    asks: dict[int, OperationRequest] = field(default_factory=dict)
    differs: bool = False
    is_doubtful: bool = False
    differs_since_s: float | None = None
    refusal: Refusal | None = None
    # The last result of `absent`, and the number of requests and the joined ranks that it was computed for.
    _absent: list[int] = field(default_factory=list)
    _absent_for: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        return kind_named(self.first.kind)

    def waits_for(self, rank: int) -> bool:
        """Whether the rank must still request it, or receive its refusal."""
        return rank not in self.asks and (self.refusal is None or rank not in self.refusal.sent_to)

    def callers(self) -> dict[int, CallingThread]:
        """The calling thread of each rank that gave no name, by rank."""
        return {rank: ask.caller for rank, ask in self.asks.items() if ask.caller is not None}

    def missing(self, joined: Collection[int]) -> set[int]:
        """The members that have neither requested it nor joined."""
        return {rank for rank in self.first.members if rank not in self.asks and rank not in joined}

    def absent(self, joined: Collection[int]) -> list[int]:
        """The result of `missing`, sorted; cached until a rank requests the operation or joins."""
        key = (len(self.asks), *joined)
        if key != self._absent_for:
            self._absent, self._absent_for = sorted(self.missing(joined)), key
        return self._absent


class PairingQueue:
    """A queue of pending operations with one name and kind; a rank's next request is for the first that waits for it.

    An operation that has stopped waiting for a rank never waits for it again. So the search for a rank's next request
    starts at a position kept for that rank, and examines no entry twice.
    """

    __slots__ = ("_at", "_end", "_first", "_next_index_of")

    def __init__(self) -> None:
        self._at: dict[int, Pending] = {}
        self._first = self._end = 0
        self._next_index_of: dict[int, int] = {}

    def next_of(self, rank: int) -> Pending | None:
        """Returns the first that waits for this rank, or None; the rank is assumed to request it now."""
        index = max(self._next_index_of.get(rank, 0), self._first)
        while index < self._end:
            pending = self._at.get(index)
            index += 1
            if pending is not None and pending.waits_for(rank):
                break
        else:
            pending = None
        self._next_index_of[rank] = index
        return pending

    def add(self, id_: Id, first: OperationRequest, rank: int, since_s: float) -> Pending:
        """Appends an operation that this rank is the first to request."""
        pending = Pending(id_, first, since_s, self._end)
        self._at[self._end] = pending
        self._end += 1
        self._next_index_of[rank] = self._end
        return pending

    def remove(self, pending: Pending) -> bool:
        """Removes it; returns whether others are left."""
        del self._at[pending.index]
        while self._first < self._end and self._first not in self._at:
            self._first += 1
        return bool(self._at)
