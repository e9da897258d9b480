"""
Finds stalled ranks: decides, by the times of `environment`, when to warn about them or end the job, and words both.

    pending operations, and what ranks report being blocked in ── find_stalled... ── warnings, ends

`negotiation` calls it. Like that module it uses no connection, thread or clock: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .pending import Id, Pending, RankRequest

# A rank that waits for others sends a message about twice a second. After this long without one it counts as silent.
SILENT_S = 5.0

# This many seconds before a warning is due (half its limit, if that is shorter), and again at this interval, rank 0
# asks the ranks for the lines that their programs are at.
ASKED_S = 6.0

# Most operations, or ranks, that a message names.
SHOWN = 8

JOIN = "hvd.join()"

# Why a rank sends nothing, for the user.
CAUSES_OF_SILENCE = (
    "its process is stopped or gets no processor time, a C extension holds the interpreter's lock, or its host is down"
)


@dataclass(frozen=True, slots=True)
class StallRules:
    """The times after which a wait leads to a warning, and after which it is ended; in seconds, None for never.

    ``timeout_s`` ends the wait for an operation. Other waits are in an engine, which has its own timeout.
    """

    warn_after_s: float | None = None
    end_after_s: float | None = None
    timeout_s: float | None = None

    @property
    def way_out(self) -> str:
        """The user's options about a wait, as a sentence for the warning."""
        if self.end_after_s is None:
            return "To end the job after such a wait, set HVDLITE_STALL_SHUTDOWN_S to its length in seconds"
        return f"After {self.end_after_s:g} s (HVDLITE_STALL_SHUTDOWN_S) the job is ended"


@dataclass(frozen=True, slots=True)
class BlockedThread:
    """One wait of a rank's thread: in an operation that is running, or in something else such as a bucket.

    ``collective`` is its group's label, its number in that group, and the ranks that take part.
    """

    what: str
    since_s: float
    is_operation: bool = False
    collective: tuple[str, int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """The state of every rank, as far as rank 0 knows.

    ``pending`` is in the order of the requests. ``waiting``: by rank, the pending operations that it is blocked in.
    ``under_way``: by rank, the operations that were started and have not ended. ``joined``: by rank, when it joined.
    ``sits_out``: whether joined ranks take part in steps of the others' optimizers.
    """

    pending: Mapping[Id, Pending]
    waiting: Mapping[int, Collection[Id]]
    joined: Mapping[int, float]
    under_way: Mapping[int, Sequence[RankRequest]]
    sits_out: bool = False


@dataclass(slots=True)
class Names:
    """Names ranks in stall messages: ``rank 1 (node1, pid 4242)``."""

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
        # What each rank reports being blocked in, the longest wait first.
        self._busy: dict[int, list[BlockedThread]] = {}
        # The blocked ranks in which no thread can request anything until a wait ends.
        self._stuck: set[int] = set()
        self._heard_at_s: dict[int, float] = {}
        # Where the ranks' programs are; when the ranks were last asked, and since when each has not answered.
        self._lines: dict[int, str] = {}
        self._asked_where_at_s: float | None = None
        self._unanswered_since_s: dict[int, float] = {}
        self._asked_at_s = 0.0
        self._join_ended_at_s = 0.0
        # By kind of stall: the time of the last warning.
        self._warned_at_s: dict[str, float] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no rank reports being blocked."""
        return not self._busy

    def heard(self, rank: int, now_s: float) -> None:
        """Notes that a message has arrived from this rank."""
        self._heard_at_s[rank] = now_s

    def program_line(self, rank: int, line: str, now_s: float) -> None:
        """Notes where the program of ``rank`` is, as the rank answered."""
        self._unanswered_since_s.pop(rank, None)
        if self._asked_where_at_s is not None:
            self._lines[rank] = line

    def asked(self, now_s: float) -> None:
        """Notes that some rank has requested an operation."""
        self._asked_at_s = now_s

    def join_ended(self, now_s: float) -> None:
        """Notes that the join has succeeded or failed: the ranks that had joined continue."""
        self._join_ended_at_s = now_s

    def busy(self, rank: int, blocked: Sequence[BlockedThread], *, is_stuck: bool) -> None:
        """Notes what ``rank`` is blocked in; an empty sequence if nothing.

        ``is_stuck`` is whether all its threads that call operations are blocked in something.
        """
        if blocked:
            self._busy[rank] = sorted(blocked, key=lambda each: each.since_s)
        else:
            self._busy.pop(rank, None)
        (self._stuck.add if blocked and is_stuck else self._stuck.discard)(rank)

    def stuck(self) -> dict[int, list[BlockedThread]]:
        """By rank, everything it waits for; only ranks in which no thread can do anything until one wait ends."""
        return {rank: self._busy[rank] for rank in self._stuck}

    # -- operations that only some ranks have requested

    def find_stalled(self, scene: Scene, now_s: float) -> tuple[list[str], list[tuple[Pending, str]]]:
        """Returns the warnings, and the operations to refuse, each with its message."""
        end_s = min((s for s in (self._rules.end_after_s, self._rules.timeout_s) if s is not None), default=None)
        ends: list[tuple[Pending, str]] = []
        for pending in scene.pending.values():
            # They are in the order of their age: all later ones are younger.
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

    # -- everything else that ranks are blocked in

    def find_stalled_elsewhere(self, scene: Scene, now_s: float) -> tuple[list[str], list[int]]:
        """Finds ranks blocked outside of pending operations, for example in `step()`.

        Returns the warnings, and the ranks to end; if there are such ranks, the one text is the reason.
        """
        # A silent rank is not counted as waiting: it is what the others wait for.
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
        """The time from which a blocked rank's wait counts: later than its start if others were active since."""
        # The rank's report may date from before the join ended.
        since_s = max(self._busy[rank][0].since_s, self._join_ended_at_s)
        # A rank that has joined waits in the bucket of the others' next step. They may be busy with other operations,
        # so its wait counts from the last request of any rank.
        return max(since_s, self._asked_at_s) if rank in scene.joined else since_s

    def _words_elsewhere(self, first: int, longest: BlockedThread, scene: Scene, now_s: float) -> str:
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
            return (
                f"{waited}, and all ranks that take part have begun it: the connection between them is slow, or broken"
            )
        return (
            f"{waited}, for ranks that have not begun it or have not finished it. Those ranks: "
            f"{self._whereabouts_of(elsewhere, scene, now_s)}"
        )

    # -- ranks that have joined while the others do nothing at all

    def find_stalled_joins(self, scene: Scene, now_s: float) -> tuple[list[str], str | None]:
        """Returns the warnings, and the reason why `join` must end, or None.

        Ranks that have joined wait as long as the others have work. Ranks that request nothing have no work, unless
        they take steps: then the joined ranks report that they wait in the steps' buckets.
        """
        if not scene.joined or self._busy or scene.pending or scene.sits_out:
            self._warned_at_s.pop("join", None)
            return [], None
        waited_s = now_s - max(self._asked_at_s, min(scene.joined.values()))
        missing = set(range(self._size)) - scene.joined.keys()
        words = (
            f"stalled: {self.names.of(sorted(scene.joined))} called {JOIN}, and for {waited_s:.0f} s no rank has "
            f"called any operation. Not joined: {self._whereabouts_of(missing, scene, now_s)}"
        )
        if _is_over(waited_s, self._rules.end_after_s):
            return [], words
        if _is_over(waited_s, self._rules.warn_after_s) and self._is_due("join", now_s):
            return [f"{words}. {self._rules.way_out}"], None
        return [], None

    # -- where the ranks' programs are

    def to_ask(self, scene: Scene, now_s: float) -> range:
        """The ranks to ask where their programs are: all of them, now and then while a warning is about to be due."""
        limits_s = [self._rules.warn_after_s, self._rules.end_after_s, self._rules.timeout_s]
        limit_s = min((each for each in limits_s if each is not None), default=None)
        if limit_s is None:
            return range(0)
        lead_s = min(ASKED_S, limit_s / 2)
        if not self._waits_for(limit_s - lead_s, scene, now_s):
            self._lines.clear()
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
        """Whether any wait has lasted at least this long."""
        oldest = next(iter(scene.pending.values()), None)
        since_s = [self._since_s(rank, scene) for rank in self._busy]
        since_s += [] if oldest is None else [oldest.since_s]
        if scene.joined and not (since_s or scene.sits_out):
            since_s.append(max(self._asked_at_s, min(scene.joined.values())))
        return any(now_s - each >= least_s for each in since_s)

    def _whereabouts_of(self, ranks: Collection[int], scene: Scene, now_s: float) -> str:
        # First the ranks that most likely hold up the others.
        order = sorted(ranks, key=lambda rank: (self._silent_s(rank, scene, now_s) is None, rank in self._busy, rank))
        shown = [f"{self.names.of([rank])}, {self._whereabouts(rank, scene, now_s)}" for rank in order[:SHOWN]]
        return "; ".join(shown) + _and_more(len(order) - SHOWN)

    def _whereabouts(self, rank: int, scene: Scene, now_s: float) -> str:
        silent_s = self._silent_s(rank, scene, now_s)
        silence = "" if silent_s is None else f" and has sent nothing for {silent_s:.0f} s: {CAUSES_OF_SILENCE}"
        line = self._lines.get(rank)
        at = f", at {line}" if line else ""
        waits = [JOIN] if rank in scene.joined else []
        waits += [each.what for each in self._busy.get(rank, ())]
        waits += [scene.pending[wait].first.what for wait in sorted(scene.waiting.get(rank, ()))]
        if waits:
            return f"which waits in {_listed(waits)}{at}{silence}"
        if told := scene.under_way.get(rank):
            return f"which is in {told[0].what}{at}{silence}"
        asked = [pending.first.what for pending in scene.pending.values() if rank in pending.asks]
        if asked:
            is_at = f" and is at {line}" if line else ""
            return f"which has called {_listed(asked)}{is_at}{silence}"
        return (f"which is at {line}" if line else "which computes or hangs") + silence

    def _silent_s(self, rank: int, scene: Scene, now_s: float) -> float | None:
        """The seconds without a message from a rank that should have sent one; None if all is well."""
        # A rank that waits for nothing sends nothing, except while others wait for it to join.
        is_asked = rank in self._busy or scene.under_way.get(rank) or scene.waiting.get(rank) or scene.joined
        silent_s = 0.0
        if is_asked:
            silent_s = now_s - self._heard_at_s.get(rank, now_s)
        elif rank in self._unanswered_since_s:
            silent_s = now_s - self._unanswered_since_s[rank]
        return silent_s if silent_s >= SILENT_S else None

    def _is_due(self, kind: str, now_s: float) -> bool:
        """Whether to warn of this kind of stall now: at most once per ``warn_after_s``. Notes the warning if so."""
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
