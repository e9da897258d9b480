"""`RefusedLinks`: finds hosts of an elastic job whose connections to others are refused, as by a firewall.

    InitFailed ── a rank's own addresses, and the one that refused it ──► RefusedLinks ──► hosts to give up, and why

A rank that is refused fails at once, and tells who refused it. But a rank that has ended refuses connections too, and
so does one that has given up its generation a moment before the others do. So a refusal counts only if it comes before
any other failure of its generation, if both ranks live on, and if it has come twice since all ranks were connected.

`elastic_job` calls it. It uses no connection, thread or clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..wire.messages import InitFailed
from ..wire.silent_links import Said, silent_between
from .cut_links import CutOff, fewest_to_give_up

MOST_FAILED_MEETINGS = 5
"""How many generations in a row may fail to connect: each of up to three hosts may refuse twice."""

_LEAST_TIMES = 2
_MOST_NAMED = 3


class RefusedLinks:
    """Which hosts refuse which, by the generations that have failed since all ranks were connected."""

    def __init__(self) -> None:
        self.have_met = False
        """Whether all ranks of any generation were connected."""
        self.failed_meetings = 0
        """How many generations in a row could not connect, though no rank was lost: set by `elastic_job`."""
        self._times: Counter[frozenset[str]] = Counter()
        self._said: list[Said] = []  # in this generation
        self._counted: set[frozenset[str]] = set()

    def next_generation(self) -> None:
        """What is said from now on is of another generation."""
        self._said.clear()
        self._counted.clear()

    def forget_all(self) -> None:
        """All ranks are connected: earlier refusals do not count any more."""
        self.have_met = True
        self.next_generation()
        self._times.clear()

    def failed(self, event: InitFailed, host_of: Mapping[int, str]) -> list[CutOff]:
        """Notes a rank that could not connect; returns the hosts to give up, so that all others reach each other.

        ``host_of`` has the hosts of all ranks, in their order.
        """
        refused_by = {} if self._said else dict.fromkeys(event.refused_by, 1.0)
        self._said.append(Said(host_of[event.worker], event.addresses, refused_by))
        new = set(map(frozenset, silent_between(self._said, 1.0))) - self._counted
        self._counted |= new
        self._times.update(new)
        if all(self._times[link] < _LEAST_TIMES for link in new):
            return []
        links = {link for link, times in self._times.items() if times >= _LEAST_TIMES and link <= {*host_of.values()}}
        return [
            CutOff(host, _words([other for link in links if host in link for other in link - {host}]))
            for host in fewest_to_give_up(Counter(host_of.values()), links)
        ]


def _words(others: Sequence[str]) -> str:
    named = sorted(others)[:_MOST_NAMED]
    more = f" and {len(others) - len(named)} more" if len(others) > len(named) else ""
    return (
        f"TCP connections between it and {', '.join(named)}{more} are refused, though hvdlite-run reaches both ends. "
        "Does a firewall block them? hvdlite-run --check shows which connections fail"
    )
