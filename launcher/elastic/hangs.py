"""
Finds workers of an elastic job that no longer respond, and hosts that cannot reach each other, though the launcher can.

    store ── ping/<worker>/<n> ── a thread of the worker ── Alive ─┬► Hangs ──► workers to end
                                                                  └► CutLinks ─────┬► hosts to give up, and why
    InitFailed ── a rank's own addresses, and the one that refused it ──► RefusedLinks ┘

`Hangs`: only a process that is stopped (SIGSTOP), or in which a C extension holds the interpreter's lock, cannot
answer. It is ended once it has been silent for the whole limit, if another worker waits then for what ranks do. Some
seconds before, a report says where it stands. A worker that answers may take its time.

`CutLinks`: each worker says for how long nothing has come over its connections to other hosts, not even the other
kernel's answers to probes (`hvdlite.comm.gloo_sockets`): so one that computes, sleeps or is stopped is not taken for a
cut network.

`RefusedLinks`: a rank whose connection is refused, as by a firewall, fails at once. But a rank that has ended, or has
given up its generation a moment before, refuses connections too. So a refusal counts only if it comes before any other
failure of its generation, if both ranks live on, and if it has come twice since all ranks were connected.

`elastic_job` calls them. They use no connection or thread, and the launcher's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..protocol.messages import Alive, InitFailed, Unresponsive
from ..status.job_report import Said, silent_between
from ..store.server import Store

_ASKED_PER_LIMIT = 4
_LONGEST_PAUSE_S = 2.5
# A report takes 4.5 s at most, and up to a pause passes until it is begun.
_REPORT_BEFORE_S = 7.0
# With a shorter limit no report is taken: a worker may be silent for half of it and respond.
_LEAST_LIMIT_S = 2 * _REPORT_BEFORE_S


@dataclass
class _LastQuestion:
    number: int
    at_s: float
    is_answered: bool = False
    waits: bool = False
    """Whether the worker waited for other ranks, by its last answer."""
    is_told: bool = False
    """Whether a report was taken, since the worker does not answer."""

    def key(self, worker: int) -> bytes:
        return b"ping/%d/%d" % (worker, self.number)


class Hangs:
    """The questions to all workers of one job, and what they have answered."""

    def __init__(
        self,
        limit_s: float,
        store: Store,
        clock: Callable[[], float],
        tell: Callable[[Unresponsive], None] = lambda _: None,
    ) -> None:
        """``limit_s`` is --hang-timeout; 0 for never, which asks nothing. ``tell`` has a report taken."""
        self.limit_s = limit_s
        self._pause_s = min(limit_s / _ASKED_PER_LIMIT, _LONGEST_PAUSE_S)
        self._store = store
        self._clock = clock
        self._tell = tell
        self._asked: dict[int, _LastQuestion] = {}
        self._looked_at_s = clock()

    def begin(self, worker: int) -> None:
        """Begins to ask a worker that has called hvd.init(), if it has not been asked before."""
        if self.limit_s and worker not in self._asked:
            self._ask(worker, 0)

    def forget(self, worker: int) -> None:
        asked = self._asked.pop(worker, None)
        if asked is not None and not asked.is_answered:
            self._store.delete(asked.key(worker))

    def answered(self, alive: Alive) -> None:
        """Takes a worker's answer; ignores one to an earlier question."""
        asked = self._asked.get(alive.worker)
        if asked is None or asked.is_answered or alive.number != asked.number:
            return
        self._store.delete(asked.key(alive.worker))
        # A collective takes a while in any case.
        asked.is_answered, asked.waits = True, alive.waited_s >= self._pause_s
        asked.at_s = self._clock()

    def due_s(self) -> float | None:
        """When `look` must be called, by the clock; None if no worker is to be asked."""
        return self._looked_at_s + self._pause_s if self._asked else None

    def look(self, waiting: Collection[int]) -> list[int]:
        """Asks again, and returns the workers to end. ``waiting`` are those in hvd.init() that wait for ranks."""
        now_s = self._clock()
        late_s = now_s - self._looked_at_s - self._pause_s
        if late_s < 0:
            return []
        self._looked_at_s = now_s
        if late_s > self._pause_s:
            # The launcher itself was stopped, and answers of that time are not read yet.
            for asked in self._asked.values():
                asked.at_s += late_s
        for worker, asked in list(self._asked.items()):
            if asked.is_answered:
                self._ask(worker, asked.number + 1, waits=asked.waits)
        silent = self._awaited(waiting, now_s, self.limit_s)
        if self.limit_s >= _LEAST_LIMIT_S:
            for worker in self._awaited(waiting, now_s, self.limit_s - _REPORT_BEFORE_S):
                asked = self._asked[worker]
                if not asked.is_told and worker not in silent:
                    self._tell(Unresponsive(worker, now_s - asked.at_s))
                asked.is_told = True
        return silent

    def those_who_wait(self, waiting: Collection[int]) -> list[int]:
        """Returns the workers that waited for others by their last answers, and those of ``waiting``, as for `look`."""
        return [worker for worker, asked in self._asked.items() if asked.waits or worker in waiting]

    def _awaited(self, waiting: Collection[int], now_s: float, limit_s: float) -> list[int]:
        silent = [
            worker for worker, asked in self._asked.items() if not asked.is_answered and now_s - asked.at_s >= limit_s
        ]
        return silent if any(worker not in silent for worker in self.those_who_wait(waiting)) else []

    def _ask(self, worker: int, number: int, *, waits: bool = False) -> None:
        asked = self._asked[worker] = _LastQuestion(number, self._clock(), waits=waits)
        self._store.put(asked.key(worker), b"%d" % number)


# Of --hang-timeout: with it the job goes on within 20 s by default. The kernel repeats data that nobody acknowledges
# at growing intervals, the last within these 15 s after 12.7 s: a network that is back by then is not taken for cut.
_SILENT_PART = 0.5
# The kernels probe every 2 s.
_SHORTEST_LIMIT_S = 6.0
# Once one connection is silent for the limit, all count that are silent for this part of it: they may differ a little.
_ALSO_SILENT_PART = 0.5

MOST_FAILED_MEETINGS = 5
"""How many generations in a row may fail to connect: each of up to three hosts may refuse twice."""

_LEAST_REFUSALS = 2
_MOST_NAMED = 3


class CutOff(NamedTuple):
    """A host to give up, so that the others can go on. ``why`` is for the user."""

    host: str
    why: str


class CutLinks:
    """What the workers of one job have last said of their connections."""

    def __init__(self, hang_timeout_s: float) -> None:
        # How long a connection may be silent.
        self._limit_s = max(_SILENT_PART * hang_timeout_s, _SHORTEST_LIMIT_S)
        self._said: dict[int, Alive] = {}

    def answered(self, alive: Alive) -> None:
        self._said[alive.worker] = alive

    def forget(self, worker: int) -> None:
        self._said.pop(worker, None)

    def forget_all(self) -> None:
        """Forgets all answers, which are of the connections of a generation that has ended."""
        self._said.clear()

    def cut_off(self, host_of: Mapping[int, str]) -> list[CutOff]:
        """Returns the hosts to give up, so that all others reach each other; ``host_of`` has the ranks' hosts in order.

        It waits until both ends have answered the launcher.
        """
        if all(since_s < self._limit_s for said in self._said.values() for since_s in said.silent_s.values()):
            return []
        ranks = [
            Said(host_of[worker], said.addresses, said.silent_s)
            for worker, said in self._said.items()
            if worker in host_of
        ]
        silent_s = silent_between(ranks, _ALSO_SILENT_PART * self._limit_s)
        if max(silent_s.values(), default=0.0) < self._limit_s:
            return []
        links = set(map(frozenset, silent_s))
        return [
            CutOff(host, self._words(host, [end for ends in links if host in ends for end in ends - {host}], silent_s))
            for host in fewest_to_give_up(Counter(host_of.values()), links)
        ]

    def _words(self, host: str, others: Collection[str], silent_s: Mapping[tuple[str, str], float]) -> str:
        longest_s = max(since_s for ends, since_s in silent_s.items() if host in ends)
        return (
            f"the network between it and {_named(others)} is cut: nothing came over it for {longest_s:.0f} s, "
            "though hvdlite-run reaches both ends"
        )


class RefusedLinks:
    """Which hosts refuse which, by the generations that have failed since all ranks were connected."""

    def __init__(self) -> None:
        self.have_met = False  # all ranks of any generation
        self.failed_meetings = 0  # in a row, though no rank was lost: set by `elastic_job`
        self._times: Counter[frozenset[str]] = Counter()
        self._said: list[Said] = []  # in this generation
        self._counted: set[frozenset[str]] = set()

    def next_generation(self) -> None:
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
        if all(self._times[link] < _LEAST_REFUSALS for link in new):
            return []
        hosts = Counter(host_of.values())
        links = {link for link, times in self._times.items() if times >= _LEAST_REFUSALS and link <= hosts.keys()}
        given_up = []
        for host in fewest_to_give_up(hosts, links):
            others = _named(other for link in links if host in link for other in link - {host})
            why = (
                f"TCP connections between it and {others} are refused, though hvdlite-run reaches both ends. Does a "
                "firewall block them? hvdlite-run --check shows which connections fail"
            )
            given_up.append(CutOff(host, why))
        return given_up


def fewest_to_give_up(workers: Mapping[str, int], cuts: Iterable[frozenset[str]]) -> list[str]:
    """Returns the hosts to give up, so that no cut link is left between the others.

    ``workers`` has the number of each host's workers, rank 0's first. ``cuts`` are pairs of hosts. Given up is the host
    that reaches the fewest workers, one after the other: the smaller side, and of two equal ones that without rank 0.
    """
    first = next(iter(workers))
    cut_from: dict[str, set[str]] = {host: set() for host in workers}
    for one, other in map(tuple, cuts):
        cut_from[one].add(other)
        cut_from[other].add(one)
    given_up = []
    while any(cut_from.values()):
        worst = max(
            (host for host in workers if cut_from[host]),
            key=lambda host: (sum(workers[other] for other in cut_from[host]), first in cut_from[host], host != first),
        )
        given_up.append(worst)
        for other in cut_from[worst]:
            cut_from[other].discard(worst)
        cut_from[worst] = set()
    return given_up


def _named(others: Iterable[str]) -> str:
    names = sorted(others)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
