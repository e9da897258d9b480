"""
Finds stalled ranks: decides, by the times of `environment`, when to warn about them or end the job, and words both.

    what rank 0 knows of all ranks, a `Scene` ── look ── `Stalls`: warnings, ends, ranks to ask where their program is

"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ..errors import MOST_NAMED, list_names
from .scene import JoinedSteps, Pending, Scene

# A rank that waits for others sends a message about twice a second. After this long without one it counts as silent.
SILENT_S = 5.0

# So long before a warning is due (or half its limit), and again at this interval, ranks tell where their programs are.
ASKED_S = 6.0

JOIN = "hvd.join()"

# Why a rank sends nothing, for the user.
CAUSES_OF_SILENCE = (
    "its process is stopped or gets no processor time, a C extension holds the interpreter's lock, or its host is down"
)


@dataclass(frozen=True, slots=True)
class StallRules:
    """After how many seconds a wait leads to a warning, and is ended (``timeout_s``: of an operation). None: never."""

    warn_after_s: float | None = None
    end_after_s: float | None = None
    timeout_s: float | None = None

    @property
    def way_out(self) -> str:
        if self.end_after_s is None:
            return "To end the job after such a wait, set HVDLITE_STALL_SHUTDOWN_S to its length in seconds"
        return f"After {self.end_after_s:g} s (HVDLITE_STALL_SHUTDOWN_S) the job is ended"


@dataclass(slots=True)
class Stalls:
    """What is to be done about stalled ranks, in messages and ranks; ``to_ask`` where their programs are."""

    warnings: list[str] = field(default_factory=list)
    refused: list[tuple[Pending, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    why_ended: str = ""
    why_no_join: str | None = None
    to_ask: Sequence[int] = ()


class StallWatch:
    """Looks for waits that have become too long."""

    def __init__(self, scene: Scene, rules: StallRules, joined_steps: JoinedSteps) -> None:
        self._scene = scene
        self._size = len(scene.hosts)
        self.rules = rules
        self._joined_steps = joined_steps
        self._heard_at_s: dict[int, float] = {}
        # Where the ranks' programs are; when the ranks were last asked, and since when each has not answered.
        self._lines: dict[int, str] = {}
        self._asked_where_at_s: float | None = None
        self._unanswered_since_s: dict[int, float] = {}
        self.asked_at_s = 0.0  # when some rank last requested an operation
        self.join_ended_at_s = 0.0
        self._warned_at_s: dict[str, float] = {}  # by kind of stall

    def heard(self, rank: int, now_s: float) -> None:
        self._heard_at_s[rank] = now_s

    def program_line(self, rank: int, line: str) -> None:
        self._unanswered_since_s.pop(rank, None)
        if self._asked_where_at_s is not None:
            self._lines[rank] = line

    def look(self, now_s: float) -> Stalls:
        stalls = Stalls()
        self._find_operations(stalls, now_s)
        self._find_busy_ranks(stalls, now_s)
        self._find_joined_ranks(stalls, now_s)
        # After the messages were composed: they use the answers received so far.
        stalls.to_ask = self._to_ask(now_s)
        return stalls

    # -- operations that only some ranks have requested

    def _find_operations(self, stalls: Stalls, now_s: float) -> None:
        pending = self._scene.pending.values()
        end_s = min((s for s in (self.rules.end_after_s, self.rules.timeout_s) if s is not None), default=None)
        # They are in the order of their age.
        for each in pending:
            if not _is_over(now_s - each.since_s, end_s):
                break
            stalls.refused.append((each, self._words(each, now_s)))
        oldest = next(islice(pending, len(stalls.refused), None), None)
        limit_s = self.rules.warn_after_s
        if oldest is None or not _is_over(now_s - oldest.since_s, limit_s):
            if not stalls.refused:
                self._warned_at_s.pop("operations", None)
        elif self._is_due("operations", now_s):
            others = [each for each in pending if _is_over(now_s - each.since_s, limit_s)][len(stalls.refused) + 1 :]
            words = self._words(oldest, now_s) + self._words_of_others(others, oldest)
            stalls.warnings.append(f"{words}. {self.rules.way_out}")

    def _words_of_others(self, others: Sequence[Pending], oldest: Pending) -> str:
        """Names operations behind the oldest, and the ranks that each misses where they are others."""
        usual, shown = oldest.missing(self._scene.joined), []
        for each in others[: MOST_NAMED - 1]:
            missing = each.missing(self._scene.joined)
            shown.append(each.first.what + ("" if missing == usual else f" (missing: {self._name(sorted(missing))})"))
        count = f"{len(others)} more operations have" if len(others) > 1 else "1 more operation has"
        return f". {count} been waiting too long: {list_names(shown, len(others))}" if others else ""

    def _words(self, pending: Pending, now_s: float) -> str:
        first = pending.first
        missing = self._whereabouts_of(pending.missing(self._scene.joined), now_s)
        return (
            f"stalled: {first.what} in {first.of_set} has been waiting {now_s - pending.since_s:.0f} s. "
            f"{self._name(sorted(pending.asks))} called it; missing: {missing}"
        )

    # -- everything else that ranks are blocked in, for example in `step()`

    def _find_busy_ranks(self, stalls: Stalls, now_s: float) -> None:
        # A silent rank is not counted as waiting: it is what the others wait for.
        since_s = {rank: self._since_s(rank) for rank in sorted(self._scene.busy) if not self._is_silent(rank, now_s)}
        over = [rank for rank in since_s if _is_over(now_s - since_s[rank], self.rules.warn_after_s)]
        if not over:
            self._warned_at_s.pop("elsewhere", None)
            return
        first = min(over, key=lambda rank: since_s[rank])
        waited_s = now_s - since_s[first]
        if self._warns("elsewhere", stalls, waited_s, lambda: self._words_of_busy(first, waited_s, now_s), now_s):
            # The one text is the reason too.
            stalls.ended, stalls.why_ended = over, self._words_of_busy(first, waited_s, now_s)
            stalls.warnings.append(stalls.why_ended)

    def _since_s(self, rank: int) -> float:
        """The time from which a blocked rank's wait counts: later than its start if others were active since."""
        # The rank's report may date from before the join ended.
        since_s = max(self._scene.busy[rank][0].since_s, self.join_ended_at_s)
        # A rank that has joined waits for the others' next step; they may be busy with other operations.
        return max(since_s, self.asked_at_s) if rank in self._scene.joined else since_s

    def _words_of_busy(self, first: int, waited_s: float, now_s: float) -> str:
        scene = self._scene
        longest, told = scene.busy[first][0], scene.under_way.get(first)
        members: Collection[int] = told[0].members if longest.is_operation and told else range(self._size)
        there = [
            rank
            for rank, blocked in sorted(scene.busy.items())
            if any(each.what == longest.what for each in blocked)
            and (rank == first or not self._is_silent(rank, now_s))
        ]
        have = "has" if len(there) == 1 else "have"
        waited = f"stalled: {self._name(there)} {have} waited {waited_s:.0f} s in {longest.what}"
        elsewhere = set(members) - set(there)
        if not elsewhere:
            return (
                f"{waited}, and all ranks that take part have begun it: the connection between them is slow, or broken"
            )
        return (
            f"{waited}, for ranks that have not begun it or have not finished it. Those ranks: "
            f"{self._whereabouts_of(elsewhere, now_s)}"
        )

    # -- ranks that have joined while the others do nothing at all

    def _find_joined_ranks(self, stalls: Stalls, now_s: float) -> None:
        # Those that request nothing have no work, unless they take steps: then joined ranks wait in the steps' buckets.
        scene = self._scene
        if not scene.joined or scene.busy or scene.pending or self._joined_steps.has_any:
            self._warned_at_s.pop("join", None)
            return
        waited_s = now_s - self._idle_since_s
        missing = set(range(self._size)) - scene.joined.keys()

        def words() -> str:
            return (
                f"stalled: {self._name(sorted(scene.joined))} called {JOIN}, and for {waited_s:.0f} s no rank has "
                f"called any operation. Not joined: {self._whereabouts_of(missing, now_s)}"
            )

        if self._warns("join", stalls, waited_s, words, now_s):
            stalls.why_no_join = words()

    @property
    def _idle_since_s(self) -> float:
        """Since when ranks have joined, and no rank has requested an operation."""
        return max(self.asked_at_s, min(each.since_s for each in self._scene.joined.values()))

    # -- where the ranks' programs are

    def _to_ask(self, now_s: float) -> Sequence[int]:
        """The ranks to ask where their programs are: all of them, now and then while a warning is about to be due."""
        limits_s = [self.rules.warn_after_s, self.rules.end_after_s, self.rules.timeout_s]
        limit_s = min((each for each in limits_s if each is not None), default=None)
        if limit_s is None:
            return ()
        lead_s = min(ASKED_S, limit_s / 2)
        if not self._has_waited(limit_s - lead_s, now_s):
            self._lines.clear()
            self._unanswered_since_s.clear()
            self._asked_where_at_s = None
            return ()
        if self._asked_where_at_s is not None and now_s - self._asked_where_at_s < lead_s:
            return ()
        self._asked_where_at_s = now_s
        for rank in range(self._size):
            self._unanswered_since_s.setdefault(rank, now_s)
        return range(self._size)

    def _has_waited(self, least_s: float, now_s: float) -> bool:
        since_s = [self._since_s(rank) for rank in self._scene.busy]
        since_s += [each.since_s for each in islice(self._scene.pending.values(), 1)]
        if self._scene.joined and not (since_s or self._joined_steps.has_any):
            since_s.append(self._idle_since_s)
        return any(now_s - each >= least_s for each in since_s)

    def _whereabouts_of(self, ranks: Collection[int], now_s: float) -> str:
        # First the ranks that most likely hold up the others.
        order = sorted(ranks, key=lambda rank: (not self._is_silent(rank, now_s), rank in self._scene.busy, rank))
        shown = [f"{self._name([rank])}, {self._whereabouts(rank, now_s)}" for rank in order[:MOST_NAMED]]
        return "; ".join(shown) + (f" and {len(order) - len(shown)} more" if len(order) > len(shown) else "")

    def _whereabouts(self, rank: int, now_s: float) -> str:
        scene, line = self._scene, self._lines.get(rank)
        silent_s = self._silent_s(rank, now_s)
        silence = f" and has sent nothing for {silent_s:.0f} s: {CAUSES_OF_SILENCE}" if silent_s >= SILENT_S else ""
        at = f", at {line}" if line else ""
        waits = [JOIN] if rank in scene.joined else []
        waits += [each.what for each in scene.busy.get(rank, ())]
        waits += [scene.pending[wait].first.what for wait in sorted(scene.waiting.get(rank, ()))]
        if waits:
            return f"which waits in {list_names(waits, len(waits))}{at}{silence}"
        if told := scene.under_way.get(rank):
            return f"which is in {told[0].what}{at}{silence}"
        asked = [pending.first.what for pending in scene.pending.values() if rank in pending.asks]
        if asked:
            is_at = f" and is at {line}" if line else ""
            return f"which has called {list_names(asked, len(asked))}{is_at}{silence}"
        return (f"which is at {line}" if line else "which computes or hangs") + silence

    def _is_silent(self, rank: int, now_s: float) -> bool:
        return self._silent_s(rank, now_s) >= SILENT_S

    def _silent_s(self, rank: int, now_s: float) -> float:
        scene = self._scene
        # A rank that waits for nothing sends nothing, except while others wait for it to join.
        if rank in scene.busy or scene.under_way.get(rank) or scene.waiting.get(rank) or scene.joined:
            return now_s - self._heard_at_s.get(rank, now_s)
        return now_s - self._unanswered_since_s.get(rank, now_s)

    def _name(self, ranks: Sequence[int]) -> str:
        """Names ranks: ``rank 1 (node1, pid 4242)``."""
        hosts, pids = self._scene.hosts, self._scene.pids
        shown = [
            f"{rank} ({hosts[rank]}{f', pid {pids[rank]}' if rank in pids else ''})" for rank in ranks[:MOST_NAMED]
        ]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {list_names(shown, len(ranks))}"

    def _warns(self, kind: str, stalls: Stalls, waited_s: float, words: Callable[[], str], now_s: float) -> bool:
        """Adds a warning if it is time for one; returns whether the wait is to be ended instead."""
        if _is_over(waited_s, self.rules.end_after_s):
            return True
        if _is_over(waited_s, self.rules.warn_after_s) and self._is_due(kind, now_s):
            stalls.warnings.append(f"{words()}. {self.rules.way_out}")
        return False

    def _is_due(self, kind: str, now_s: float) -> bool:
        """Whether to warn of this kind of stall now, at most once per ``warn_after_s``; notes the warning if so."""
        if kind in self._warned_at_s and not _is_over(now_s - self._warned_at_s[kind], self.rules.warn_after_s):
            return False
        self._warned_at_s[kind] = now_s
        return True


def _is_over(waited_s: float, limit_s: float | None) -> bool:
    return limit_s is not None and waited_s >= limit_s
