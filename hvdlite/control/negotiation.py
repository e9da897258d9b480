"""
Decides on rank 0 which operations begin, which are refused, and when deadlocked or stalled ranks are reported.

    ask (rank, operation) ── all members have asked for the same ── go, to each in one order
                             they differ, wait for each other, or one has ended ── no, to each, with the same words

Rank 0 has the one `Negotiation` of a job, as Horovod's coordinator has; `coordinator` receives the ranks' messages and
sends the answers, which are left in `outbox` in order. No connection, thread or clock is used here: `tick` is given
the time, and asks the rules of `stall`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .endings import Endings
from .joined_steps import JoinedSteps
from .mismatch import (
    CAUSES,
    Wait,
    first_difference,
    name_ranks,
    words_of_callers,
    words_of_deadlock,
    words_of_difference,
)
from .pending import Alike, Ask, Id, Pending, Refusal, stuck_ranks
from .stall import Blocked, Scene, StallRules, StallWatch

# Between a difference and its error, so that the error can tell what all ranks did; and between the time that ranks
# seem to wait for each other and the error, so that what is on its way arrives.
SETTLING_S = 1.0


class Negotiation:
    """All operations that some ranks have asked for and others not yet."""

    def __init__(self, hosts: Sequence[str], stall: StallRules) -> None:
        self.outbox: list[tuple[int, list[Any]]] = []
        self.warnings: list[str] = []
        self._hosts = hosts
        self._stall = StallWatch(hosts, stall)
        self._ids = itertools.count()
        # In the order of their asking; those that are refused, and still to be told to some, are elsewhere.
        self._pending: dict[Id, Pending] = {}
        self._refused: dict[Id, Pending] = {}
        # Those of the pending ones that ranks have asked for with different values.
        self._differing: dict[Id, Pending] = {}
        self._alike: dict[tuple[int, str, str | None], Alike] = {}
        # Those that threads have called which differ by rank.
        self._contested: set[tuple[int, str, str | None]] = set()
        self._id_of: dict[tuple[int, int], Id] = {}  # by rank and ticket
        # What each rank is blocked in. One that is waits for nothing else, and will ask for nothing else.
        self._waiting: dict[int, set[Id]] = {}
        # By rank, when it was last blocked: how many collectives of each group it had begun.
        self._begun: dict[int, Mapping[str, int]] = {}
        self._stuck_since_s: tuple[frozenset[int], float] | None = None
        # By rank, in the order of their coming: whether averages are to be over the others alone.
        self._joined: dict[int, bool] = {}
        self._joined_steps = JoinedSteps(lambda rank, message: self.outbox.append((rank, message)))
        self._joined_since_s: dict[int, float] = {}
        self._endings = Endings()
        self._ended: dict[int, str] = {}
        # The first of them, as it was told to the others.
        self.first_left: list[Any] | None = None
        # By rank, what it was told to carry out and has not said to be over; and how many it has.
        self._under_way: dict[int, deque[Ask]] = {rank: deque() for rank in range(len(hosts))}
        self._over_count = dict.fromkeys(range(len(hosts)), 0)

    @property
    def is_idle(self) -> bool:
        """Whether no operation is pending, and nobody blocked."""
        return not self._pending and not self._refused and self._stall.is_idle

    @property
    def is_settled(self) -> bool:
        """Whether nothing is known of any rank that would stand against an operation all ranks ask for next."""
        return not (self._pending or self._refused or self._joined or self._ended)

    @property
    def needs_ticks(self) -> bool:
        """Whether something can happen by the mere passing of time."""
        return bool(self._pending or self._joined) or not (self._stall.is_idle and self._endings.is_idle)

    @property
    def first_end(self) -> str:
        """Which rank has ended first of those that have, and how."""
        return next(iter(self._ended.values()), "another rank has gone")

    # -- what ranks say

    def ask(self, rank: int, ask: Ask, now_s: float) -> None:
        """``rank`` asks for an operation."""
        alike = self._alike.get(ask.pairs_with)
        if alike is None:
            alike = self._alike[ask.pairs_with] = Alike()
        pending = alike.next_of(rank)
        if pending is None:
            pending = alike.add(next(self._ids), ask, rank, now_s)
            self._pending[pending.id_] = pending
        pending.asks[rank] = ask
        if ask.caller is not None and ask.caller.is_doubtful:
            pending.is_doubtful = True
        if ask.same != pending.first.same and first_difference([pending.first.same, ask.same]) is not None:
            pending.differs = True
            if pending.refusal is None:
                self._differing[pending.id_] = pending
        self._id_of[rank, ask.ticket] = pending.id_
        self._stall.asked(now_s)
        self._consider(pending, now_s)

    def begin_voted(self, ask: Ask, now_s: float) -> None:
        """All ranks have voted for this operation, and carry it out now; nothing is unsettled."""
        for rank in ask.members:
            self._stall.heard(rank, now_s)
            self._under_way[rank].append(ask)

    def has_asked(self, rank: int, ticket: int) -> bool:
        """Whether that is the rank's number for an operation that has not been answered yet."""
        return (rank, ticket) in self._id_of

    def wait(self, rank: int, ticket: int, begun: Mapping[str, int] = MappingProxyType({})) -> None:
        """``rank`` is blocked until that operation is done, having ``begun`` so many collectives of each group."""
        self._begun[rank] = begun
        id_ = self._id_of.get((rank, ticket))
        if id_ is not None:
            self._waiting.setdefault(rank, set()).add(id_)

    def join(
        self,
        rank: int,
        average_of_active: bool,
        now_s: float,
        living: Iterable[tuple[int, Sequence[int] | None, Sequence[int]]] = (),
    ) -> None:
        """``rank`` takes part in all-reduces from now on, with nothing to give, until all ranks say so.

        ``living`` are the optimizers there: by process set its number, its members, or None for all, and theirs.
        """
        others = {mode for mode in self._joined.values() if mode != average_of_active}
        self._joined[rank] = average_of_active
        self._joined_since_s[rank] = now_s
        if not others:
            everybody = range(len(self._hosts))
            self._joined_steps.joined(rank, [(each[0], each[1] or everybody, each[2]) for each in living])
        if others:
            words = "Mismatched join: One rank called join() with average='active', but another rank without. " + (
                f"({name_ranks(sorted(self._joined), self._hosts)} joined)"
            )
            self._end_join(["not_joined", "MismatchError", words], now_s)
        elif len(self._joined) == len(self._hosts):
            self._end_join(["joined", rank], now_s)
        elif gone := [rank for rank in self._ended if rank not in self._joined]:
            self._end_join(["not_joined", *self._words_of_end(gone[0], "join", "join")], now_s)
        for pending in [*self._pending.values(), *self._refused.values()]:
            self._consider(pending, now_s)

    def pinned(self, rank: int, join: int, set_id: int, numbers: Sequence[int]) -> None:
        """``rank`` was asked, in that join, which optimizers live there, and keeps these."""
        self._joined_steps.pinned(rank, join, set_id, numbers)

    def introduce(self, rank: int, pid: int) -> None:
        """``rank`` is the process of this number on its host."""
        self._stall.names.pids[rank] = pid

    def heard(self, rank: int, now_s: float) -> None:
        """Something has come from ``rank``, whatever it is."""
        self._stall.heard(rank, now_s)

    def place(self, rank: int, place: str, now_s: float) -> None:
        """Where the program of ``rank`` is, as it says when it is asked."""
        self._stall.place(rank, place, now_s)

    def busy(
        self, rank: int, blocked: Sequence[Blocked], *, is_stuck: bool, begun: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """What ``rank`` is blocked in for longer than a moment; nothing any more where that is empty.

        ``is_stuck`` is whether it does nothing until one of these is done, all its threads being blocked in them;
        ``begun`` is as in `wait`.
        """
        self._begun[rank] = begun
        self._stall.busy(rank, blocked, is_stuck=is_stuck)

    def over(self, rank: int, count: int) -> None:
        """So many of the operations that ``rank`` was told to carry out are over there, in all."""
        under_way = self._under_way[rank]
        while self._over_count[rank] < count and under_way:
            under_way.popleft()
            self._over_count[rank] += 1

    def lost(self, rank: int) -> None:
        """``rank`` has met an error that another rank's end is the cause of: if it ends, it was not the first."""
        self._endings.lost(rank)
        if rank == 0:
            # When rank 0 ends there is nobody any more to tell whose end that follows from.
            self.outbox += [(other, ["lost", 0]) for other in range(1, len(self._hosts))]

    def end(self, rank: int, by_itself: bool, now_s: float) -> None:
        """``rank`` takes part in nothing any more."""
        for ended, its_own_doing in self._endings.ended(rank, by_itself, now_s):
            self._tell_end(ended, its_own_doing, now_s)

    def _tell_end(self, rank: int, by_itself: bool, now_s: float) -> None:
        if self.first_left is None:
            # Who waits for it elsewhere, for a bucket, learns from the engine that somebody has gone; from this, who.
            self.first_left = ["left", rank, by_itself]
            # Rank 0 last: it may end of this, and nobody would tell the others.
            others = [other for other in [*range(1, len(self._hosts)), 0] if other != rank]
            self.outbox += [(other, self.first_left) for other in others]
        how = "has ended" if by_itself else "has gone"
        self._ended.setdefault(rank, f"{name_ranks([rank], self._hosts)} {how}")
        self._waiting.pop(rank, None)
        self._stall.busy(rank, (), is_stuck=False)
        self._under_way[rank].clear()
        for pending in [*self._pending.values(), *self._refused.values()]:
            self._consider(pending, now_s)
        if self._joined and rank not in self._joined:
            kind, words = self._words_of_end(rank, "join", "join")
            self._end_join(["not_joined", kind, words], now_s)

    # -- what time brings

    def tick(self, now_s: float) -> None:
        """To be called every now and then, if that `needs_ticks`."""
        # Nothing that is merely asked for changes by the passing of time.
        for pending in list(self._differing.values()):
            self._consider(pending, now_s)
        self._find_deadlock(now_s)
        self._find_stalls(now_s)

    def _consider(self, pending: Pending, now_s: float) -> None:
        """Begin the operation, refuse it, or leave it as it is."""
        first = pending.first
        if pending.refusal is not None:
            self._tell_refusal(pending)
            return
        # With every ask of every rank: what looks at all members is done only where there is something to be found.
        gone = next((rank for rank in first.members if rank in self._ended), None) if self._ended else None
        if gone is not None:
            self._refuse(pending, *self._words_of_end(gone, first.kind.name, first.what))
            return
        if self._joined and not first.kind.allows_joined and any(rank in self._joined for rank in first.members):
            self._refuse(pending, "CommunicationError", self._words_of_join(first))
            return
        # The first question is the usual answer, and costs nothing.
        is_complete = len(pending.asks) + len(self._joined) >= len(first.members) and not pending.missing(self._joined)
        if not pending.differs:
            if is_complete and not self._fits(pending):
                self._contested.add(first.pairs_with)
                names = {rank: caller.name for rank, caller in pending.callers().items()}
                self._refuse(pending, "MismatchError", words_of_callers(first.what, names, self._hosts))
            elif is_complete:
                self._begin(pending)
            return
        if pending.differs_since_s is None:
            pending.differs_since_s = now_s
        if is_complete or now_s - pending.differs_since_s >= SETTLING_S:
            asked = {rank: ask.same for rank, ask in pending.asks.items()}
            words = words_of_difference(first.kind, first.what, asked, self._hosts)
            self._refuse(pending, "MismatchError", words)

    def _fits(self, pending: Pending) -> bool:
        """Whether the same thread has called it on all ranks, or there is but one on each that does."""
        is_contested = pending.first.pairs_with in self._contested
        if not (is_contested or pending.is_doubtful):
            return True
        callers = pending.callers().values()
        if is_contested:
            # What is left of several threads, where others have ended with that error, may be another one by rank.
            return len({caller.name for caller in callers}) == 1
        return all(one.may_be(another) for one, another in itertools.combinations(dict.fromkeys(callers), 2))

    def _begin(self, pending: Pending) -> None:
        first = pending.first
        owns = [pending.asks[rank].own if rank in pending.asks else None for rank in first.members]
        absent = [rank for rank in first.members if rank not in pending.asks]
        weighs_active = any(self._joined[rank] for rank in absent)
        divisor = len(first.members) - (len(absent) if weighs_active else 0)
        for rank in first.members:
            self._under_way[rank].append(first)
            if rank in pending.asks:
                self.outbox.append((rank, ["go", pending.asks[rank].ticket, owns, divisor]))
            else:
                # Who has joined has not asked, and is told what it is.
                told = ["stand_in", first.set_id, owns, divisor, first.kind.name, first.what, first.same]
                self.outbox.append((rank, told))
        self._forget(pending)

    # -- what cannot be

    def _refuse(self, pending: Pending, kind: str, words: str) -> None:
        self._refuse_all([pending], kind, words)

    def _refuse_all(self, pendings: list[Pending], kind: str, words: str) -> None:
        """One refusal for all of them: who is told of one of these operations knows of the others."""
        refusal = Refusal(kind, words, pendings)
        for pending in pendings:
            pending.refusal = refusal
            self._refused[pending.id_] = self._pending.pop(pending.id_)
            self._differing.pop(pending.id_, None)
        for pending in list(pendings):
            self._tell_refusal(pending)

    def _tell_refusal(self, pending: Pending) -> None:
        """Tell those who have asked, once each; forget the operation once there is nobody left to tell."""
        refusal = pending.refusal
        assert refusal is not None, "called for what is refused"
        for rank, ask in list(pending.asks.items()):
            self.outbox.append((rank, ["no", ask.ticket, refusal.kind, refusal.words]))
            refusal.told.add(rank)
            self._drop_ask(pending, rank)
        for each in list(refusal.covers):
            if not each.asks and all(
                rank in refusal.told or rank in self._ended or rank in self._joined for rank in each.first.members
            ):
                refusal.covers.remove(each)
                self._forget(each)

    def _words_of_end(self, rank: int, kind: str, what: str) -> tuple[str, str]:
        error = "PeerLostError" if self._ended[rank].endswith("gone") else "CommunicationError"
        return error, (
            # The first words are Horovod's, which users search for.
            f"Horovod has been shut down. {what} cannot be done, since {self._ended[rank]}: "
            + (
                "what ended that rank is the cause, look for its own error"
                if error == "PeerLostError"
                else f"every rank must call {kind} equally often{'' if kind == 'join' else f'. {CAUSES}'}"
            )
        )

    def _words_of_join(self, first: Ask) -> str:
        operation = first.kind.single.in_join_errors or first.kind.single.name
        ranks = [rank for rank in self._joined if rank in first.members]
        return (
            f"{operation} is not supported with Join at this time. ({first.what}, while "
            f"{name_ranks(ranks, self._hosts)} joined)"
        )

    def _find_deadlock(self, now_s: float) -> None:
        if not self._waiting:
            self._stuck_since_s = None
            return
        elsewhere = self._stall.stuck()
        waits_of = {id_ for ids in self._waiting.values() for id_ in ids}
        missing = {id_: self._pending[id_].missing(self._joined) for id_ in waits_of}
        waiting: dict[int, set[Id]] = {rank: set(ids) for rank, ids in self._waiting.items()}
        for rank, blocked in elsewhere.items():
            for each in blocked:
                # Numbers of no operation.
                id_ = -1 - len(missing)
                missing[id_] = self._not_begun(each)
                waiting.setdefault(rank, set()).add(id_)
        stuck = stuck_ranks(waiting, missing)
        if not stuck & self._waiting.keys():
            self._stuck_since_s = None
            return
        if self._stuck_since_s is None or self._stuck_since_s[0] != stuck:
            self._stuck_since_s = (stuck, now_s)
        if now_s - self._stuck_since_s[1] < SETTLING_S:
            return
        asks = {rank: [self._pending[id_].first for id_ in sorted(self._waiting.get(rank, ()))] for rank in stuck}
        waits = {rank: [Wait(ask.kind.name, ask.what, ask.of_set) for ask in asks[rank]] for rank in stuck}
        waits |= {rank: [Wait(elsewhere[rank][0].what, elsewhere[rank][0].what)] for rank in stuck if not waits[rank]}
        words = self._words_of_pairing(stuck) or words_of_deadlock(waits, self._hosts)
        refused = sorted({id_ for rank in stuck for id_ in self._waiting.get(rank, ())})
        self._refuse_all([self._pending[id_] for id_ in refused], "MismatchError", words)

    def _words_of_pairing(self, stuck: Collection[int]) -> str | None:
        """The words for ranks that have asked for the same, but for what it is paired by; None if it is not that."""
        waits = {rank: [self._pending[id_] for id_ in self._waiting.get(rank, ())] for rank in stuck}
        if any(len(each) != 1 for each in waits.values()):
            return None
        asks = {rank: pending.asks[rank] for rank, (pending,) in waits.items()}
        first = next(iter(asks.values()))
        if any(ask.caller is None or ask.name is None for ask in asks.values()):
            return None
        if any((ask.set_id, ask.kind) != (first.set_id, first.kind) for ask in asks.values()):
            return None
        asked = {rank: ask.same for rank, ask in sorted(asks.items())}
        if first_difference(list(asked.values())) is None:
            return None
        return words_of_difference(first.kind, first.what, asked, self._hosts)

    def _not_begun(self, blocked: Blocked) -> set[int]:
        """The ranks without which that collective cannot be done, and which had not begun it when they were blocked.

        Where all have, it is on its way, however long that takes. Of a rank that has not said it is not known.
        """
        if blocked.place is None:
            return set()
        label, number, members = blocked.place
        return {rank for rank in members if rank in self._begun and self._begun[rank].get(label, 0) < number}

    def _find_stalls(self, now_s: float) -> None:
        scene = Scene(self._pending, self._waiting, self._joined_since_s, self._under_way, self._joined_steps.has_any)
        warnings, ends = self._stall.too_long(scene, now_s)
        words, ranks = self._stall.too_long_elsewhere(scene, now_s)
        of_join, end_of_join = self._stall.too_long_joined(scene, now_s)
        self.warnings += warnings + words + of_join
        self.outbox += [(rank, ["end", *words]) for rank in ranks]
        # After the words: these are of what has been answered by now.
        self.outbox += [(rank, ["where"]) for rank in self._stall.to_ask(scene, now_s) if rank not in self._ended]
        for pending, why in ends:
            self._refuse(pending, "CommunicationError", why)
        if end_of_join is not None:
            self._end_join(["not_joined", "CommunicationError", end_of_join], now_s)

    # -- bookkeeping

    def _forget(self, pending: Pending) -> None:
        there = self._pending if pending.refusal is None else self._refused
        del there[pending.id_]
        for rank in list(pending.asks):
            self._drop_ask(pending, rank)
        if not self._alike[pending.first.pairs_with].remove(pending):
            del self._alike[pending.first.pairs_with]

    def _drop_ask(self, pending: Pending, rank: int) -> None:
        """It is answered: the rank waits for it no more."""
        del self._id_of[rank, pending.asks.pop(rank).ticket]
        waits = self._waiting.get(rank)
        if waits is not None:
            waits.discard(pending.id_)
            if not waits:
                del self._waiting[rank]

    def _end_join(self, message: list[Any], now_s: float) -> None:
        self._stall.join_ended(now_s)
        for rank in self._joined:
            if rank not in self._ended:
                self.outbox.append((rank, message))
        self._joined_steps.end(self._joined.keys() | self._ended.keys())
        self._joined.clear()
        self._joined_since_s.clear()
