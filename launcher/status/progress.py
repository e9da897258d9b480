"""`JobProgress`: asks the agents at an interval how far the workers are, and keeps what they answer as `RankStatus`.

    AskStatus to the agents ──► StatusTold events ──► RankStatus of each worker ──► metrics, the live view, summary

`supervisor` tells it of all events. Workers send nothing unless they are asked, and nobody asks without
``--metrics-textfile``, ``--summary`` or ``--watch``, of this job or of another process that looks at it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdlite_wire.worker_status import HostUsage, Pace

from ..protocol.messages import AskStatus, Event, StatusTold
from ..workers.ending import Ending, Observer
from .rank_status import RankStatus, sorted_by_rank

# Rates are differences over about so long.
_RATE_OVER_S = 10.0
# After the question, what has not come by then is shown as it was: agents tell of silent ranks with the next question.
_SHOW_WITHIN_S = 0.5


@dataclass(frozen=True)
class HostProgress:
    """Bytes per second over a host's network, of all programs, None if not known; and how much each GPU computes."""

    sent: float | None = None
    received: float | None = None
    gpus: Sequence[float] = ()


@dataclass(frozen=True)
class HostBytes:
    """The bytes that a host has sent and received over its network since the job began, of other programs too."""

    sent: int = 0
    received: int = 0


class _Window(deque[tuple[float, Sequence[float | None]]]):
    """The last values of some counters, with their times, as far as about `_RATE_OVER_S` back."""

    def rates(self, now_s: float, *values: float | None) -> list[float | None]:
        """Adds the values of now; returns how much more each is per second, None if fewer than two are known."""
        self.append((now_s, values))
        while len(self) > 2 and self[1][0] <= now_s - _RATE_OVER_S:
            self.popleft()
        return [self._rate(index) for index in range(len(values))]

    def _rate(self, index: int) -> float | None:
        known = [(at_s, value) for at_s, row in self if (value := row[index]) is not None]
        if len(known) < 2 or known[-1][0] <= known[0][0]:
            return None
        return max(0.0, (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0]))


class JobProgress(Observer):
    """The progress of one job's workers, by their numbers, also of those that have ended."""

    def __init__(self, ending: Ending, ask: Callable[[AskStatus], None], *, each_s: float | None) -> None:
        """``ask`` sends a question to all agents, each ``each_s`` seconds; with None only after `hurry`."""
        self._ask = ask
        self._ending = ending
        self._each_s = each_s
        self._number = 0
        self._ask_at = None if each_s is None else self._ending.clock()
        self._hurry: tuple[float, float] | None = None  # each so many seconds, until then
        self._show_at: float | None = None
        self._missing: set[int] = set()
        self._known: dict[int, RankStatus] = {}
        self._windows: dict[int, _Window] = defaultdict(_Window)
        self._paces: Mapping[int, Pace] = {}  # by rank
        self._hosts: dict[str, HostProgress] = {}
        self._windows_of_hosts: dict[str, _Window] = defaultdict(_Window)
        self._counted: dict[str, HostBytes] = {}  # by the agent that is there now
        self.total_bytes: dict[str, HostBytes] = {}
        """The bytes of each host of which they are known."""
        self._viewers: list[Callable[[], None]] = []

    def hurry(self, each_s: float, for_s: float) -> None:
        """Asks each ``each_s`` seconds at least, from now on for so long."""
        now_s = self._ending.clock()
        if self._hurry is None or self._hurry[1] <= now_s:
            self._ask_at = now_s
        self._hurry = each_s, now_s + for_s

    def of_host(self, host: str) -> HostProgress:
        return self._hosts.get(host) or HostProgress()

    def show_with(self, viewer: Callable[[], None]) -> None:
        """Has this called after each question, once the answers are there."""
        self._viewers.append(viewer)

    def of_running(self) -> list[RankStatus]:
        """Returns the status of each worker that runs, by rank."""
        return sorted_by_rank(self.of(worker) for worker in self._ending.running if worker in self._ending.roster)

    def of(self, worker: int) -> RankStatus:
        """Returns the status of a worker, with the rank that it has now if it runs."""
        if worker not in self._ending.roster:
            return self._known.get(worker) or RankStatus(worker)
        known = self._known.get(worker) or RankStatus.known(worker, self._ending.roster)
        rank = self._ending.roster[worker].rank
        pace = None if rank is None else self._paces.get(rank)
        cost, phase = (None, "") if pace is None else (pace.cost, pace.phase or "")
        return replace(known, rank=rank, cost=cost, slow_phase=phase)

    def forget(self, worker: int) -> None:
        self._known.pop(worker, None)
        self._windows.pop(worker, None)

    def on_event(self, event: Event) -> None:
        if not isinstance(event, StatusTold) or event.in_full or event.worker not in self._ending.roster:
            return
        self._note(event)
        if event.status.usage is not None:
            self._note_host(self._ending.roster[event.worker].host, event.status.usage, is_last=event.number == 0)
        if event.number == self._number:
            self._missing.discard(event.worker)
            if not self._missing and self._show_at is not None:
                self._show_at = self._ending.clock()

    def time_left_s(self) -> float | None:
        next_at = min((at for at in (self._ask_at, self._show_at) if at is not None), default=None)
        return None if next_at is None else next_at - self._ending.clock()

    def time_passes(self) -> None:
        now_s = self._ending.clock()
        is_due = self._ask_at is not None and self._ask_at <= now_s
        if self._show_at is not None and (is_due or self._show_at <= now_s):
            self._show_at = None
            for viewer in self._viewers:
                viewer()
        if is_due:
            hurried = self._hurry[0] if self._hurry is not None and now_s < self._hurry[1] else None
            each_s = min((each_s for each_s in (self._each_s, hurried) if each_s is not None), default=None)
            self._ask_at = None if each_s is None else now_s + each_s
            if each_s is not None:
                self._number += 1
                self._missing = set(self._ending.running)
                self._show_at = now_s + min(_SHOW_WITHIN_S, each_s / 2)
                self._ask(AskStatus(self._number, in_full=False))

    def _note(self, told: StatusTold) -> None:
        worker, status = told.worker, told.status
        before = self._known.get(worker) or RankStatus.known(worker, self._ending.roster)
        now = RankStatus.known(worker, self._ending.roster, status, steps=status.steps or before.steps)
        if told.number == 0:  # an ended process has no memory, and no times
            kept = ("memory", "cpu_s", "rate", "sample_rate", "cpu_use")
            now = replace(now, **{name: getattr(before, name) for name in kept})
        else:
            if before.pid != now.pid or (before.step or 0) > (now.step or 0):
                self._windows.pop(worker, None)  # another process, or another program, begins anew
            rates = self._windows[worker].rates(self._ending.clock(), now.step, now.samples, now.cpu_s)
            now = replace(now, rate=rates[0], sample_rate=rates[1], cpu_use=rates[2])
        if status.paces is not None:
            self._paces = {pace.rank: pace for pace in status.paces}
        self._known[worker] = now

    def _note_host(self, host: str, usage: HostUsage, *, is_last: bool) -> None:
        rates: Sequence[float | None] = (None, None)
        if usage.sent is not None and usage.received is not None:
            before, total = self._counted.get(host, HostBytes()), self.total_bytes.get(host, HostBytes())
            window = self._windows_of_hosts[host]
            if usage.sent < before.sent or usage.received < before.received:  # a new agent's, which begin anew
                before, window = HostBytes(), _Window()
            sent, received = total.sent + usage.sent - before.sent, total.received + usage.received - before.received
            self._counted[host] = HostBytes(usage.sent, usage.received)
            self.total_bytes[host], self._windows_of_hosts[host] = HostBytes(sent, received), window
            if not is_last:
                rates = window.rates(self._ending.clock(), usage.sent, usage.received)
        if not is_last:
            self._hosts[host] = HostProgress(rates[0], rates[1], usage.gpus)
