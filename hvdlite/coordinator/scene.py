"""
`Scene`: what rank 0 knows of all ranks. `Pending`: an operation that some have requested. `Endings`, `JoinedSteps`.

    lost (rank)  ── an error there was caused by another rank's end; it is likely to end too
    ended (rank) ── reported at once if it had not sent "lost"; else once the first end is known, or after HELD_S
    a rank joins, and lists its living optimizers ── the set's other ranks pin and list theirs ── sit_out, to joined

`negotiation` writes it; `deadlocks` and `stall` read it. A rank that ends without having reported a loss was the first,
in whatever order the ends of several ranks are noticed. Joined ranks sit out the steps of optimizers that are alive on
all ranks of their set: with others no rank can step any more. The lists stay valid until the join ends: each rank keeps
what it has reported, and no optimizer can be made on a set while one of its ranks has joined.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..calls.messages import CallingThread, LivingOptimizers, OperationRequest, Pin, Pinned, SitOutSteps, Unpin
from ..calls.operation import Kind, kind_named

Id = int
"""Number of a pending operation on rank 0; never reused."""


@dataclass(slots=True)
class Refusal:
    """The refusal of one or several operations; ``kind`` is the error's class, ``sent_to`` who has received it."""

    kind: str
    words: str
    covers: list[Pending]
    sent_to: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Pending:
    """An operation since its first request; ``index`` is its index in its `PairingQueue`."""

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
    examines no entry twice.
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


@dataclass(frozen=True, slots=True)
class BlockedThread:
    """One wait of a rank's thread; ``collective``: its group's label, its number there, and its members."""

    what: str
    since_s: float
    is_operation: bool = False
    collective: tuple[str, int, tuple[int, ...]] | None = None


class Joined(NamedTuple):
    """A rank that has joined: whether averages are over the other ranks only, and when it joined."""

    average_of_active: bool
    since_s: float


@dataclass(slots=True)
class Scene:
    """The state of every rank, as far as rank 0 knows.

    ``pending`` are the operations that some ranks have requested and others have not, in the order of the requests. The
    others are by rank:

    - ``waiting``: the pending operations that it is blocked in. A blocked rank sends no other request.
    - ``busy``: everything else that it is blocked in, the longest wait first; ``stuck``: the blocked ranks in which no
      thread can request anything until a wait ends.
    - ``begun``: how many collectives of each group it had begun when it was last blocked.
    - ``under_way``: the operations that have begun there and are not reported as ended; ``over_count``: how many are.
    - ``joined``, ``ended``: those that have, in their order; ``ended`` says whether normally, and not by a crash.
    """

    hosts: Sequence[str]
    everybody: tuple[int, ...] = field(init=False)
    pending: dict[Id, Pending] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, set[Id]] = field(default_factory=dict)
    busy: dict[int, list[BlockedThread]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    begun: dict[int, Mapping[str, int]] = field(default_factory=dict)
    under_way: defaultdict[int, deque[OperationRequest]] = field(default_factory=lambda: defaultdict(deque))
    over_count: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    joined: dict[int, Joined] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.everybody = tuple(range(len(self.hosts)))

    def set_busy(self, rank: int, blocked: Sequence[BlockedThread], *, is_stuck: bool) -> None:
        if blocked:
            self.busy[rank] = sorted(blocked, key=lambda each: each.since_s)
        else:
            self.busy.pop(rank, None)
        (self.stuck.add if blocked and is_stuck else self.stuck.discard)(rank)

    def over(self, rank: int, count: int) -> None:
        """Notes how many of the operations that have begun on ``rank`` have ended there, in all."""
        under_way = self.under_way[rank]
        while self.over_count[rank] < count and under_way:
            under_way.popleft()
            self.over_count[rank] += 1


# For how long the end of a rank that had sent "lost" is held back, so that the first rank to end can be found.
HELD_S = 2.0

End = tuple[int, bool]  # the rank, and whether it left in an orderly way


class Endings:
    """Holds the ends of ranks, and decides in which order they are reported."""

    def __init__(self) -> None:
        self._lost_another: set[int] = set()
        self._held: dict[int, tuple[bool, float]] = {}
        self._first_is_told = False

    @property
    def is_idle(self) -> bool:
        return not self._held

    def lost(self, rank: int) -> None:
        self._lost_another.add(rank)

    def ended(self, rank: int, ended_normally: bool, now_s: float) -> list[End]:
        """Notes that ``rank`` has ended; returns the ends to report now."""
        if rank in self._lost_another and not self._first_is_told:
            self._held.setdefault(rank, (ended_normally, now_s))
            return []
        self._first_is_told = True
        return [(rank, ended_normally), *self._release(now_s, 0.0)]

    def due(self, now_s: float) -> list[End]:
        return self._release(now_s, HELD_S)

    def _release(self, now_s: float, least_s: float) -> list[End]:
        released = [rank for rank, (_, since_s) in self._held.items() if now_s - since_s >= least_s]
        self._first_is_told |= bool(released)
        return [(rank, self._held.pop(rank)[0]) for rank in released]


@dataclass(slots=True)
class _Sitting:
    """A process set of which a rank has joined."""

    members: frozenset[int]
    joined: list[int] = field(default_factory=list)
    living: dict[int, frozenset[int]] = field(default_factory=dict)  # by rank, the optimizers' numbers

    @property
    def is_known(self) -> bool:
        return self.living.keys() >= self.members

    @property
    def common(self) -> list[int]:
        return sorted(frozenset.intersection(*self.living.values()))


class JoinedSteps:
    """Finds, for the current join, the optimizers whose steps joined ranks take part in."""

    def __init__(self, send: Callable[[int, Pin | Unpin | SitOutSteps], None]) -> None:
        self._send = send
        # So that a late answer is not taken for one of the next join.
        self._join = 0
        self._by_set: dict[int, _Sitting] = {}
        self._asked: set[int] = set()

    @property
    def has_any(self) -> bool:
        """Whether there are steps that joined ranks take part in."""
        return any(sitting.is_known and sitting.common for sitting in self._by_set.values())

    def joined(self, rank: int, living: Iterable[LivingOptimizers]) -> None:
        """Notes that ``rank`` has joined; ``living`` are its living optimizers, each with all members of the set."""
        for each in living:
            set_id, sitting = each.set_id, self._by_set.get(each.set_id)
            if sitting is None:
                sitting = self._by_set[set_id] = _Sitting(frozenset(each.members))
                for other in sorted(sitting.members - {rank}):
                    self._asked.add(other)
                    self._send(other, Pin(self._join, set_id))
            sitting.joined.append(rank)
            if sitting.is_known:
                self._send(rank, SitOutSteps(set_id, sitting.common))
            else:
                self._hear(sitting, set_id, rank, each.numbers)

    def pinned(self, rank: int, answer: Pinned) -> None:
        sitting = self._by_set.get(answer.set_id)
        if answer.join == self._join and sitting is not None and rank in sitting.members and not sitting.is_known:
            self._hear(sitting, answer.set_id, rank, answer.numbers)

    def end(self, informed: Iterable[int]) -> None:
        """Ends the join; ``informed`` are the ranks that do not need a separate `Unpin`."""
        for rank in sorted(self._asked.difference(informed)):
            self._send(rank, Unpin())
        self._asked.clear()
        self._by_set.clear()
        self._join += 1

    def _hear(self, sitting: _Sitting, set_id: int, rank: int, numbers: Iterable[int]) -> None:
        # A rank that joins before the question reaches it reports twice; it keeps both lists alive.
        sitting.living.setdefault(rank, frozenset(numbers))
        if sitting.is_known:
            for each in sitting.joined:
                self._send(each, SitOutSteps(set_id, sitting.common))
