"""
Decides on rank 0 which operations begin, which are refused, and when deadlocked or stalled ranks are reported.

    ask (rank, operation) ── all members have requested the same ── go, to all of them in one order
                             they differ, wait for each other, or one has ended ── no, to all of them, with one text

Rank 0 has the one `Negotiation` of a job, like Horovod's coordinator. `coordinator` receives the ranks' messages, calls
this class, and sends the answers from `outbox` in order. There is no connection, thread or clock here: `coordinator`
passes the time to `tick`, which applies the rules of `stall`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from ..calls.messages import (
    AllJoined,
    AskLine,
    EndProcess,
    FailedOnRank,
    FromRank0,
    Go,
    GoAsStandIn,
    JoinFailed,
    LivingOptimizers,
    MissingRanks,
    No,
    Rank0HasLostRank,
    RankLeft,
    StillHere,
)
from ..calls.mismatch import (
    CAUSES,
    RankWait,
    first_difference,
    name_ranks,
    words_of_callers,
    words_of_deadlock,
    words_of_difference,
)
from ..calls.operation import CONNECTING
from ..errors import LOOK_THERE, MOST_NAMED, UNKNOWN_END, describe_end
from .endings import Endings
from .joined_steps import JoinedSteps
from .pending import Id, PairingQueue, Pending, RankRequest, Refusal, stuck_ranks
from .stall import SHOWN, BlockedThread, Scene, StallRules, StallWatch

# Delay between a difference and its error, so that the error can say what all ranks did; and between the first sign of
# a deadlock and its error, so that messages in flight can arrive.
SETTLING_S = 1.0


class Negotiation:
    """All operations that some ranks have requested and others have not."""

    def __init__(self, hosts: Sequence[str], stall: StallRules) -> None:
        self.outbox: list[tuple[int, FromRank0]] = []
        self.warnings: list[str] = []
        self._hosts = hosts
        self._stall = StallWatch(hosts, stall)
        self._ids = itertools.count()
        # In the order of the first requests. Operations whose refusal some ranks have not received are in `_refused`.
        self._pending: dict[Id, Pending] = {}
        self._refused: dict[Id, Pending] = {}
        # The pending operations that ranks have requested with different values.
        self._differing: dict[Id, Pending] = {}
        self._queues: dict[tuple[int, str, str | None], PairingQueue] = {}
        # Keys (`RankRequest.pairs_with`) of operations that different threads have called on different ranks.
        self._contested: set[tuple[int, str, str | None]] = set()
        self._id_of: dict[tuple[int, int], Id] = {}  # by rank and ticket
        # What each rank is blocked in. A blocked rank sends no other request.
        self._waiting: dict[int, set[Id]] = {}
        # By rank: how many collectives of each group it had begun when it was last blocked.
        self._begun: dict[int, Mapping[str, int]] = {}
        self._stuck_since_s: tuple[frozenset[int], float] | None = None
        # The joined ranks in order; the value is whether averages are over the other ranks only.
        self._joined: dict[int, bool] = {}
        self._joined_steps = JoinedSteps(lambda rank, message: self.outbox.append((rank, message)))
        self._joined_since_s: dict[int, float] = {}
        self._endings = Endings()
        # By rank that has ended, the first one first: whether it did so normally, and not by a crash.
        self._ended: dict[int, bool] = {}
        # The message about the first end, as sent to the other ranks.
        self.first_left: RankLeft | None = None
        # By rank: operations that have begun and are not reported as ended; and how many are.
        self._under_way: dict[int, deque[RankRequest]] = {rank: deque() for rank in range(len(hosts))}
        self._over_count = dict.fromkeys(range(len(hosts)), 0)
        # By group label, the number of its last operation that has failed on a rank.
        self._failed: dict[str, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no operation is pending, and no rank reports being blocked."""
        return not self._pending and not self._refused and self._stall.is_idle

    @property
    def is_settled(self) -> bool:
        """Whether an operation that all ranks request would begin: none is pending, no rank has joined or ended."""
        return not (self._pending or self._refused or self._joined or self._ended)

    @property
    def needs_ticks(self) -> bool:
        """Whether time alone can change something."""
        return bool(self._pending or self._joined) or not (self._stall.is_idle and self._endings.is_idle)

    @property
    def first_end(self) -> tuple[str, bool]:
        """The first rank that has ended, and how, in words; and whether it crashed."""
        for rank, ended_normally in self._ended.items():
            return self._describe_end(rank), not ended_normally
        return UNKNOWN_END, True

    # -- messages from ranks

    def ask(self, rank: int, ask: RankRequest, now_s: float) -> None:
        """Handles a request of ``rank`` for an operation."""
        queue = self._queues.get(ask.pairs_with)
        if queue is None:
            queue = self._queues[ask.pairs_with] = PairingQueue()
        pending = queue.next_of(rank)
        if pending is None:
            pending = queue.add(next(self._ids), ask, rank, now_s)
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

    def begin_voted(self, ask: RankRequest, now_s: float) -> None:
        """Notes an operation that all ranks have voted for and now run; the caller checks that nothing is unsettled."""
        for rank in ask.members:
            self._stall.heard(rank, now_s)
            self._under_way[rank].append(ask)

    def has_asked(self, rank: int, ticket: int) -> bool:
        """Whether the rank has an unanswered request with this ticket."""
        return (rank, ticket) in self._id_of

    def missing(self, rank: int) -> StillHere:
        """Returns the ranks that hold ``rank`` up.

        Only the oldest operations are covered.
        """
        told: list[MissingRanks] = []
        for pending in itertools.islice(self._pending.values(), SHOWN):
            if rank in pending.asks and (absent := pending.absent(self._joined)):
                told.append(MissingRanks(pending.asks[rank].ticket, tuple(absent[:MOST_NAMED]), len(absent)))
        return StillHere(tuple(told))

    def wait(self, rank: int, ticket: int, begun: Mapping[str, int] = MappingProxyType({})) -> None:
        """Notes that ``rank`` is blocked in that operation; ``begun`` counts its collectives of each group so far."""
        self._begun[rank] = begun
        id_ = self._id_of.get((rank, ticket))
        if id_ is not None:
            self._waiting.setdefault(rank, set()).add(id_)

    def join(
        self,
        rank: int,
        average_of_active: bool,
        now_s: float,
        living: Iterable[LivingOptimizers] = (),
    ) -> None:
        """Lets ``rank`` take part in all-reduces with nothing to give, until all ranks have joined.

        ``living`` are its living optimizers, by process set.
        """
        others = {mode for mode in self._joined.values() if mode != average_of_active}
        self._joined[rank] = average_of_active
        self._joined_since_s[rank] = now_s
        if not others:
            everybody = range(len(self._hosts))
            self._joined_steps.joined(rank, [(each.set_id, each.members or everybody, each.numbers) for each in living])
        if others:
            words = "Mismatched join: One rank called join() with average='active', but another rank without. " + (
                f"({name_ranks(sorted(self._joined), self._hosts)} joined)"
            )
            self._end_join(JoinFailed("MismatchError", words), now_s)
        elif len(self._joined) == len(self._hosts):
            self._end_join(AllJoined(rank), now_s)
        elif gone := [rank for rank in self._ended if rank not in self._joined]:
            self._end_join(JoinFailed(*self._words_of_end(gone[0], "join", "join")), now_s)
        for pending in [*self._pending.values(), *self._refused.values()]:
            self._consider(pending, now_s)

    def pinned(self, rank: int, join: int, set_id: int, numbers: Sequence[int]) -> None:
        """Notes the answer of ``rank`` to "pin" in that join: it keeps these optimizers alive."""
        self._joined_steps.pinned(rank, join, set_id, numbers)

    def introduce(self, rank: int, pid: int) -> None:
        """Notes the process id of ``rank`` on its host."""
        self._stall.names.pids[rank] = pid

    def heard(self, rank: int, now_s: float) -> None:
        """Notes that some message has arrived from ``rank``."""
        self._stall.heard(rank, now_s)

    def program_line(self, rank: int, line: str, now_s: float) -> None:
        """Notes where the program of ``rank`` is, as the rank answered."""
        self._stall.program_line(rank, line, now_s)

    def busy(
        self,
        rank: int,
        blocked: Sequence[BlockedThread],
        *,
        is_stuck: bool,
        begun: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Notes what ``rank`` has been blocked in for a while; an empty sequence if nothing.

        ``is_stuck`` is whether all its threads are blocked in these waits, so that it does nothing until one ends;
        ``begun`` is as in `wait`.
        """
        self._begun[rank] = begun
        self._stall.busy(rank, blocked, is_stuck=is_stuck)

    def over(self, rank: int, count: int) -> None:
        """Notes how many of the operations that have begun on ``rank`` have ended there, in all."""
        under_way = self._under_way[rank]
        while self._over_count[rank] < count and under_way:
            under_way.popleft()
            self._over_count[rank] += 1

    def failed(self, rank: int, label: str, number: int, words: str) -> None:
        """Tells the other ranks that an operation has failed on ``rank``, unless it has failed on another before.

        ``label`` is its group's, and ``number`` counts that group's operations.
        """
        if number > self._failed.get(label, 0):
            self._failed[label] = number
            others = [other for other in range(len(self._hosts)) if other != rank and other not in self._ended]
            self.outbox += [(other, FailedOnRank(rank, label, number, words)) for other in others]

    def lost(self, rank: int) -> None:
        """Notes an error on ``rank`` that another rank's end caused: if ``rank`` ends, it was not the first."""
        self._endings.lost(rank)
        if rank == 0:
            # When rank 0 ends, no process is left to report which rank's end caused that.
            self.outbox += [(other, Rank0HasLostRank()) for other in range(1, len(self._hosts))]

    def end(self, rank: int, ended_normally: bool, now_s: float) -> None:
        """Notes that ``rank`` has ended; ``ended_normally`` is False if it crashed."""
        for ended, was_normal in self._endings.ended(rank, ended_normally, now_s):
            self._report_end(ended, was_normal, now_s)

    def _report_end(self, rank: int, ended_normally: bool, now_s: float) -> None:
        if self.first_left is None:
            # A rank that waits in an engine, for a bucket, learns from the engine only that some rank has ended; this
            # says which.
            self.first_left = RankLeft(rank, ended_normally)
            # Rank 0 last: this may make it end, and then the others would not receive it.
            others = [other for other in [*range(1, len(self._hosts)), 0] if other != rank]
            self.outbox += [(other, self.first_left) for other in others]
        else:
            # Those that are connecting to it learn of it from nobody else.
            met = {member for ask in self._under_way[rank] if ask.kind in CONNECTING for member in ask.members}
            self.outbox += [
                (other, RankLeft(rank, ended_normally)) for other in sorted(met - {rank} - self._ended.keys())[::-1]
            ]
        self._ended.setdefault(rank, ended_normally)
        self._waiting.pop(rank, None)
        self._stall.busy(rank, (), is_stuck=False)
        self._under_way[rank].clear()
        for pending in [*self._pending.values(), *self._refused.values()]:
            self._consider(pending, now_s)
        if self._joined and rank not in self._joined:
            kind, words = self._words_of_end(rank, "join", "join")
            self._end_join(JoinFailed(kind, words), now_s)

    # -- time

    def tick(self, now_s: float) -> None:
        """Applies the time; must be called now and then while `needs_ticks`."""
        for ended, was_normal in self._endings.due(now_s):
            self._report_end(ended, was_normal, now_s)
        # Time alone does not change operations whose requests agree.
        for pending in list(self._differing.values()):
            self._consider(pending, now_s)
        self._find_deadlock(now_s)
        self._find_stalls(now_s)

    def _consider(self, pending: Pending, now_s: float) -> None:
        """Begins the operation, refuses it, or leaves it pending."""
        first = pending.first
        if pending.refusal is not None:
            self._tell_refusal(pending)
            return
        # This runs for every request of every rank, so all members are checked only where that can matter.
        gone = next((rank for rank in self._ended if rank in first.members), None)
        if gone is not None:
            self._refuse(pending, *self._words_of_end(gone, first.kind.name, first.what))
            return
        if self._joined and not first.kind.allows_joined and any(rank in self._joined for rank in first.members):
            self._refuse(pending, "CommunicationError", self._words_of_join(first))
            return
        # The cheap comparison is first: it usually decides.
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
        """Whether the calling threads match on all ranks, or each rank has only one that calls such operations."""
        is_contested = pending.first.pairs_with in self._contested
        if not (is_contested or pending.is_doubtful):
            return True
        callers = pending.callers().values()
        if is_contested:
            # Some threads may have ended with that error, and those that remain may differ between ranks: compare full
            # names.
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
                self.outbox.append((rank, Go(pending.asks[rank].ticket, owns, divisor)))
            else:
                # A rank that has joined made no request, so it gets the operation's description.
                told = GoAsStandIn(first.set_id, owns, divisor, first.kind.name, first.what, first.same)
                self.outbox.append((rank, told))
        self._forget(pending)

    # -- refusals

    def _refuse(self, pending: Pending, kind: str, words: str) -> None:
        self._refuse_all([pending], kind, words)

    def _refuse_all(self, pendings: list[Pending], kind: str, words: str) -> None:
        """Refuses all of them together: a rank that receives this for one operation needs no refusal of the others."""
        refusal = Refusal(kind, words, pendings)
        for pending in pendings:
            pending.refusal = refusal
            self._refused[pending.id_] = self._pending.pop(pending.id_)
            self._differing.pop(pending.id_, None)
        for pending in list(pendings):
            self._tell_refusal(pending)

    def _tell_refusal(self, pending: Pending) -> None:
        """Answers the ranks that have requested it, once each; removes the operation once no rank is left to answer."""
        refusal = pending.refusal
        assert refusal is not None, "only a refused operation is passed"
        for rank, ask in list(pending.asks.items()):
            self.outbox.append((rank, No(ask.ticket, refusal.kind, refusal.words)))
            refusal.sent_to.add(rank)
            self._drop_ask(pending, rank)
        for each in list(refusal.covers):
            if not each.asks and all(
                rank in refusal.sent_to or rank in self._ended or rank in self._joined for rank in each.first.members
            ):
                refusal.covers.remove(each)
                self._forget(each)

    def _words_of_end(self, rank: int, kind: str, what: str) -> tuple[str, str]:
        # The first words are Horovod's, which users search for.
        words = f"Horovod has been shut down. {what} failed because {self._describe_end(rank)}"
        if not self._ended[rank]:
            return "PeerLostError", f"{words}: {LOOK_THERE}"
        cause = "" if kind == "join" else f". {CAUSES}"
        return "CommunicationError", f"{words}: every rank must call {kind} the same number of times{cause}"

    def _describe_end(self, rank: int) -> str:
        return describe_end(name_ranks([rank], self._hosts), self._ended[rank])

    def _words_of_join(self, first: RankRequest) -> str:
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
                # Negative numbers, which no operation has.
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
        waits = {rank: [RankWait(ask.kind.name, ask.what, ask.of_set) for ask in asks[rank]] for rank in stuck}
        waits |= {
            rank: [RankWait(elsewhere[rank][0].what, elsewhere[rank][0].what)] for rank in stuck if not waits[rank]
        }
        words = self._words_of_pairing(stuck) or words_of_deadlock(waits, self._hosts)
        refused = sorted({id_ for rank in stuck for id_ in self._waiting.get(rank, ())})
        self._refuse_all([self._pending[id_] for id_ in refused], "MismatchError", words)

    def _words_of_pairing(self, stuck: Collection[int]) -> str | None:
        """The message for ranks that request one kind under different pairing names; None if that is not so."""
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

    def _not_begun(self, blocked: BlockedThread) -> set[int]:
        """The members of that collective that had not begun it when they were last blocked.

        If all had begun it, it is in progress, however long it takes. A rank that has sent no count is left out.
        """
        if blocked.collective is None:
            return set()
        label, number, members = blocked.collective
        return {rank for rank in members if rank in self._begun and self._begun[rank].get(label, 0) < number}

    def _find_stalls(self, now_s: float) -> None:
        scene = Scene(self._pending, self._waiting, self._joined_since_s, self._under_way, self._joined_steps.has_any)
        warnings, ends = self._stall.find_stalled(scene, now_s)
        words, ranks = self._stall.find_stalled_elsewhere(scene, now_s)
        of_join, end_of_join = self._stall.find_stalled_joins(scene, now_s)
        self.warnings += warnings + words + of_join
        self.outbox += [(rank, EndProcess(" ".join(words))) for rank in ranks]
        # After the messages were composed: they use the answers received so far.
        self.outbox += [(rank, AskLine()) for rank in self._stall.to_ask(scene, now_s) if rank not in self._ended]
        for pending, why in ends:
            self._refuse(pending, "CommunicationError", why)
        if end_of_join is not None:
            self._end_join(JoinFailed("CommunicationError", end_of_join), now_s)

    # -- bookkeeping

    def _forget(self, pending: Pending) -> None:
        there = self._pending if pending.refusal is None else self._refused
        del there[pending.id_]
        for rank in list(pending.asks):
            self._drop_ask(pending, rank)
        if not self._queues[pending.first.pairs_with].remove(pending):
            del self._queues[pending.first.pairs_with]

    def _drop_ask(self, pending: Pending, rank: int) -> None:
        """Removes an answered request: the rank no longer waits for it."""
        del self._id_of[rank, pending.asks.pop(rank).ticket]
        waits = self._waiting.get(rank)
        if waits is not None:
            waits.discard(pending.id_)
            if not waits:
                del self._waiting[rank]

    def _end_join(self, message: AllJoined | JoinFailed, now_s: float) -> None:
        self._stall.join_ended(now_s)
        for rank in self._joined:
            if rank not in self._ended:
                self.outbox.append((rank, message))
        self._joined_steps.end(self._joined.keys() | self._ended.keys())
        self._joined.clear()
        self._joined_since_s.clear()
