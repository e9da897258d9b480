"""`JobProgress`: asks the agents at an interval how far the workers are, and keeps what they answer as `RankProgress`.

    AskProgress to the agents ──► Progressed events ──► RankProgress of each worker ──► metrics, the live view, summary

`supervisor` tells it of all events. Workers send nothing unless they are asked, and nobody asks without
``--metrics-textfile``, ``--watch`` or ``--summary``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..wire.messages import Event, Progressed
from .roster import Roster

# Rates are differences over about so long.
_RATE_OVER_S = 10.0
# After the question, what has not come by then is shown as it was: agents tell of silent ranks with the next question.
_SHOW_WITHIN_S = 0.5
_MOST_OPTIMIZERS = 100
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class RankProgress:
    """How far one worker is. ``rank`` is None before it has one.

    ``steps``: of each optimizer, in this process. ``rate``: steps per second, and ``cpu_use`` processors in use; None
    until there are two answers. ``memory`` is in bytes. ``waits_for`` is what it waits for in other ranks, for
    ``waited_s``. ``is_silent``: it has called hvd.init() and did not answer the last question.
    """

    worker: int
    rank: int | None
    host: str
    pid: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    rate: float | None = None
    memory: int = 0
    cpu_s: float = 0.0
    cpu_use: float | None = None
    waits_for: str = ""
    waited_s: float = 0.0
    is_silent: bool = False

    @property
    def step(self) -> int | None:
        """The steps of the optimizer that has taken the most; None if there is none."""
        return max(self.steps.values(), default=None)


@dataclass(frozen=True)
class _Sample:
    at_s: float
    pid: int
    step: int
    cpu_s: float


class JobProgress:
    """The progress of one job's workers, by their numbers, also of those that have ended."""

    def __init__(
        self,
        *,
        ask: Callable[[int], None],
        running: Callable[[], Collection[int]],
        roster: Roster,
        each_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``ask`` sends an `AskProgress` with this number to all agents, each ``each_s`` seconds."""
        self._ask = ask
        self._running = running
        self._roster = roster
        self._each_s = each_s
        self._clock = clock
        self._number = 0
        self._ask_at = clock()
        self._show_at: float | None = None
        self._missing: set[int] = set()
        self._samples: dict[int, deque[_Sample]] = {}
        self._known: dict[int, RankProgress] = {}
        self._viewers: list[Callable[[], None]] = []

    def show_with(self, viewer: Callable[[], None]) -> None:
        """Has this called after each question, once the answers are there."""
        self._viewers.append(viewer)

    def of_running(self) -> list[RankProgress]:
        """Returns the progress of each worker that runs, by host and rank."""
        found = [self.of(worker) for worker in self._running() if worker in self._roster]
        return sorted(found, key=lambda each: (each.rank is None, each.rank, each.worker))

    def of(self, worker: int) -> RankProgress:
        """Returns the progress of a worker, with the rank that it has now if it runs."""
        if worker not in self._roster:
            return self._known.get(worker) or RankProgress(worker, None, "")
        record = self._roster[worker]
        known = self._known.get(worker) or RankProgress(worker, record.rank, record.host, record.pid)
        return replace(known, rank=record.rank)

    def forget(self, worker: int) -> None:
        """Drops what is known of a worker that has ended."""
        self._known.pop(worker, None)
        self._samples.pop(worker, None)

    # ------------------------------------------------------------------ events

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Progressed) or event.worker not in self._roster:
            return
        self._note(event.worker, _parsed(event.facts), is_last=event.number == 0)
        if event.number == self._number:
            self._missing.discard(event.worker)
            if not self._missing and self._show_at is not None:
                self._show_at = self._clock()

    def time_left_s(self) -> float:
        """Returns the seconds until `time_passes` must be called."""
        return min(self._ask_at, self._ask_at if self._show_at is None else self._show_at) - self._clock()

    def time_passes(self) -> None:
        now_s = self._clock()
        if self._show_at is not None and self._show_at <= now_s:
            self._show()
        if self._ask_at <= now_s:
            if self._show_at is not None:
                self._show()
            self._number += 1
            self._ask_at = now_s + self._each_s
            self._missing = set(self._running())
            self._show_at = now_s + min(_SHOW_WITHIN_S, self._each_s / 2)
            self._ask(self._number)

    def _show(self) -> None:
        self._show_at = None
        for viewer in self._viewers:
            viewer()

    def _note(self, worker: int, facts: Mapping[str, Any], *, is_last: bool) -> None:
        record = self._roster[worker]
        before = self._known.get(worker) or RankProgress(worker, record.rank, record.host)
        answer = facts.get("answer")
        has_answered = isinstance(answer, dict)
        given = answer if isinstance(answer, dict) else {}
        steps = _steps(given.get("steps")) if has_answered else before.steps
        waits_for, waited_s = _wait(given.get("waits"))
        now = replace(
            before,
            rank=record.rank,
            pid=_number(facts.get("pid"), record.pid),
            steps=steps or before.steps,
            waits_for=waits_for,
            waited_s=waited_s,
            is_silent=not has_answered and facts.get("can_answer") is True,
        )
        if not is_last:  # an ended process has no memory, and no times
            now = replace(now, memory=_number(facts.get("memory")), cpu_s=_seconds(facts.get("cpu_s")))
            rate, cpu_use = self._rates(worker, now)
            now = replace(now, rate=rate, cpu_use=cpu_use)
        self._known[worker] = now

    def _rates(self, worker: int, now: RankProgress) -> tuple[float | None, float | None]:
        """Returns the steps per second and the processors in use, since about `_RATE_OVER_S` ago."""
        sample = _Sample(self._clock(), now.pid, now.step or 0, now.cpu_s)
        samples = self._samples.setdefault(worker, deque())
        if samples and (samples[-1].pid != sample.pid or samples[-1].step > sample.step):
            samples.clear()  # another process, or another program
        samples.append(sample)
        while len(samples) > 2 and samples[1].at_s <= sample.at_s - _RATE_OVER_S:
            samples.popleft()
        first = samples[0]
        if (lasted_s := sample.at_s - first.at_s) <= 0:
            return None, None
        rate = None if now.step is None else (sample.step - first.step) / lasted_s
        return rate, max(0.0, (sample.cpu_s - first.cpu_s) / lasted_s)


def _parsed(facts: str) -> dict[str, Any]:
    try:
        parsed = json.loads(facts)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _number(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and value >= 0 else otherwise


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _text(value: Any) -> str:
    # A program names its parameters as it likes: nothing of that may control the terminal.
    return "".join(each if each.isprintable() else "?" for each in str(value)[:_MOST_CHARACTERS])


def _steps(given: Any) -> dict[str, int]:
    if not isinstance(given, dict):
        return {}
    return {_text(name): _number(step) for name, step in list(given.items())[:_MOST_OPTIMIZERS]}


def _wait(given: Any) -> tuple[str, float]:
    if isinstance(given, Sequence) and len(given) == 2 and isinstance(given[0], str):
        return _text(given[0]), _seconds(given[1])
    return "", 0.0
