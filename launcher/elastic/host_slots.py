"""Decides which slots of an elastic job's hosts may get workers: none on hosts in a cooldown, or where too many failed.

    hosts found, failures, time ──► HostSlots ──► the slots that `membership` may fill

It has no clock: the caller passes the time, which never goes back, as ``now_s``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..plan.elastic_spec import Policy

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
    # By slot: when its workers have failed, within the window.
    failed_at_s: dict[int, list[float]] = field(default_factory=dict)
    # By slot: how many of the last workers in a row have failed before they were ranks.
    never_ranks: Counter[int] = field(default_factory=Counter)

    @property
    def is_usable(self) -> bool:
        return self.slots > 0 and self.barred_until_s == -math.inf


class HostSlots:
    """The hosts by their labels. Those that were found first are filled first."""

    def __init__(self, policy: Policy, jitter: Callable[[], float], rest_s: float) -> None:
        """``jitter`` draws a number from 0 to 1, for cooldowns.

        A slot whose worker has failed before it was a rank rests for ``rest_s``, then twice, then four times as long.
        So a command that cannot be started for a moment does not use up all restarts in that moment.
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
        """Excludes a host until its cooldown is over, which doubles with each failure; without a cooldown, for ever."""
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
        """Returns when a host's cooldown is over; infinite if it never is."""
        return self._hosts[host].barred_until_s if host in self._hosts else -math.inf

    def barred(self) -> list[str]:
        """Returns the hosts that are excluded now."""
        return [label for label, host in self._hosts.items() if host.slots and not host.is_usable]

    def usable(self) -> dict[str, int]:
        """Returns the slots of the hosts that may get workers."""
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
