"""
Which operations may begin: the rules, without a connection, a thread or a clock.

    ask (rank, operation) ── all members have asked for the same ── go, to each in one order
                             they differ, wait for each other, or one has ended ── no, to each, with the same words

Rank 0 has the one `Negotiation` of a job and hears of all ranks in it (as Horovod's coordinator does, from whom the
idea is); how their words come and go is in `coordinator`. Answers are left in `outbox`, in the order to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .mismatch import first_difference, name_ranks, words_of_deadlock, words_of_difference
from .pending import Ask, Id, Pending, Refusal, stuck_ranks
from .stall import Scene, StallRules, StallWatch

# Between a difference and its error, so that the error can tell what all ranks did; and between the time that ranks
# seem to wait for each other and the error, so that what is on its way arrives.
SETTLING_S = 1.0

# The operations that a rank which has called join() takes part in, with nothing to give.
_WITH_JOIN = frozenset({"allreduce", "grouped_allreduce"})


class Negotiation:
    """All operations that some ranks have asked for and others not yet."""

    def __init__(self, hosts: Sequence[str], stall: StallRules) -> None:
        self.outbox: list[tuple[int, list[Any]]] = []
        self.warnings: list[str] = []
        self._hosts = hosts
        self._stall = StallWatch(hosts, stall)
        self._pending: dict[Id, Pending] = {}
        # What each rank is blocked in. One that is waits for nothing else, and will ask for nothing else.
        self._waiting: dict[int, set[Id]] = {}
        self._stuck_since_s: tuple[frozenset[int], float] | None = None
        # By rank, in the order of their coming: whether averages are to be over the others alone.
        self._joined: dict[int, bool] = {}
        self._ended: dict[int, str] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen by the mere passing of time."""
        return not self._pending and self._stall.is_idle

    @property
    def first_end(self) -> str:
        """Which rank has ended first of those that have, and how."""
        return next(iter(self._ended.values()))

    # -- what ranks say

    def ask(self, rank: int, ask: Ask, now_s: float) -> None:
        """``rank`` asks for an operation."""
        pending = self._pending.setdefault(ask.id_, Pending(ask, now_s))
        pending.asks[rank] = ask
        self._consider(pending, now_s)

    def wait(self, rank: int, set_id: int, key: str) -> None:
        """``rank`` is blocked until that operation is done."""
        if (set_id, key) in self._pending:
            self._waiting.setdefault(rank, set()).add((set_id, key))

    def join(self, rank: int, average_of_active: bool, now_s: float) -> None:
        """``rank`` takes part in all-reduces from now on, with nothing to give, until all ranks say so."""
        others = {mode for mode in self._joined.values() if mode != average_of_active}
        self._joined[rank] = average_of_active
        if others:
            words = "Mismatched join: One rank called join() with average='active', but another rank without. " + (
                f"({name_ranks(sorted(self._joined), self._hosts)} joined)"
            )
            self._end_join(["no", 0, "join", "MismatchError", words])
        elif len(self._joined) == len(self._hosts):
            self._end_join(["joined", rank])
        elif gone := [rank for rank in self._ended if rank not in self._joined]:
            self._end_join(["no", 0, "join", *self._words_of_end(gone[0], "join", "join")])
        for pending in list(self._pending.values()):
            self._consider(pending, now_s)

    def busy(self, rank: int, what: str | None, since_s: float) -> None:
        """``rank`` has been waiting for other ranks in ``what``, which is no operation of here; None: no more."""
        self._stall.busy(rank, what, since_s)

    def end(self, rank: int, by_itself: bool, now_s: float) -> None:
        """``rank`` takes part in nothing any more."""
        how = "has ended" if by_itself else "has gone"
        self._ended.setdefault(rank, f"{name_ranks([rank], self._hosts)} {how}")
        self._waiting.pop(rank, None)
        self._stall.busy(rank, None, now_s)
        for pending in list(self._pending.values()):
            self._consider(pending, now_s)
        if self._joined and rank not in self._joined:
            kind, words = self._words_of_end(rank, "join", "join")
            self._end_join(["no", 0, "join", kind, words])

    # -- what time brings

    def tick(self, now_s: float) -> None:
        """To be called every now and then, unless `is_idle`."""
        for pending in list(self._pending.values()):
            self._consider(pending, now_s)
        self._find_deadlock(now_s)
        self._find_stalls(now_s)

    def _consider(self, pending: Pending, now_s: float) -> None:
        """Begin the operation, refuse it, or leave it as it is."""
        first = pending.first
        if pending.refusal is not None:
            self._tell_refusal(pending)
            return
        gone = next((rank for rank in first.members if rank in self._ended), None)
        if gone is not None:
            self._refuse(pending, *self._words_of_end(gone, first.kind, first.what))
            return
        if first.kind not in _WITH_JOIN and any(rank in self._joined for rank in first.members):
            self._refuse(pending, "CommunicationError", self._words_of_join(first))
            return
        missing = [rank for rank in first.members if rank not in pending.asks and rank not in self._joined]
        asked = {rank: ask.same for rank, ask in pending.asks.items()}
        key = first_difference(asked)
        if key is None:
            if not missing:
                self._begin(pending)
            return
        if pending.differs_since_s is None:
            pending.differs_since_s = now_s
        if not missing or now_s - pending.differs_since_s >= SETTLING_S:
            words = words_of_difference(first.kind, first.what, asked, key, self._hosts)
            self._refuse(pending, "MismatchError", words)

    def _begin(self, pending: Pending) -> None:
        first = pending.first
        owns = [pending.asks[rank].own if rank in pending.asks else None for rank in first.members]
        absent = [rank for rank in first.members if rank not in pending.asks]
        weighs_active = any(self._joined[rank] for rank in absent)
        divisor = len(first.members) - (len(absent) if weighs_active else 0)
        go = ["go", first.set_id, first.key, owns, divisor]
        for rank in first.members:
            # Who has joined has not asked, and is told what it is.
            own_words = [*go, first.kind, first.what, first.same] if rank in absent else go
            self.outbox.append((rank, own_words))
        self._forget(pending)

    # -- what cannot be

    def _refuse(self, pending: Pending, kind: str, words: str) -> None:
        pending.refusal = Refusal(kind, words)
        self._tell_refusal(pending)

    def _tell_refusal(self, pending: Pending) -> None:
        """Tell those who have asked, once each; forget the operation once there is nobody left to tell."""
        refusal, first = pending.refusal, pending.first
        assert refusal is not None, "called for what is refused"
        for rank in list(pending.asks):
            self.outbox.append((rank, ["no", first.set_id, first.key, refusal.kind, refusal.words]))
            del pending.asks[rank]
            refusal.told.add(rank)
            self._stop_waiting(rank, first.id_)
        for each in [each for each in self._pending.values() if each.refusal is refusal]:
            members = each.first.members
            if all(rank in refusal.told or rank in self._ended or rank in self._joined for rank in members):
                self._forget(each)

    def _words_of_end(self, rank: int, kind: str, what: str) -> tuple[str, str]:
        error = "PeerLostError" if self._ended[rank].endswith("gone") else "CommunicationError"
        return error, (
            # The first words are Horovod's, which users search for.
            f"Horovod has been shut down. {what} cannot be done, since {self._ended[rank]}: "
            + (
                "what ended that rank is the cause, look for its own error"
                if error == "PeerLostError"
                else f"every rank must call {kind} equally often; see hvd.join() for ranks with fewer batches"
            )
        )

    def _words_of_join(self, first: Ask) -> str:
        operation = first.kind.removeprefix("grouped_").capitalize()
        horovods = f"{operation} is not supported with Join at this time."
        if operation == "Allgather":
            horovods += " Specify sparse_to_dense=True if using DistributedOptimizer"
        ranks = [rank for rank in self._joined if rank in first.members]
        return f"{horovods} ({first.what}, while {name_ranks(ranks, self._hosts)} joined)"

    def _find_deadlock(self, now_s: float) -> None:
        missing = {id_: pending.missing(self._joined) for id_, pending in self._pending.items()}
        stuck = stuck_ranks(self._waiting, missing)
        if not stuck:
            self._stuck_since_s = None
            return
        if self._stuck_since_s is None or self._stuck_since_s[0] != stuck:
            self._stuck_since_s = (stuck, now_s)
        if now_s - self._stuck_since_s[1] < SETTLING_S:
            return
        waits = {rank: [self._pending[wait].first for wait in sorted(self._waiting[rank])] for rank in sorted(stuck)}
        words = words_of_deadlock(
            {rank: [(ask.kind, ask.what, ask.of_set) for ask in asks] for rank, asks in waits.items()}, self._hosts
        )
        # One refusal for all of them: who is told of one of these operations knows of the others.
        refusal = Refusal("MismatchError", words)
        for id_ in {ask.id_ for asks in waits.values() for ask in asks}:
            self._pending[id_].refusal = refusal
        for pending in [pending for pending in self._pending.values() if pending.refusal is refusal]:
            self._tell_refusal(pending)

    def _find_stalls(self, now_s: float) -> None:
        scene = Scene(self._pending, self._waiting, self._joined)
        warnings, ends = self._stall.too_long(scene, now_s)
        words, ranks = self._stall.too_long_elsewhere(scene, now_s)
        self.warnings += warnings + words
        self.outbox += [(rank, ["end", *words]) for rank in ranks]
        for pending, why in ends:
            self._refuse(pending, "CommunicationError", why)

    # -- bookkeeping

    def _forget(self, pending: Pending) -> None:
        id_ = pending.first.id_
        self._pending.pop(id_, None)
        for rank in pending.first.members:
            self._stop_waiting(rank, id_)

    def _stop_waiting(self, rank: int, id_: Id) -> None:
        waits = self._waiting.get(rank)
        if waits is not None:
            waits.discard(id_)
            if not waits:
                del self._waiting[rank]

    def _end_join(self, message: list[Any]) -> None:
        for rank in self._joined:
            if rank not in self._ended:
                self.outbox.append((rank, message))
        self._joined.clear()
