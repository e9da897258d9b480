"""
The workers of an elastic job that run, and the slots of hosts in which more may be started.

    hosts found, failures, time ──► HostSlots ──► the slots that `membership` may fill
    workers started, asking, ended ──► ElasticWorkers ──► the ranks of the current generation, and those that could be

`membership` decides which workers there are. A generation is a world: see there. A host in a cooldown gets no workers,
nor does a slot in which too many have failed. Nothing here has a clock: the caller passes the time, which never goes
back, as ``now_s``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hvdlite_wire.store_requests import NewWorkerPolicy

from ..plan.job_spec import Policy

_MOST_DOUBLINGS = 30  # of a cooldown, whose length is a float
_MOST_DOUBLINGS_OF_REST = 2


@dataclass(frozen=True, order=True)
class Place:
    """A slot of a host, by the host's label: the worker's local rank, and so its GPU."""

    host: str
    slot: int

    def __str__(self) -> str:
        return f"slot {self.slot} of {self.host}"


@dataclass
class _Host:
    """A host's slots (0 while it is not there), its failures so far, and until when it gets no workers."""

    slots: int = 0
    failures: int = 0
    barred_until_s: float = -math.inf
    # By slot: when its workers have failed within the window, and how many in a row before they were ranks.
    failed_at_s: dict[int, list[float]] = field(default_factory=dict)
    never_ranks: Counter[int] = field(default_factory=Counter)

    @property
    def is_usable(self) -> bool:
        return self.slots > 0 and self.barred_until_s == -math.inf


class HostSlots:
    """The hosts by their labels. Those that were found first are filled first."""

    def __init__(self, policy: Policy, jitter: Callable[[], float], rest_s: float) -> None:
        """``jitter`` draws a number from 0 to 1, for cooldowns.

        A slot whose worker has failed before it was a rank rests for ``rest_s``, then twice, then four times as long: a
        command that cannot be started for a moment does not use up all restarts in it.
        """
        self._rest_s = rest_s
        self._cooldown_s = policy.cooldown_s
        self._jitter = jitter
        # How many workers may fail in a slot within the window before it stays empty.
        self._max_failures = policy.max_restarts if policy.on_failure.refills else 0
        self._window_s = policy.restart_window_s if policy.on_failure.refills else math.inf
        self._hosts: dict[str, _Host] = {}
        self._now_s = -math.inf

    def found(self, hosts: Mapping[str, int]) -> None:
        """Sets the hosts that there are now, and the number of slots of each."""
        for label, host in list(self._hosts.items()):
            host.slots = 0
            if label not in hosts and not host.failures:
                del self._hosts[label]
        for label, slots in hosts.items():
            self._hosts.setdefault(label, _Host()).slots = slots

    def count_failure(self, host: str) -> None:
        self._hosts.setdefault(host, _Host()).failures += 1

    def count_failed_worker(self, place: Place, now_s: float, *, was_rank: bool) -> None:
        self.count_failure(place.host)
        host = self._hosts[place.host]
        host.failed_at_s.setdefault(place.slot, []).append(now_s)
        host.never_ranks[place.slot] = 0 if was_rank else host.never_ranks[place.slot] + 1
        self._now_s = now_s

    def bar(self, host: str, now_s: float) -> None:
        """Excludes a host until its cooldown is over, which doubles with each failure; without one, for ever."""
        record = self._hosts[host]
        record.barred_until_s = math.inf
        if self._cooldown_s is not None:
            low_s, high_s = self._cooldown_s
            longer_s = low_s * 2.0 ** min(record.failures - 1, _MOST_DOUBLINGS)
            record.barred_until_s = now_s + min(high_s, longer_s + self._jitter() * low_s)

    def forget(self, now_s: float) -> None:
        """Forgets cooldowns and rests that are over, and failures before the window."""
        self._now_s = now_s
        since_s = now_s - self._window_s
        for host in self._hosts.values():
            if host.barred_until_s <= now_s:
                host.barred_until_s = -math.inf
            recent = {slot: [at_s for at_s in times if at_s > since_s] for slot, times in host.failed_at_s.items()}
            host.failed_at_s = {slot: times for slot, times in recent.items() if times}

    def next_change_s(self) -> float | None:
        """Returns when the next cooldown or rest is over, or the next slot may be filled again."""
        changes = [host.barred_until_s for host in self._hosts.values() if host.slots]
        for label, host in self._hosts.items():
            for place in (Place(label, slot) for slot in host.failed_at_s if slot < host.slots):
                if self.rests(place):
                    changes.append(self._rests_until_s(place))
                if not self.may_fill(place):
                    changes.append(self.filled_again_s(place))
        return min((at_s for at_s in changes if math.isfinite(at_s)), default=None)

    def barred_until_s(self, host: str) -> float:
        return self._hosts[host].barred_until_s if host in self._hosts else -math.inf

    def barred(self) -> list[str]:
        return [label for label, host in self._hosts.items() if host.slots and not host.is_usable]

    def usable(self) -> dict[str, int]:
        return {label: host.slots for label, host in self._hosts.items() if host.is_usable}

    def is_there(self, place: Place) -> bool:
        return place.host in self._hosts and place.slot < self._hosts[place.host].slots

    def removal(self, place: Place) -> str:
        """Returns what is said of a place that is not there any more: the host has gone, or this slot of it."""
        host = self._hosts.get(place.host)
        return f"{place if host is not None and host.slots else place.host} has been removed from the job"

    def failures_in(self, place: Place) -> int:
        """Returns how many workers have failed in a slot, as far back as it counts."""
        return len(self._hosts[place.host].failed_at_s.get(place.slot, ()))

    def filled_again_s(self, place: Place) -> float:
        """Returns when a slot in which too many have failed may be filled again."""
        return self._hosts[place.host].failed_at_s[place.slot][-1 - self._max_failures] + self._window_s

    def rests(self, place: Place) -> bool:
        """Whether a slot gets its next worker a little later, as the last one has failed before it was a rank."""
        return self._now_s < self._rests_until_s(place)

    def _rests_until_s(self, place: Place) -> float:
        host = self._hosts[place.host]
        times, count = host.failed_at_s.get(place.slot), host.never_ranks[place.slot]
        if not times or not count:
            return -math.inf
        return times[-1] + self._rest_s * 2.0 ** min(count - 1, _MOST_DOUBLINGS_OF_REST)

    def may_fill(self, place: Place) -> bool:
        """Whether a worker may be started in a slot of a usable host: not where too many have failed."""
        return self.failures_in(place) <= self._max_failures


@dataclass(frozen=True)
class Member:
    """One rank of a generation. ``since`` is the first generation that it was in."""

    worker: int
    place: Place
    since: int


@dataclass(frozen=True)
class ElasticGeneration:
    """A world: its members by rank, and why the one before has ended ("" if only because hosts have changed)."""

    number: int
    members: tuple[Member, ...]
    why: str


@dataclass
class PlacedWorker:
    """A running worker, what it has asked for, and what `elastic_job` knows of its end.

    ``since`` is the first generation that it was in. ``asks_after`` is the last one (0 if none), once it asks for the
    next; ``newcomers`` is what it says then of workers that have been in none. ``why_dismissed``: its end is then no
    failure. ``why_signalled``: why it was told to end by a signal, and ``kill_at_s``: when SIGKILL follows.
    ``why_refused``: it could not be started, and its end is only to be counted.
    """

    number: int
    place: Place
    since: int | None = None
    asks_after: int | None = None
    newcomers: NewWorkerPolicy = NewWorkerPolicy.WELCOME
    why_dismissed: str | None = None
    is_being_ended: bool = False
    why_signalled: str | None = None
    kill_at_s: float | None = None
    why_refused: str | None = None

    @property
    def ends_by_itself(self) -> bool:
        return self.why_dismissed is None and self.why_signalled is None

    @property
    def may_be_rank(self) -> bool:
        return self.why_dismissed is None and not self.is_being_ended

    def __str__(self) -> str:
        return f"worker {self.number} on {self.place.host}"


class ElasticWorkers:
    """The running workers by their numbers, and the current generation, which is None before there is any."""

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots
        self._next_number = 0
        self.running: dict[int, PlacedWorker] = {}
        self.current: ElasticGeneration | None = None

    def add(self, place: Place) -> PlacedWorker:
        worker = self.running[self._next_number] = PlacedWorker(self._next_number, place)
        self._next_number += 1
        return worker

    def next_generation(self, candidates: Iterable[PlacedWorker], why: str) -> ElasticGeneration:
        """Makes these workers the ranks of the next generation, in this order."""
        number = 1 if self.current is None else self.current.number + 1
        members = []
        for each in candidates:
            each.since = number if each.since is None else each.since
            each.asks_after = None
            members.append(Member(each.number, each.place, each.since))
        self.current = ElasticGeneration(number, tuple(members), why)
        return self.current

    def is_member(self, worker: PlacedWorker) -> bool:
        return self.current is not None and any(each.worker == worker.number for each in self.current.members)

    def on_host(self, host: str) -> list[PlacedWorker]:
        return [each for each in self.running.values() if each.place.host == host]

    def started(self) -> list[PlacedWorker]:
        """Returns the running workers that are not being ended, whether they have called hvd.init() or not."""
        return [each for each in self.running.values() if each.may_be_rank]

    def asking(self) -> list[PlacedWorker]:
        return [each for each in self.running.values() if each.asks_after is not None]

    def members(self) -> list[PlacedWorker]:
        """Returns the running members of the current generation that are not being ended, by rank."""
        living = [self.running.get(each.worker) for each in self.current.members] if self.current is not None else []
        return [each for each in living if each is not None and each.may_be_rank]

    def joiners(self) -> list[PlacedWorker]:
        """Returns the workers that ask for their first generation, in the order of their numbers."""
        return [
            each
            for each in self.asking()
            if each.since is None and each.may_be_rank and self._slots.is_there(each.place)
        ]

    def waiting_joiners(self, most: int) -> list[PlacedWorker]:
        """Returns the `joiners` with which the ranks can go on, if there is room for any among ``most``."""
        members = self.members()
        # What the ranks said as they asked the last time holds for this generation, too.
        can_go_on = all(each.newcomers is not NewWorkerPolicy.NEVER for each in members)
        return self.joiners() if can_go_on and len(members) < most else []
