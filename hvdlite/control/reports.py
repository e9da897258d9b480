"""
Reports this rank's waits and its step clock's readings to rank 0; warns, or ends the process, if rank 0 is silent.

    what threads are blocked in ── look ── "busy", "alive", to rank 0
    nothing arrives from rank 0 ── look ── a warning, an end: rank 0 reports all stalls but its own
    the program's stack ── inside a module with parameters? ── counts of the clock ── its readings, to rank 0

`Heartbeat` has the rules of the waits, and `WaitReports` collects the facts, on the listening thread. `PaceReports` has
a thread of its own. A hook on the model would tell more exactly when forward begins, but it would be copied, pickled
and compiled with the model.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, MappingProxyType

from torch import nn

from ..calls.call_sites import FramesOfThreads, outwards
from ..calls.messages import Busy, PaceReading, StillWaiting, WaitingThread, Welcome
from ..comm.step_clock import Phase, RankPace
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

        ``is_waiting``: something needs rank 0 or other ranks. ``over_count`` operations that rank 0 started have ended.
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
        """Excludes the last ``stopped_s`` seconds; those before count, or a rank that is always late never warns."""
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
    # Without members where all ranks take part.
    if collective is None:
        return None
    label, number, members = collective
    return label, number, None if len(members) == size else members


# The average interval between looks at the program.
_LOOK_S = 0.025

# The interval between readings, in jobs of few ranks. Rank 0 can take this many readings a second from all ranks.
_READING_S = 1.0
_READINGS_PER_S = 50

_CALL: CodeType = nn.Module._call_impl.__code__


class PaceReports:
    """A thread that looks at the program and sends the clock's readings, from `start` to `close`."""

    def __init__(self, connection: Rank0Connection) -> None:
        self._connection = connection
        self._clock = connection.watch.clock
        self._interval_s = max(_READING_S, connection.group.size / _READINGS_PER_S)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-pace", daemon=True)
        self.paces: tuple[RankPace, ...] = ()
        """Those of all ranks, as rank 0 has sent them last."""

    def start(self) -> None:
        self._clock.turn_on(self._interval_s)
        self._thread.start()

    def close(self) -> None:
        self._clock.is_on = False
        self._is_closed.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        # At random times, since regular ones could meet each step in the same phase.
        dice = random.Random()
        while not self._is_closed.wait(_LOOK_S * dice.uniform(0.5, 1.5)):
            self.look()

    def look(self) -> None:
        clock = self._clock
        if clock.phase is Phase.LOAD and clock.thread is not None and clock.tells_forward:
            with FramesOfThreads() as frames:
                frame = frames.get(clock.thread)
                # Only now: meanwhile the phase may have ended.
                if frame is not None and clock.phase is Phase.LOAD:
                    if is_in_model(frame):
                        clock.in_forward += 1
                    else:
                        clock.elsewhere += 1
            # Frames that are kept here would keep the program's tensors.
            del frame, frames
        while clock.readings:
            reading = clock.readings.popleft()
            self._connection.send(
                PaceReading(replace(reading, seconds=tuple(round(each, 7) for each in reading.seconds)))
            )


def is_in_model(frame: FrameType) -> bool:
    """Whether this frame is in a call of a module with parameters: a data transform is a module without any."""
    outermost: FrameType | None = None
    for each in outwards(frame):
        if each.f_code is _CALL:
            outermost = each
    module = None if outermost is None else outermost.f_locals.get("self")
    if not isinstance(module, nn.Module):
        return False
    try:
        # Not the module's own method, which may return something else, or do anything, on this thread.
        return next(nn.Module.named_parameters(module), None) is not None
    except RuntimeError:  # the program adds modules or parameters just now
        return True
