"""
`StepClock`: adds up how long this rank is in each phase of its steps, and how long it waits for other ranks meanwhile.

    end of a step ── LOAD: data and forward ── first gradient ── BACKWARD ── its end ── LOAD ── step(): OPTIMIZER ── end
                     └─────────────── WAIT, for other ranks, within any of them ────────────────┘

An all-reduce makes all ranks' steps equally long: what differs is how long each rank computes before it begins to wait.
`optim` reports the phases, `work` and `calls.handle` the waits. Every few steps the clock makes a `Reading`, which
`control.reports` sends to rank 0.

On a CPU the times are the program's. On a GPU, which the program runs ahead of, they are those at which the GPU reaches
these points of its stream, read a few steps later.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

# The most steps whose times a GPU has not reached yet, and the most readings that have not been taken.
_MOST_PENDING = 64
# The most phases of a step. A program that only evaluates after its last step begins two with each collective.
_MOST_MARKS = 10_000


class Phase(enum.IntEnum):
    """A phase of a step: a place in `Reading.seconds`."""

    LOAD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    WAIT = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """What a clock shows at the end of a step; all numbers are totals since the clock was turned on.

    ``set_id`` is the process set that steps. ``sat_out`` of its ``steps`` were those of other ranks, after this one had
    joined. ``seconds`` are by `Phase`. ``in_forward`` and ``elsewhere`` count the looks at the program in the phase
    LOAD that found it inside a module with parameters, and outside of one.
    """

    set_id: int
    steps: int
    sat_out: int
    seconds: tuple[float, ...]
    in_forward: int
    elsewhere: int


@dataclass(frozen=True, slots=True)
class RankPace:
    """How long a rank took for its part of a step, in the last minute, and what that cost the other ranks.

    ``seconds`` are of one step, by phase: "data" (all that is none of the others), "forward", "backward" and
    "optimizer". They do not contain the time in which the rank waited for others, ``wait_s``. "forward" is the time in
    calls of a `torch.nn.Module` with parameters, found by looking at the program about 40 times a second. On a GPU,
    which the program runs ahead of, "data and forward" stands for the first two.

    ``relative_score`` is the median of the other ranks' seconds, divided by this rank's: 1 is as fast as they are or
    faster, 0.5 is half as fast. ``own_score`` compares with this rank's own best minute in the same way. ``cost`` is
    the part of each step that the job would save if this rank were as fast as the median of the others. ``phase`` is
    the one in which most of that is lost; None if ``cost`` is 0.
    """

    rank: int
    host: str
    seconds: Mapping[str, float]
    wait_s: float
    relative_score: float
    own_score: float
    cost: float
    phase: str | None

    def rounded(self) -> RankPace:
        """Returns it with fewer digits, to be sent."""
        return replace(self, seconds={name: round(value, 7) for name, value in self.seconds.items()})


class HostTimer:
    """Takes the times of phases: the program's own."""

    def stamp(self) -> float:
        return time.perf_counter()

    def is_known(self, stamp: float) -> bool:
        return True

    def seconds_between(self, began: float, ended: float) -> float:
        return ended - began


class GpuTimer:
    """Takes the times at which a GPU reaches points of the program's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event | None:
        """Records an event; None while a CUDA graph captures, in which nothing is reached."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own is untyped
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_known(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())  # type: ignore[no-untyped-call]  # torch's own is untyped

    def seconds_between(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(began.elapsed_time(ended)) / 1e3


class StepClock:
    """The times of one rank's steps, of all its optimizers together, on the thread that takes them.

    Nothing is measured until `turn_on`. Any thread may look at the attributes.
    """

    def __init__(self, timer: HostTimer | GpuTimer | None = None) -> None:
        self.is_on = False
        self.phase = Phase.LOAD
        # The thread that takes the steps; None before the first one.
        self.thread: int | None = None
        # Counted by who looks at the program: see `Reading`.
        self.in_forward = self.elsewhere = 0
        # The readings that nobody has taken yet.
        self.readings: deque[Reading] = deque(maxlen=_MOST_PENDING)
        self._timer: HostTimer | GpuTimer = HostTimer() if timer is None else timer
        self._interval_s = 1.0
        self._seconds = [0.0] * len(Phase)
        self._set_id: int | None = None
        self._steps = self._sat_out = 0
        # Readings are made at multiples of this power of two, so that those of all ranks are of the same steps, even
        # while some ranks have doubled it and others have not.
        self._every = 1
        self._read_at_s = 0.0
        # In this step: the phases that have begun, and when. Empty in steps that are not measured: the first one, which
        # opens engines and compiles kernels, and one with too many phases.
        self._marks: list[tuple[Phase, Any]] = []
        # Ended steps whose times are not all known: their marks, the reading's numbers, and whether to make one.
        self._pending: deque[tuple[list[tuple[Phase, Any]], tuple[int, int, int], bool]] = deque()
        self._waits = 0
        self._before_wait = Phase.LOAD

    def turn_on(self, interval_s: float) -> None:
        """Begins to measure, with a reading about every ``interval_s`` seconds or every step, whichever is longer."""
        self._interval_s = interval_s
        self.is_on = True

    @property
    def tells_forward(self) -> bool:
        """Whether the program is where the clock's times are: not if it runs ahead of a GPU."""
        return isinstance(self._timer, HostTimer)

    def follow(self, device: torch.device) -> None:
        """Takes the times of this device from now on, if it is a GPU: gradients are on it."""
        if device.type == "cuda" and self.tells_forward:
            self._timer = GpuTimer(device)
            self._marks.clear()

    # -- what the steps report

    def begin_backward(self) -> None:
        """Notes the first gradient of a backward pass."""
        if self.phase is Phase.LOAD:
            self._enter(Phase.BACKWARD)

    def end_backward(self) -> None:
        if self.phase is Phase.BACKWARD:
            self._enter(Phase.LOAD)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the thread of the steps waits for other ranks. Does nothing on other threads."""
        is_timed = self.begin_wait()
        try:
            yield
        finally:
            if is_timed:
                self.end_wait()

    def begin_wait(self) -> bool:
        """Does what entering `waiting` does; returns whether `end_wait` must be called."""
        if not self.is_on or threading.get_ident() != self.thread:
            return False
        self._waits += 1
        if self._waits == 1:
            self._before_wait = self.phase
            self._enter(Phase.WAIT)
        return True

    def end_wait(self) -> None:
        self._waits -= 1
        if self._waits == 0:
            self._enter(self._before_wait)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which an optimizer takes its step, or a part of it while other ranks are waited for."""
        if not self.is_on:
            yield
            return
        own = threading.get_ident()
        if self.thread != own:
            self.thread, self._waits = own, 0
        before, waits, self._waits = self.phase, self._waits, 0
        self._enter(Phase.OPTIMIZER)
        try:
            yield
        finally:
            self._waits = waits
            self._enter(before if waits else Phase.LOAD)

    def stepped(self, set_id: int) -> None:
        """Notes the end of a step of the ranks of this process set."""
        if self.is_on:
            self._count(set_id, sat_out=0)

    def sat_out(self, set_id: int) -> None:
        """Notes the end of a step that this rank has sat out."""
        if self.is_on:
            self._count(set_id, sat_out=1)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if len(self._marks) == _MOST_MARKS:
            self._marks.clear()
        if self._marks:
            self._marks.append((phase, self._timer.stamp()))

    # -- readings

    def _count(self, set_id: int, sat_out: int) -> None:
        if self._set_id is None or set_id < self._set_id:
            # Of several process sets the one with the smallest number counts, which is that of all ranks if it steps.
            self._set_id, self._steps, self._sat_out, self._every = set_id, 0, 0, 1
        stamp = self._timer.stamp()
        if stamp is None:
            self._marks.clear()
            return
        if set_id == self._set_id:
            self._steps += 1
            self._sat_out += sat_out
        marks, self._marks = self._marks, [(self.phase, stamp)]
        marks.append((self.phase, stamp))
        is_due = set_id == self._set_id and self._steps % self._every == 0
        if is_due:
            self._adapt()
        if all(stamp is not None for _, stamp in marks):
            self._pending.append((marks, (self._set_id, self._steps, self._sat_out), is_due))
        while self._pending and all(self._timer.is_known(stamp) for _, stamp in self._pending[0][0]):
            self._add(*self._pending.popleft())
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft()

    def _adapt(self) -> None:
        now_s = time.monotonic()
        took_s, self._read_at_s = now_s - self._read_at_s, now_s
        if took_s < self._interval_s:
            self._every *= 2
        elif took_s > 4 * self._interval_s and self._every > 1:
            self._every //= 2

    def _add(self, marks: list[tuple[Phase, Any]], counts: tuple[int, int, int], is_due: bool) -> None:
        seconds, between = self._seconds, self._timer.seconds_between
        for (phase, began), (_, ended) in pairwise(marks):
            seconds[phase] += between(began, ended)
        if is_due:
            set_id, steps, sat_out = counts
            self.readings.append(Reading(set_id, steps, sat_out, tuple(seconds), self.in_forward, self.elsewhere))
