"""
Stalled ranks: when a warning names them, when the job is ended, and the words for both.

    operations that are pending, and what ranks say they are blocked in ── look, now and then ── warnings, ends

Pure, as all of `negotiation`, whose part it is: time is what the caller says it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .pending import Ask, Id, Pending

# A rank that waits for others is heard of every second. One that is not for so long is told of as silent.
SILENT_S = 5.0

# Ranks are asked so long before they are told of where they are, or sooner where they are told of soon, and as often.
ASKED_S = 6.0

# How many operations, or ranks, a message names.
SHOWN = 8

JOIN = "hvd.join()"


@dataclass(frozen=True, slots=True)
class StallRules:
    """When a wait is told of, and when it is ended; seconds, None for never.

    ``timeout_s`` ends the wait for an operation; other waits are in an engine, which has a timeout of its own.
    """

    warn_after_s: float | None = None
    end_after_s: float | None = None
    timeout_s: float | None = None

    @property
    def way_out(self) -> str:
        """What the user can do about a wait that is told of."""
        if self.end_after_s is None:
            return "Set HVDLITE_STALL_SHUTDOWN_S to the seconds after which that is to end the job"
        return f"After {self.end_after_s:g} s (HVDLITE_STALL_SHUTDOWN_S) that ends the job"


@dataclass(frozen=True, slots=True)
class Blocked:
    """What a thread of a rank is blocked in: an operation that is under way, or something else such as a bucket.

    ``place`` is which collective that is: its group's label, its number there, and who takes part.
    """

    what: str
    since_s: float
    is_operation: bool = False
    place: tuple[str, int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """What every rank is doing, as far as it is known.

    ``pending`` is in the order of asking. ``under_way``: by rank, what it was told to carry out and has not ended.
    ``joined``: by rank, since when; ``sits_out``: whether these take part in steps of the others' optimizers.
    """

    pending: Mapping[Id, Pending]
    waiting: Mapping[int, Collection[Id]]
    joined: Mapping[int, float]
    under_way: Mapping[int, Sequence[Ask]]
    sits_out: bool = False


@dataclass(slots=True)
class Names:
    """The ranks as stalls name them: ``rank 1 (node1, pid 4242)``."""

    hosts: Sequence[str]
    pids: dict[int, int] = field(default_factory=dict)

    def of(self, ranks: Sequence[int]) -> str:
        shown = [f"{rank} ({self.hosts[rank]}{self._pid(rank)})" for rank in ranks[:SHOWN]]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}{_and_more(len(ranks) - SHOWN)}"

    def _pid(self, rank: int) -> str:
        return f", pid {self.pids[rank]}" if rank in self.pids else ""


class StallWatch:
    """Looks for waits that have become too long."""

    def __init__(self, hosts: Sequence[str], rules: StallRules) -> None:
        self.names = Names(hosts)
        self._size = len(hosts)
        self._rules = rules
        # What each rank is blocked in for longer than a moment, the longest first.
        self._busy: dict[int, list[Blocked]] = {}
        # Those of them no thread of which can ask for anything meanwhile.
        self._stuck: set[int] = set()
        self._heard_at_s: dict[int, float] = {}
        # Where their programs are, and when ranks were asked for that: last, and first without an answer.
        self._places: dict[int, str] = {}
        self._asked_where_at_s: float | None = None
        self._unanswered_since_s: dict[int, float] = {}
        self._asked_at_s = 0.0
        self._join_ended_at_s = 0.0
        # By what kind of stall: when it was told of last.
        self._warned_at_s: dict[str, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits elsewhere."""
        return not self._busy

    def heard(self, rank: int, now_s: float) -> None:
        """Something has come from this rank."""
        self._heard_at_s[rank] = now_s

    def place(self, rank: int, place: str, now_s: float) -> None:
        """Where the program of ``rank`` is, as it says when it is asked."""
        self._unanswered_since_s.pop(rank, None)
        if self._asked_where_at_s is not None:
            self._places[rank] = place

    def asked(self, now_s: float) -> None:
        """Some rank has asked for an operation."""
        self._asked_at_s = now_s

    def join_ended(self, now_s: float) -> None:
        """All ranks have joined, or cannot: those that had go on."""
        self._join_ended_at_s = now_s

    def busy(self, rank: int, blocked: Sequence[Blocked], *, is_stuck: bool) -> None:
        """What ``rank`` is blocked in; nothing any more where that is empty.

        ``is_stuck`` is whether all its threads that call operations are blocked in something.
        """
        if blocked:
            self._busy[rank] = sorted(blocked, key=lambda each: each.since_s)
        else:
            self._busy.pop(rank, None)
        (self._stuck.add if blocked and is_stuck else self._stuck.discard)(rank)

    def stuck(self) -> dict[int, list[Blocked]]:
        """By rank, all that it waits for, where no thread of it can do anything until one of these is done."""
        return {rank: self._busy[rank] for rank in self._stuck}

    # -- operations that some have asked for

    def too_long(self, scene: Scene, now_s: float) -> tuple[list[str], list[tuple[Pending, str]]]:
        """What to warn of, and the operations to refuse, each with the words."""
        end_s = min((s for s in (self._rules.end_after_s, self._rules.timeout_s) if s is not None), default=None)
        ends: list[tuple[Pending, str]] = []
        for pending in scene.pending.values():
            # They are in the order of their age: from the first that is young enough on, all are.
            if not _is_over(now_s - pending.since_s, end_s):
                break
            ends.append((pending, self._words(pending, scene, now_s)))
        left = islice(scene.pending.values(), len(ends), None)
        oldest = next(left, None)
        limit_s = self._rules.warn_after_s
        if oldest is None or not _is_over(now_s - oldest.since_s, limit_s):
            if not ends:
                self._warned_at_s.pop("operations", None)
            return [], ends
        if not self._is_due("operations", now_s):
            return [], ends
        others = []
        for pending in left:
            if not _is_over(now_s - pending.since_s, limit_s):
                break
            others.append(pending)
        words = self._words(oldest, scene, now_s) + self._words_of_others(others, oldest, scene)
        return [f"{words}. {self._rules.way_out}"], ends

    def _words(self, pending: Pending, scene: Scene, now_s: float) -> str:
        first = pending.first
        callers = self.names.of(sorted(pending.asks))
        missing = self._whereabouts_of(pending.missing(scene.joined), scene, now_s)
        return (
            f"stalled: {first.what} in {first.of_set} has been waiting {now_s - pending.since_s:.0f} s. {callers} "
            f"called it; missing: {missing}"
        )

    def _words_of_others(self, others: Sequence[Pending], oldest: Pending, scene: Scene) -> str:
        if not others:
            return ""
        usual = oldest.missing(scene.joined)
        shown = []
        for pending in others[: SHOWN - 1]:
            missing = pending.missing(scene.joined)
            shown.append(pending.first.what)
            if missing != usual:
                shown[-1] += f" (missing: {self.names.of(sorted(missing))})"
        count = f"{len(others)} more operations have" if len(others) > 1 else "1 more operation has"
        return f". {count} been waiting too long: {', '.join(shown)}{_and_more(len(others) - len(shown))}"

    # -- all else that ranks are blocked in

    def too_long_elsewhere(self, scene: Scene, now_s: float) -> tuple[list[str], list[int]]:
        """Describes ranks blocked outside of pending operations, for example in `step()`, and which ranks that ends."""
        # A rank that is not heard of any more waits for nobody: it is what others wait for.
        since_s = {
            rank: self._since_s(rank, scene)
            for rank in sorted(self._busy)
            if self._silent_s(rank, scene, now_s) is None
        }
        over = [rank for rank in since_s if _is_over(now_s - since_s[rank], self._rules.warn_after_s)]
        if not over:
            self._warned_at_s.pop("elsewhere", None)
            return [], []
        first = min(over, key=lambda rank: since_s[rank])
        longest = self._busy[first][0]
        waited_s = now_s - since_s[first]
        words = self._words_elsewhere(first, longest, scene, now_s)
        if _is_over(waited_s, self._rules.end_after_s):
            return [words], over
        if self._is_due("elsewhere", now_s):
            return [f"{words}. {self._rules.way_out}"], []
        return [], []

    def _since_s(self, rank: int, scene: Scene) -> float:
        """Since when a rank that is blocked has waited for others which do nothing."""
        # What a rank has said of its waits may be from before all had joined.
        since_s = max(self._busy[rank][0].since_s, self._join_ended_at_s)
        # Who has joined is in the bucket of a step that need not come, as long as the others do something else.
        return max(since_s, self._asked_at_s) if rank in scene.joined else since_s

    def _words_elsewhere(self, first: int, longest: Blocked, scene: Scene, now_s: float) -> str:
        members: Collection[int] = range(self._size)
        told = scene.under_way.get(first)
        if longest.is_operation and told:
            members = told[0].members
        there = [
            rank
            for rank, blocked in sorted(self._busy.items())
            if any(each.what == longest.what for each in blocked)
            and (rank == first or self._silent_s(rank, scene, now_s) is None)
        ]
        have = "has" if len(there) == 1 else "have"
        waited_s = now_s - self._since_s(first, scene)
        waited = f"stalled: {self.names.of(there)} {have} waited {waited_s:.0f} s in {longest.what}"
        elsewhere = set(members) - set(there)
        if not elsewhere:
            return f"{waited}, and all that take part in it are there: what connects them is slow, or broken"
        return (
            f"{waited}, for ranks that have not come there, or not come through. Elsewhere, or hanging: "
            f"{self._whereabouts_of(elsewhere, scene, now_s)}"
        )

    # -- ranks that have joined, where the others do nothing at all

    def too_long_joined(self, scene: Scene, now_s: float) -> tuple[list[str], str | None]:
        """What to warn of, and why `join` is to end, if it is.

        Who has joined waits as long as the others have work. Where they ask for nothing there is none, unless they
        take steps: whether they do is seen by the buckets in which those who have joined wait for them.
        """
        if not scene.joined or self._busy or scene.pending or scene.sits_out:
            self._warned_at_s.pop("join", None)
            return [], None
        waited_s = now_s - max(self._asked_at_s, min(scene.joined.values()))
        missing = set(range(self._size)) - scene.joined.keys()
        words = (
            f"stalled: {self.names.of(sorted(scene.joined))} called {JOIN}, and for {waited_s:.0f} s no rank has asked "
            f"for anything. Not joined: {self._whereabouts_of(missing, scene, now_s)}"
        )
        if _is_over(waited_s, self._rules.end_after_s):
            return [], words
        if _is_over(waited_s, self._rules.warn_after_s) and self._is_due("join", now_s):
            return [f"{words}. {self._rules.way_out}"], None
        return [], None

    # -- where ranks are

    def to_ask(self, scene: Scene, now_s: float) -> range:
        """The ranks that are to say where their programs are: all, now and then while a wait is about to be told of."""
        limits_s = [self._rules.warn_after_s, self._rules.end_after_s, self._rules.timeout_s]
        limit_s = min((each for each in limits_s if each is not None), default=None)
        if limit_s is None:
            return range(0)
        lead_s = min(ASKED_S, limit_s / 2)
        if not self._waits_for(limit_s - lead_s, scene, now_s):
            self._places.clear()
            self._unanswered_since_s.clear()
            self._asked_where_at_s = None
            return range(0)
        if self._asked_where_at_s is not None and now_s - self._asked_where_at_s < lead_s:
            return range(0)
        self._asked_where_at_s = now_s
        for rank in range(self._size):
            self._unanswered_since_s.setdefault(rank, now_s)
        return range(self._size)

    def _waits_for(self, least_s: float, scene: Scene, now_s: float) -> bool:
        """Whether anything has been waited for so long."""
        oldest = next(iter(scene.pending.values()), None)
        since_s = [self._since_s(rank, scene) for rank in self._busy]
        since_s += [] if oldest is None else [oldest.since_s]
        if scene.joined and not (since_s or scene.sits_out):
            since_s.append(max(self._asked_at_s, min(scene.joined.values())))
        return any(now_s - each >= least_s for each in since_s)

    def _whereabouts_of(self, ranks: Collection[int], scene: Scene, now_s: float) -> str:
        # Those first that most likely hold up the others.
        order = sorted(ranks, key=lambda rank: (self._silent_s(rank, scene, now_s) is None, rank in self._busy, rank))
        shown = [f"{self.names.of([rank])}, {self._whereabouts(rank, scene, now_s)}" for rank in order[:SHOWN]]
        return "; ".join(shown) + _and_more(len(order) - SHOWN)

    def _whereabouts(self, rank: int, scene: Scene, now_s: float) -> str:
        silent_s = self._silent_s(rank, scene, now_s)
        silence = (
            ""
            if silent_s is None
            else f" and has not been heard of for {silent_s:.0f} s: it is stopped, something holds its interpreter, or "
            "its machine is gone"
        )
        place = self._places.get(rank)
        at = f", at {place}" if place else ""
        waits = [JOIN] if rank in scene.joined else []
        waits += [each.what for each in self._busy.get(rank, ())]
        waits += [scene.pending[wait].first.what for wait in sorted(scene.waiting.get(rank, ()))]
        if waits:
            return f"which waits in {_listed(waits)}{at}{silence}"
        if told := scene.under_way.get(rank):
            return f"which is in {told[0].what}{at}{silence}"
        asked = [pending.first.what for pending in scene.pending.values() if rank in pending.asks]
        if asked:
            is_at = f" and is at {place}" if place else ""
            return f"which has called {_listed(asked)}{is_at}{silence}"
        return (f"which is at {place}" if place else "which computes or hangs") + silence

    def _silent_s(self, rank: int, scene: Scene, now_s: float) -> float | None:
        """For how long nothing has come from a rank that should have said something; None where all is well."""
        # A rank that waits for nothing has nothing to say, but while others wait for it to join.
        is_asked = rank in self._busy or scene.under_way.get(rank) or scene.waiting.get(rank) or scene.joined
        silent_s = 0.0
        if is_asked:
            silent_s = now_s - self._heard_at_s.get(rank, now_s)
        elif rank in self._unanswered_since_s:
            silent_s = now_s - self._unanswered_since_s[rank]
        return silent_s if silent_s >= SILENT_S else None

    def _is_due(self, kind: str, now_s: float) -> bool:
        """Whether a stall of this kind is to be told of now: once in the time after which one is told of at all."""
        if kind in self._warned_at_s and not _is_over(now_s - self._warned_at_s[kind], self._rules.warn_after_s):
            return False
        self._warned_at_s[kind] = now_s
        return True


def _is_over(waited_s: float, limit_s: float | None) -> bool:
    return limit_s is not None and waited_s >= limit_s


def _listed(whats: Sequence[str]) -> str:
    return ", ".join(whats[:SHOWN]) + _and_more(len(whats) - SHOWN)


def _and_more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
