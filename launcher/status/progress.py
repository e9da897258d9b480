"""`JobProgress`: asks the agents at an interval how far the workers are, and keeps what they answer as `RankProgress`.

    AskProgress to the agents ──► Progressed events ──► RankProgress of each worker ──► metrics, the live view, summary

`supervisor` tells it of all events. Workers send nothing unless they are asked, and nobody asks without
``--metrics-textfile``, ``--summary`` or ``--watch``, of this job or of another process that looks at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..wire.messages import Event, Progressed
from ..workers.roster import Roster
from .untrusted import number, parsed, part, seconds, text, wait

# Rates are differences over about so long.
_RATE_OVER_S = 10.0
# After the question, what has not come by then is shown as it was: agents tell of silent ranks with the next question.
_SHOW_WITHIN_S = 0.5
_MOST_OPTIMIZERS = 100
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class RankProgress:
    """How far one worker is. ``rank`` is None before it has one.

    ``steps``: of each optimizer, in this process. ``rate``: steps per second, ``sample_rate``: samples per second, and
    ``cpu_use`` processors in use; None until there are two answers, or if it is not known. ``memory`` is in bytes.
    ``gpu_use``: the part of the time in which the GPU of its process computes. ``waits_for`` is what it waits for in
    other ranks, for ``waited_s``. ``cost`` is the part of each step that the job would save if this rank were as fast
    as the others, most of it in ``slow_phase``: `hvd.stragglers` describes it. ``is_silent``: it has called hvd.init()
    and did not answer the last question. ``is_ending``: it did not, since its part in the job is over.
    """

    worker: int
    rank: int | None
    host: str
    pid: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    rate: float | None = None
    sample_rate: float | None = None
    memory: int = 0
    cpu_s: float = 0.0
    cpu_use: float | None = None
    gpu_use: float | None = None
    waits_for: str = ""
    waited_s: float = 0.0
    cost: float | None = None
    slow_phase: str = ""
    is_silent: bool = False
    is_ending: bool = False

    @property
    def step(self) -> int | None:
        """The steps of the optimizer that has taken the most; None if there is none."""
        return max(self.steps.values(), default=None)


@dataclass(frozen=True)
class HostProgress:
    """What a host has to do. Bytes per second over its network, that of other programs too; None if not known.

    ``gpus``: the part of the time in which each GPU computes.
    """

    sent: float | None = None
    received: float | None = None
    gpus: Sequence[float] = ()


@dataclass(frozen=True)
class HostBytes:
    """The bytes that a host has sent and received over its network since the job began, of other programs too."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class _Sample:
    at_s: float
    pid: int
    step: int | None
    cpu_s: float
    samples: int | None


class JobProgress:
    """The progress of one job's workers, by their numbers, also of those that have ended."""

    def __init__(
        self,
        *,
        ask: Callable[[int], None],
        running: Callable[[], Collection[int]],
        roster: Roster,
        each_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        """``ask`` sends an `AskProgress` with this number to all agents, each ``each_s`` seconds.

        With None only after `hurry`.
        """
        self._ask = ask
        self._running = running
        self._roster = roster
        self._each_s = each_s
        self._clock = clock
        self._number = 0
        self._ask_at = None if each_s is None else clock()
        self._hurry: tuple[float, float] | None = None  # each so many seconds, until then
        self._show_at: float | None = None
        self._missing: set[int] = set()
        self._samples: dict[int, deque[_Sample]] = {}
        self._known: dict[int, RankProgress] = {}
        self._paces: Mapping[int, tuple[float, str]] = {}  # by rank: the cost and the phase
        self._hosts: dict[str, HostProgress] = {}
        self._bytes: dict[str, deque[tuple[float, int, int]]] = {}
        self._counted: dict[str, HostBytes] = {}  # by the agent that is there now
        self._total_bytes: dict[str, HostBytes] = {}
        self._viewers: list[Callable[[], None]] = []

    def hurry(self, each_s: float, for_s: float) -> None:
        """Asks each ``each_s`` seconds at least, from now on for so long."""
        now_s = self._clock()
        if self._hurry is None or self._hurry[1] <= now_s:
            self._ask_at = now_s
        self._hurry = each_s, now_s + for_s

    def of_host(self, host: str) -> HostProgress:
        return self._hosts.get(host) or HostProgress()

    def total_bytes(self) -> Mapping[str, HostBytes]:
        """Returns the bytes of each host of which they are known."""
        return self._total_bytes

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
        cost, phase = (None, "") if record.rank is None else self._paces.get(record.rank, (None, ""))
        return replace(known, rank=record.rank, cost=cost, slow_phase=phase)

    def forget(self, worker: int) -> None:
        """Drops what is known of a worker that has ended."""
        self._known.pop(worker, None)
        self._samples.pop(worker, None)

    # ------------------------------------------------------------------ events

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Progressed) or event.worker not in self._roster:
            return
        facts = parsed(event.facts)
        self._note(event.worker, facts, is_last=event.number == 0)
        if isinstance(host := facts.get("host"), dict):
            name = self._roster[event.worker].host
            self._add_bytes(name, host)
            if event.number != 0:
                self._note_host(name, host)
        if event.number == self._number:
            self._missing.discard(event.worker)
            if not self._missing and self._show_at is not None:
                self._show_at = self._clock()

    def time_left_s(self) -> float | None:
        """Returns the seconds until `time_passes` must be called; None if nobody asks."""
        next_at = min((at for at in (self._ask_at, self._show_at) if at is not None), default=None)
        return None if next_at is None else next_at - self._clock()

    def time_passes(self) -> None:
        now_s = self._clock()
        if self._show_at is not None and self._show_at <= now_s:
            self._show()
        if self._ask_at is not None and self._ask_at <= now_s:
            if self._show_at is not None:
                self._show()
            each_s = self._interval_s(now_s)
            self._ask_at = None if each_s is None else now_s + each_s
            if each_s is None:
                return
            self._number += 1
            self._missing = set(self._running())
            self._show_at = now_s + min(_SHOW_WITHIN_S, each_s / 2)
            self._ask(self._number)

    def _interval_s(self, now_s: float) -> float | None:
        hurried = self._hurry[0] if self._hurry is not None and now_s < self._hurry[1] else None
        return min((each_s for each_s in (self._each_s, hurried) if each_s is not None), default=None)

    def _show(self) -> None:
        self._show_at = None
        for viewer in self._viewers:
            viewer()

    def _note(self, worker: int, facts: Mapping[str, Any], *, is_last: bool) -> None:
        record = self._roster[worker]
        before = self._known.get(worker) or RankProgress(worker, record.rank, record.host)
        answer = facts.get("answer")
        has_answered = isinstance(answer, dict)
        is_ending = not has_answered and facts.get("is_ending") is True
        given = answer if isinstance(answer, dict) else {}
        steps = _steps(given.get("steps")) if has_answered else before.steps
        waits_for, waited_s = wait(given.get("waits"), _MOST_CHARACTERS) or ("", 0.0)
        now = replace(
            before,
            rank=record.rank,
            pid=number(facts.get("pid"), record.pid),
            steps=steps or before.steps,
            waits_for=waits_for,
            waited_s=waited_s,
            gpu_use=part(facts["gpu"]) if "gpu" in facts else None,
            is_silent=not has_answered and not is_ending and facts.get("can_answer") is True,
            is_ending=is_ending,
        )
        if not is_last:  # an ended process has no memory, and no times
            now = replace(now, memory=number(facts.get("memory")), cpu_s=seconds(facts.get("cpu_s")))
            samples = given.get("samples")
            now = self._with_rates(worker, now, samples if type(samples) is int else None)
        if isinstance(paces := given.get("paces"), list):
            self._paces = _paces(paces)
        self._known[worker] = now

    def _note_host(self, host: str, facts: Mapping[str, Any]) -> None:
        bytes_now = (self._clock(), number(facts.get("sent")), number(facts.get("received")))
        sent = received = None
        if "sent" in facts:
            known = self._bytes.setdefault(host, deque())
            if known and (bytes_now[1] < known[-1][1] or bytes_now[2] < known[-1][2]):
                known.clear()  # counters that began anew
            known.append(bytes_now)
            while len(known) > 2 and known[1][0] <= bytes_now[0] - _RATE_OVER_S:
                known.popleft()
            sent, received = (_rate([(each[0], each[i]) for each in known]) for i in (1, 2))
        gpus = facts.get("gpus")
        self._hosts[host] = HostProgress(sent, received, [part(use) for use in gpus] if isinstance(gpus, list) else ())

    def _add_bytes(self, host: str, facts: Mapping[str, Any]) -> None:
        if "sent" not in facts:
            return
        now, total = HostBytes(number(facts["sent"]), number(facts.get("received"))), self.total_bytes().get(host)
        before = self._counted.get(host, HostBytes())
        if now.sent < before.sent or now.received < before.received:
            before = HostBytes()  # a new agent's counts, which begin anew
        total = total or HostBytes()
        self._counted[host] = now
        self._total_bytes[host] = HostBytes(
            total.sent + now.sent - before.sent, total.received + now.received - before.received
        )

    def _with_rates(self, worker: int, now: RankProgress, samples_so_far: int | None) -> RankProgress:
        """Adds what is a difference since about `_RATE_OVER_S` ago."""
        sample = _Sample(self._clock(), now.pid, now.step, now.cpu_s, samples_so_far)
        samples = self._samples.setdefault(worker, deque())
        if samples and (samples[-1].pid != sample.pid or (samples[-1].step or 0) > (sample.step or 0)):
            samples.clear()  # another process, or another program
        samples.append(sample)
        while len(samples) > 2 and samples[1].at_s <= sample.at_s - _RATE_OVER_S:
            samples.popleft()
        return replace(
            now,
            rate=_rate([(each.at_s, each.step) for each in samples]),
            sample_rate=_rate([(each.at_s, each.samples) for each in samples]),
            cpu_use=_rate([(each.at_s, each.cpu_s) for each in samples]),
        )


def _rate(samples: Sequence[tuple[float, float | None]]) -> float | None:
    """Returns how much more it is per second; None if fewer than two know it."""
    known = [(at_s, value) for at_s, value in samples if value is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return max(0.0, (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]))


def _steps(given: Any) -> dict[str, int]:
    if not isinstance(given, dict):
        return {}
    return {text(name, _MOST_CHARACTERS): number(step) for name, step in list(given.items())[:_MOST_OPTIMIZERS]}


def _paces(given: Sequence[Any]) -> dict[int, tuple[float, str]]:
    """Returns the cost and the phase by rank, of ``[rank, cost, phase]`` each."""
    triples = [each for each in given if isinstance(each, list) and len(each) == 3]
    return {number(rank): (part(cost), text(phase, _MOST_CHARACTERS)) for rank, cost, phase in triples}
