"""
Reports about twice a second what this rank is blocked in, and warns, or ends the process, if rank 0 is silent.

    what threads are blocked in ── look ── "busy", "alive", to rank 0
    nothing arrives from rank 0 ── look ── a warning, an end: rank 0 reports all stalls but its own

`Heartbeat` has the rules; its caller passes the time. `WaitReports` collects the facts and acts on the rules;
`rank0_connection` calls it on the listening thread.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..calls.messages import Busy, StillWaiting, WaitingThread, Welcome
from ..coordinator.scene import BlockedThread
from ..coordinator.stall import CAUSES_OF_SILENCE, JOIN, StallRules
from ..errors import list_names
from ..log import log
from .callers import Callers
from .executor import Executor
from .joins import Joins
from .rank0_connection import LOOK_S, Rank0Connection
from .requests import Requests

_MOST_TOLD = 16


@dataclass(frozen=True, slots=True)
class Silence:
    """A period of ``lasted_s`` in which rank 0 has not answered; ``is_end`` is whether it ends this process."""

    lasted_s: float
    is_end: bool


class Heartbeat:
    """A record of one rank's reports to rank 0, by rank 0's rules, and of when rank 0 last answered."""

    def __init__(self, rules: StallRules) -> None:
        self._rules = rules
        self._told: list[BlockedThread] = []
        self._told_stuck = False
        self._told_count = 0
        # When the first unanswered `StillWaiting` was sent; None if none is unanswered.
        self._unanswered_since_s: float | None = None
        self._looked_at_s: float | None = None
        self._warned_at_s: float | None = None

    def heard(self) -> None:
        """Notes that a message has arrived from rank 0."""
        self._unanswered_since_s = None
        self._warned_at_s = None

    def look(
        self,
        now_s: float,
        blocked: Sequence[BlockedThread],
        *,
        is_stuck: bool,
        is_waiting: bool,
        over_count: int,
        begun: Mapping[str, int] = MappingProxyType({}),
        size: int = 0,
    ) -> list[Busy | StillWaiting]:
        """Returns the messages to send to rank 0 now.

        ``blocked`` are the threads' waits of all lengths. ``is_waiting`` is whether anything, in a thread or not, needs
        rank 0 or other ranks. ``over_count`` is how many of the operations that rank 0 started have ended.
        """
        if self._looked_at_s is not None and now_s - self._looked_at_s > 3 * LOOK_S:
            # This process was stopped, or had no core: rank 0's messages of that time are not read yet.
            self._leave_out(now_s - self._looked_at_s - LOOK_S)
        self._looked_at_s = now_s
        messages: list[Busy | StillWaiting] = []
        told = sorted((each for each in blocked if now_s - each.since_s >= LOOK_S), key=lambda each: each.since_s)
        told = told[:_MOST_TOLD]
        # A rank reports that it is stuck only if the report has all its waits: none shorter than LOOK_S, none cut off.
        is_stuck = is_stuck and bool(told) and len(told) == len(blocked) and all(each.collective for each in told)
        if told != self._told or is_stuck != self._told_stuck:
            self._told, self._told_stuck = told, is_stuck
            threads = tuple(
                WaitingThread(
                    each.what, round(now_s - each.since_s, 3), each.is_operation, _sent(each.collective, size)
                )
                for each in told
            )
            messages.append(Busy(threads, is_stuck, dict(begun)))
        if is_waiting or over_count != self._told_count:
            self._told_count = over_count
            messages.append(StillWaiting(over_count))
            if self._unanswered_since_s is None:
                self._unanswered_since_s = now_s
        else:
            self._unanswered_since_s = None
        return messages

    def _leave_out(self, stopped_s: float) -> None:
        """Excludes the last ``stopped_s`` seconds from the silence.

        The time before them counts: otherwise a rank that is always late would never report the silence.
        """
        if self._unanswered_since_s is not None:
            self._unanswered_since_s += stopped_s
        if self._warned_at_s is not None:
            self._warned_at_s += stopped_s

    def silence(self, now_s: float) -> Silence | None:
        """Rank 0's silence, if it is time to warn of it or to end this process; else None."""
        limit_s = self._rules.warn_after_s
        if self._unanswered_since_s is None or limit_s is None:
            return None
        lasted_s = now_s - self._unanswered_since_s
        if self._rules.end_after_s is not None and lasted_s >= self._rules.end_after_s:
            return Silence(lasted_s, is_end=True)
        if lasted_s >= limit_s and (self._warned_at_s is None or now_s - self._warned_at_s >= limit_s):
            self._warned_at_s = now_s
            return Silence(lasted_s, is_end=False)
        return None


@dataclass(eq=False)
class WaitReports:
    """Collects what the threads of this process wait for, and checks that rank 0 answers, which has sent a welcome."""

    _connection: Rank0Connection
    _executor: Executor
    _callers: Callers
    _requests: Requests
    _joins: Joins
    _rank_0: Welcome

    def __post_init__(self) -> None:
        self._group, self._watch = self._connection.group, self._connection.watch
        self._rules = StallRules(self._rank_0.warn_after_s, self._rank_0.end_after_s)
        self._heartbeat = Heartbeat(self._rules)

    def heard(self) -> None:
        self._heartbeat.heard()

    def look(self, now_s: float) -> None:
        """Reports to rank 0 what this process is blocked in; warns, or ends the process, if rank 0 is silent."""
        self._callers.look()
        executor = self._executor
        waits = self._watch.blocked()
        waits.pop(executor.ident or 0, None)
        blocked = [BlockedThread(what, since_s, collective=collective) for what, since_s, collective in waits.values()]
        current = executor.current
        if current is not None:
            blocked.append(BlockedThread(*current, is_operation=True))
        in_operations = [since_s for _, since_s in self._callers.blocked()]
        self._watch.waits_since_s = min([each.since_s for each in blocked] + in_operations, default=None)
        is_stuck = executor.is_idle and not self._callers.can_ask(waits.keys())
        # Ranks that have joined wait for this one, so it shows that it is alive.
        is_waiting = bool(self._requests or self._joins.is_waiting or blocked or not executor.is_idle)
        messages = self._heartbeat.look(
            now_s,
            blocked,
            is_stuck=is_stuck,
            is_waiting=is_waiting,
            over_count=executor.ended,
            begun=self._watch.begun.copy(),
            size=self._group.size,
        )
        self._connection.send(*messages)
        silence = self._heartbeat.silence(now_s)
        if silence is not None:
            self._tell_silence(silence, blocked)

    def waits(self) -> list[tuple[str, float]]:
        """Returns the operations that threads of this process wait for, and since when. Any thread may call it."""
        whats = self._requests.whats()
        found = [(whats[ticket], since_s) for ticket, since_s in self._callers.blocked() if ticket in whats]
        current = self._executor.current
        return found if current is None else [*found, current]

    def end_process(self, words: str) -> None:
        """Prints ``words`` and exits the process: no exception would reach a thread that is blocked in the engine."""
        own = self._group.describe_rank(self._group.rank)
        print(f"hvdlite: {own} ends its process: {words}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)

    def _tell_silence(self, silence: Silence, blocked: Iterable[BlockedThread]) -> None:
        words = (
            f"stalled: {self._describe(0, self._rank_0.pid)} has not answered for {silence.lasted_s:.0f} s: "
            f"{CAUSES_OF_SILENCE}. "
            f"{self._describe(self._group.rank, os.getpid())} waits in {self._words_of_waits(blocked)}"
        )
        if silence.is_end:
            self.end_process(words)
        log.warning("%s. %s", words, self._rules.way_out)

    def _words_of_waits(self, blocked: Iterable[BlockedThread]) -> str:
        asked, is_joining = self._requests.whats(), self._joins.is_joining
        waits = [each.what for each in sorted(blocked, key=lambda each: each.since_s)]
        waits += [asked.pop(ticket) for ticket, _ in self._callers.blocked() if ticket in asked]
        waits += [JOIN] if is_joining else []
        whats = list(dict.fromkeys([*waits, *asked.values()]))
        return list_names(whats, len(whats))

    def _describe(self, rank: int, pid: int) -> str:
        return f"rank {rank} ({self._group.hosts[rank]}, pid {pid})"


def _sent(
    collective: tuple[str, int, tuple[int, ...]] | None, size: int
) -> tuple[str, int, tuple[int, ...] | None] | None:
    """Returns the collective for a message: without members where all ranks take part."""
    if collective is None:
        return None
    label, number, members = collective
    return label, number, None if len(members) == size else members
