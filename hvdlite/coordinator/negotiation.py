"""
Decides on rank 0 which operations begin, which are refused, and when deadlocked or stalled ranks are reported.

    ask (rank, operation) ── all members have requested the same ── go, to all of them in one order
                             they differ, wait for each other, or one has ended ── no, to all of them, with one text

`coordinator` receives the ranks' messages, calls this class, and sends the answers from `outbox` in order. There is no
connection, thread or clock here: `tick` gets the time, and applies the rules of `deadlocks` and `stall`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ..calls import messages
from ..calls.mismatch import CAUSES, first_difference, name_ranks, words_of_callers, words_of_difference
from ..calls.operation import CONNECTING, kind_named
from ..errors import LOOK_THERE, MOST_NAMED, UNKNOWN_END, describe_end
from .deadlocks import Deadlocks
from .scene import BlockedThread, Endings, Id, Joined, JoinedSteps, PairingQueue, Pending, Refusal, Scene
from .stall import StallRules, StallWatch

# Delay between a difference and its error, so that the error can say what all ranks did; and between the first sign of
# a deadlock and its error, so that messages in flight can arrive.
SETTLING_S = 1.0

_CONNECTING = {kind.name for kind in CONNECTING}


class Negotiation:
    """All operations that some ranks have requested and others have not."""

    def __init__(self, hosts: Sequence[str], stall: StallRules) -> None:
        self.outbox: list[tuple[int, messages.FromRank0]] = []
        self.warnings: list[str] = []
        self.scene = Scene(hosts)
        self.joined_steps = JoinedSteps(lambda rank, message: self.outbox.append((rank, message)))
        self.stall = StallWatch(self.scene, stall, self.joined_steps)
        self._deadlocks = Deadlocks(self.scene)
        self._endings = Endings()
        self.first_left: messages.RankLeft | None = None  # as sent to the other ranks
        self._ids = itertools.count()
        # Operations whose refusal some ranks have not received, and such as ranks have requested with different values.
        self._refused: dict[Id, Pending] = {}
        self._differing: dict[Id, Pending] = {}
        self._queues: dict[tuple[int, str, str | None], PairingQueue] = {}
        # Keys (`OperationRequest.pairs_with`) of operations that different threads have called on different ranks.
        self._contested: set[tuple[int, str, str | None]] = set()
        self._id_of: dict[tuple[int, int], Id] = {}  # by rank and ticket
        self._failed: dict[str, int] = {}  # by group label, the last operation that has failed on a rank

    @property
    def is_settled(self) -> bool:
        """Whether an operation that all ranks request would begin: none is pending, no rank has joined or ended."""
        scene = self.scene
        return not (scene.pending or self._refused or scene.joined or scene.ended)

    @property
    def needs_ticks(self) -> bool:
        return bool(self.scene.pending or self.scene.joined or self.scene.busy) or not self._endings.is_idle

    @property
    def first_end(self) -> tuple[str, bool]:
        """The first rank that has ended, and how, in words; and whether it crashed."""
        for rank, ended_normally in self.scene.ended.items():
            return self._describe_end(rank), not ended_normally
        return UNKNOWN_END, True

    # -- messages from ranks

    def ask(self, rank: int, ask: messages.OperationRequest, now_s: float) -> None:
        """Handles a request of ``rank`` for an operation, with all its members."""
        queue = self._queues.get(ask.pairs_with)
        if queue is None:
            queue = self._queues[ask.pairs_with] = PairingQueue()
        pending = queue.next_of(rank)
        if pending is None:
            pending = queue.add(next(self._ids), ask, rank, now_s)
            self.scene.pending[pending.id_] = pending
        pending.asks[rank] = ask
        self._id_of[rank, ask.ticket] = pending.id_
        if ask.caller is not None and ask.caller.is_doubtful:
            pending.is_doubtful = True
        if ask.same != pending.first.same and first_difference([pending.first.same, ask.same]) is not None:
            pending.differs = True
            if pending.refusal is None:
                self._differing[pending.id_] = pending
        self.stall.asked_at_s = now_s
        self._consider(pending, now_s)

    def begin_voted(self, ask: messages.OperationRequest, now_s: float) -> None:
        """Notes an operation that all ranks have voted for and now run; the caller checks that nothing is unsettled."""
        self.heard_all(now_s)
        for rank in ask.members:
            self.scene.under_way[rank].append(ask)

    def heard_all(self, now_s: float) -> None:
        for rank in self.scene.everybody:
            self.stall.heard(rank, now_s)

    def has_asked(self, rank: int, ticket: int) -> bool:
        return (rank, ticket) in self._id_of

    def missing(self, rank: int) -> messages.StillHere:
        """Returns the ranks that hold ``rank`` up, in the oldest operations alone."""
        told: list[messages.MissingRanks] = []
        for pending in itertools.islice(self.scene.pending.values(), MOST_NAMED):
            if rank in pending.asks and (absent := pending.absent(self.scene.joined)):
                told.append(messages.MissingRanks(pending.asks[rank].ticket, tuple(absent[:MOST_NAMED]), len(absent)))
        return messages.StillHere(tuple(told))

    def wait(self, rank: int, ticket: int, begun: Mapping[str, int] = MappingProxyType({})) -> None:
        """Notes that ``rank`` is blocked in that operation; ``begun`` counts its collectives of each group so far."""
        self.scene.begun[rank] = begun
        id_ = self._id_of.get((rank, ticket))
        if id_ is not None:
            self.scene.waiting.setdefault(rank, set()).add(id_)

    def busy(
        self,
        rank: int,
        blocked: Sequence[BlockedThread],
        *,
        is_stuck: bool,
        begun: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Notes what ``rank`` has been blocked in for a while; see `Scene`."""
        self.scene.begun[rank] = begun
        self.scene.set_busy(rank, blocked, is_stuck=is_stuck)

    def join(
        self, rank: int, average_of_active: bool, now_s: float, living: Iterable[messages.LivingOptimizers] = ()
    ) -> None:
        """Lets ``rank`` take part in all-reduces with nothing to give, until all ranks have joined."""
        scene = self.scene
        others = {each.average_of_active for each in scene.joined.values()} - {average_of_active}
        scene.joined[rank] = Joined(average_of_active, now_s)
        if others:
            words = "Mismatched join: One rank called join() with average='active', but another rank without. " + (
                f"({name_ranks(sorted(scene.joined), scene.hosts)} joined)"
            )
            self._end_join(messages.JoinFailed("MismatchError", words), now_s)
        else:
            self.joined_steps.joined(rank, living)
            if len(scene.joined) == len(scene.hosts):
                self._end_join(messages.AllJoined(rank), now_s)
            elif gone := [rank for rank in scene.ended if rank not in scene.joined]:
                self._end_join(messages.JoinFailed(*self._words_of_end(gone[0], "join", "join")), now_s)
        self._consider_all(now_s)

    def failed(self, rank: int, label: str, number: int, words: str) -> None:
        """Tells the others that this operation of a group has failed on ``rank``, unless it has on another before."""
        if number > self._failed.get(label, 0):
            self._failed[label] = number
            others = [each for each in self.scene.everybody if each != rank and each not in self.scene.ended]
            self.outbox += [(other, messages.FailedOnRank(rank, label, number, words)) for other in others]

    def lost(self, rank: int) -> None:
        """Notes an error on ``rank`` that another rank's end caused: if ``rank`` ends, it was not the first."""
        self._endings.lost(rank)
        if rank == 0:
            # When rank 0 ends, no process is left to report which rank's end caused that.
            self.outbox += [(other, messages.Rank0HasLostRank()) for other in range(1, len(self.scene.hosts))]

    def end(self, rank: int, ended_normally: bool, now_s: float) -> None:
        """Notes that ``rank`` has ended; ``ended_normally`` is False if it crashed."""
        for ended, was_normal in self._endings.ended(rank, ended_normally, now_s):
            self._report_end(ended, was_normal, now_s)

    def _report_end(self, rank: int, ended_normally: bool, now_s: float) -> None:
        scene, left = self.scene, messages.RankLeft(rank, ended_normally)
        if self.first_left is None:
            # From an engine a rank learns only that some rank has ended; this says which.
            self.first_left = left
            # Rank 0 last: this may make it end, and then the others would not receive it.
            self.outbox += [(other, left) for other in [*range(1, len(scene.hosts)), 0] if other != rank]
        else:
            # Those that are connecting to it learn of it from nobody else.
            met = {member for ask in scene.under_way[rank] if ask.kind in _CONNECTING for member in ask.members}
            self.outbox += [(other, left) for other in sorted(met - {rank} - scene.ended.keys())[::-1]]
        scene.ended.setdefault(rank, ended_normally)
        scene.waiting.pop(rank, None)
        scene.set_busy(rank, (), is_stuck=False)
        scene.under_way[rank].clear()
        self._consider_all(now_s)
        if scene.joined and rank not in scene.joined:
            self._end_join(messages.JoinFailed(*self._words_of_end(rank, "join", "join")), now_s)

    # -- time

    def tick(self, now_s: float) -> None:
        """Applies the time; must be called now and then while `needs_ticks`."""
        for ended, was_normal in self._endings.due(now_s):
            self._report_end(ended, was_normal, now_s)
        # Time alone does not change operations whose requests agree.
        for pending in list(self._differing.values()):
            self._consider(pending, now_s)
        if (deadlock := self._deadlocks.find(now_s, SETTLING_S)) is not None:
            self._refuse(deadlock[0], "MismatchError", deadlock[1])
        stalls = self.stall.look(now_s)
        self.warnings += stalls.warnings
        self.outbox += [(rank, messages.EndProcess(stalls.why_ended)) for rank in stalls.ended]
        self.outbox += [(rank, messages.AskLine()) for rank in stalls.to_ask if rank not in self.scene.ended]
        for pending, why in stalls.refused:
            self._refuse([pending], "CommunicationError", why)
        if stalls.why_no_join is not None:
            self._end_join(messages.JoinFailed("CommunicationError", stalls.why_no_join), now_s)

    # -- decisions

    def _consider_all(self, now_s: float) -> None:
        for pending in [*self.scene.pending.values(), *self._refused.values()]:
            self._consider(pending, now_s)

    def _consider(self, pending: Pending, now_s: float) -> None:
        """Begins the operation, refuses it, or leaves it pending."""
        first, scene = pending.first, self.scene
        joined = scene.joined
        if pending.refusal is not None:
            self._tell_refusal(pending)
            return
        # This runs for every request of every rank, so all members are checked only where that can matter.
        gone = next((rank for rank in scene.ended if rank in first.members), None)
        if gone is not None:
            self._refuse([pending], *self._words_of_end(gone, first.kind, first.what))
            return
        if joined and not pending.kind.allows_joined and any(rank in joined for rank in first.members):
            self._refuse([pending], "CommunicationError", self._words_of_join(first))
            return
        # The cheap comparison is first: it usually decides.
        is_complete = len(pending.asks) + len(joined) >= len(first.members) and not pending.missing(joined)
        if not pending.differs:
            if is_complete and not self._fits(pending):
                self._contested.add(first.pairs_with)
                names = {rank: caller.name for rank, caller in pending.callers().items()}
                self._refuse([pending], "MismatchError", words_of_callers(first.what, names, scene.hosts))
            elif is_complete:
                self._begin(pending)
            return
        if pending.differs_since_s is None:
            pending.differs_since_s = now_s
        if is_complete or now_s - pending.differs_since_s >= SETTLING_S:
            asked = {rank: ask.same for rank, ask in pending.asks.items()}
            words = words_of_difference(pending.kind, first.what, asked, scene.hosts)
            self._refuse([pending], "MismatchError", words)

    def _fits(self, pending: Pending) -> bool:
        """Whether the calling threads match on all ranks, or each rank has only one that calls such operations."""
        is_contested = pending.first.pairs_with in self._contested
        if not (is_contested or pending.is_doubtful):
            return True
        callers = pending.callers().values()
        if is_contested:
            # Some threads may have ended with that error, and those that remain may differ between ranks.
            return len({caller.name for caller in callers}) == 1
        return all(one.may_be(another) for one, another in itertools.combinations(dict.fromkeys(callers), 2))

    def _begin(self, pending: Pending) -> None:
        first, asks = pending.first, pending.asks
        owns = [asks[rank].own if rank in asks else None for rank in first.members]
        absent = [rank for rank in first.members if rank not in asks]
        weighs_active = any(self.scene.joined[rank].average_of_active for rank in absent)
        divisor = len(first.members) - (len(absent) if weighs_active else 0)
        for rank in first.members:
            self.scene.under_way[rank].append(first)
            if rank in asks:
                self.outbox.append((rank, messages.Go(asks[rank].ticket, owns, divisor)))
            else:
                told = messages.GoAsStandIn(first.set_id, owns, divisor, first.kind, first.what, first.same)
                self.outbox.append((rank, told))
        self._forget(pending)

    def _refuse(self, pendings: list[Pending], kind: str, words: str) -> None:
        """Refuses all of them together: a rank that receives this for one needs no refusal of the others."""
        refusal = Refusal(kind, words, pendings)
        for pending in pendings:
            pending.refusal = refusal
            self._refused[pending.id_] = self.scene.pending.pop(pending.id_)
            self._differing.pop(pending.id_, None)
        for pending in list(pendings):
            self._tell_refusal(pending)

    def _tell_refusal(self, pending: Pending) -> None:
        """Answers the ranks that have requested it, once each; removes the operation once no rank is left to answer."""
        refusal = pending.refusal
        assert refusal is not None, "only a refused operation is passed"
        for rank, ask in list(pending.asks.items()):
            self.outbox.append((rank, messages.No(ask.ticket, refusal.kind, refusal.words)))
            refusal.sent_to.add(rank)
            self._drop_ask(pending, rank)
        answered = refusal.sent_to | self.scene.ended.keys() | self.scene.joined.keys()
        for each in list(refusal.covers):
            if not each.asks and answered.issuperset(each.first.members):
                refusal.covers.remove(each)
                self._forget(each)

    def _words_of_end(self, rank: int, kind: str, what: str) -> tuple[str, str]:
        """The name of the error's class, and its words, for an operation that needs a rank that has ended."""
        # The first words are Horovod's, which users search for.
        words = f"Horovod has been shut down. {what} failed because {self._describe_end(rank)}"
        if not self.scene.ended[rank]:
            return "PeerLostError", f"{words}: {LOOK_THERE}"
        cause = "" if kind == "join" else f". {CAUSES}"
        return "CommunicationError", f"{words}: every rank must call {kind} the same number of times{cause}"

    def _describe_end(self, rank: int) -> str:
        return describe_end(name_ranks([rank], self.scene.hosts), self.scene.ended[rank])

    def _words_of_join(self, first: messages.OperationRequest) -> str:
        kind = kind_named(first.kind).single
        ranks = [rank for rank in self.scene.joined if rank in first.members]
        return (
            f"{kind.in_join_errors or kind.name} is not supported with Join at this time. ({first.what}, while "
            f"{name_ranks(ranks, self.scene.hosts)} joined)"
        )

    # -- bookkeeping

    def _forget(self, pending: Pending) -> None:
        there = self.scene.pending if pending.refusal is None else self._refused
        del there[pending.id_]
        for rank in list(pending.asks):
            self._drop_ask(pending, rank)
        if not self._queues[pending.first.pairs_with].remove(pending):
            del self._queues[pending.first.pairs_with]

    def _drop_ask(self, pending: Pending, rank: int) -> None:
        """Removes an answered request: the rank no longer waits for it."""
        del self._id_of[rank, pending.asks.pop(rank).ticket]
        waits = self.scene.waiting.get(rank)
        if waits is not None:
            waits.discard(pending.id_)
            if not waits:
                del self.scene.waiting[rank]

    def _end_join(self, message: messages.AllJoined | messages.JoinFailed, now_s: float) -> None:
        scene = self.scene
        self.stall.join_ended_at_s = now_s
        self.outbox += [(rank, message) for rank in scene.joined if rank not in scene.ended]
        self.joined_steps.end(scene.joined.keys() | scene.ended.keys())
        scene.joined.clear()
