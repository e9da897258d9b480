"""
Finds the ranks that hold up the others, from the readings of all ranks' step clocks, and words the lines about them.

    readings of all ranks, of the same step ── a minute of them ── seconds per step by phase ── costs, scores, lines

"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..comm.step_clock import Phase, RankPace, Reading

WINDOW_S = 60.0  # how long a rank must have held up the others before a line names it; a `RankPace` is about this time
_BEST_S = 10.0  # the shortest time after which a rank's seconds per step count as its own best
_AGAIN_S = 600.0  # after this a line about the same rank is repeated; about another phase of it, after `WINDOW_S`
_LOOKS = 5  # fewer looks at the program do not tell its forward from its data
_MOST_READINGS = 256  # of a rank that are kept; the minute is thinned out if there are more

DATA, FORWARD, DATA_AND_FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "data and forward", "backward", "optimizer"


def paces_between(older: Mapping[int, Reading], newer: Mapping[int, Reading], hosts: Sequence[str]) -> list[RankPace]:
    """Compares the ranks, with an `own_score` of 1, over the steps between two readings of each.

    Without those that sat out any of them; empty if that leaves fewer than two.
    """
    deltas = {
        rank: _Delta.between(older[rank], newer[rank])
        for rank in sorted(newer)
        if rank in older and newer[rank].sat_out == older[rank].sat_out and newer[rank].steps > older[rank].steps
    }
    if len(deltas) < 2:
        return []
    in_forward, looks = (sum(each) for each in zip(*((d.in_forward, d.looks) for d in deltas.values()), strict=True))
    # A rank that is seldom seen there spends little time there, so what all of them do will do for it.
    usual_part = in_forward / looks if looks >= _LOOKS else None
    seconds = {rank: each.by_phase(usual_part) for rank, each in deltas.items()}
    busy = {rank: sum(each.values()) for rank, each in seconds.items()}
    step_s = _median([busy[rank] + each.wait_s for rank, each in deltas.items()])
    usual_busy = _medians_of_others(busy)
    phases = seconds[next(iter(seconds))].keys()
    usual = {phase: _medians_of_others({rank: own[phase] for rank, own in seconds.items()}) for phase in phases}
    return [
        RankPace(
            rank,
            hosts[rank],
            own,
            deltas[rank].wait_s,
            relative_score=_score(usual_busy[rank], busy[rank]),
            own_score=1.0,
            cost=max(0.0, busy[rank] - usual_busy[rank]) / step_s if step_s > 0 else 0.0,
            phase=_largest({phase: own[phase] - usual[phase][rank] for phase in phases})
            if busy[rank] > usual_busy[rank]
            else None,
        )
        for rank, own in seconds.items()
    ]


def _largest(values: Mapping[str, float]) -> str:
    return max(values, key=values.__getitem__)


def _median(values: Sequence[float]) -> float:
    # Not that of `statistics`, whose imports take as long as some of hvdlite's own packages.
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2


def _medians_of_others(values: Mapping[int, float]) -> dict[int, float]:
    """Returns for each rank the median of the other ranks' values; there are at least two ranks."""
    ordered = sorted(values.values())
    middle, is_odd = divmod(len(ordered) - 1, 2)
    medians = {}
    for rank, value in values.items():
        own = bisect_left(ordered, value)
        upper = ordered[middle if middle < own else middle + 1]
        lower = ordered[middle - 1 if middle - 1 < own else middle] if not is_odd else upper
        medians[rank] = (lower + upper) / 2
    return medians


def _score(best_s: float, own_s: float) -> float:
    return min(1.0, best_s / own_s) if own_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class _Delta:
    """What happened on a rank between two of its readings: seconds per step, and counts of looks."""

    load_s: float
    backward_s: float
    optimizer_s: float
    wait_s: float
    in_forward: int
    looks: int

    @classmethod
    def between(cls, older: Reading, newer: Reading) -> _Delta:
        steps = newer.steps - older.steps
        load, backward, optimizer, wait = (
            max(0.0, newer.seconds[phase] - older.seconds[phase]) / steps for phase in Phase
        )
        in_forward = newer.in_forward - older.in_forward
        return cls(load, backward, optimizer, wait, in_forward, in_forward + newer.elsewhere - older.elsewhere)

    def by_phase(self, usual_part: float | None) -> dict[str, float]:
        """Returns the seconds by phase. ``usual_part`` of the ranks' `Phase.LOAD` is forward; None if unknown."""
        rest = {BACKWARD: self.backward_s, OPTIMIZER: self.optimizer_s}
        if usual_part is None:
            return {DATA_AND_FORWARD: self.load_s, **rest}
        forward_s = self.load_s * (usual_part if self.looks < _LOOKS else self.in_forward / self.looks)
        return {DATA: self.load_s - forward_s, FORWARD: forward_s, **rest}


@dataclass(frozen=True, slots=True)
class _Slow:
    """The rank that the last line named, since when it is slow, and when the line was written."""

    rank: int
    phase: str | None
    since_s: float
    told_at_s: float


class _Company:
    """The ranks of one process set, and the readings that all of them have made at the same step."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        # By rank and step: readings of steps that not all ranks have read yet.
        self.by_rank: dict[int, dict[int, Reading]] = {}
        # Those of one step, of all ranks, and when the last arrived; the oldest is `WINDOW_S` old or a little more.
        self._common: deque[tuple[float, dict[int, Reading]]] = deque()
        self._best_s: dict[int, float] = {}
        self.paces: list[RankPace] = []

    @property
    def covered_s(self) -> float:
        return self._common[-1][0] - self._common[0][0] if self._common else 0.0

    def remove(self, rank: int) -> None:
        """Forgets a rank that steps with others from now on."""
        if self.by_rank.pop(rank, None) is not None:
            self._common.clear()
            self.paces = []

    def add(self, rank: int, reading: Reading, now_s: float) -> bool:
        """Adds a reading; returns whether `paces` is new."""
        if rank not in self.by_rank:
            self._common.clear()
        readings, step = self.by_rank.setdefault(rank, {}), reading.steps
        readings[step] = reading
        if len(readings) > _MOST_READINGS:
            del readings[min(readings)]
        if len(self.by_rank) < 2 or not all(step in each for each in self.by_rank.values()):
            return False
        newest = {other: each[step] for other, each in self.by_rank.items()}
        for each in self.by_rank.values():
            for older in [number for number in each if number <= step]:
                del each[older]
        self._common.append((now_s, newest))
        while (len(self._common) > 2 and now_s - self._common[1][0] >= WINDOW_S) or len(self._common) > _MOST_READINGS:
            self._common.popleft()
        if len(self._common) < 2:
            return False
        paces = paces_between(self._common[0][1], newest, self._hosts)
        self.paces = [self._with_own_score(each) for each in paces]
        return True

    def _with_own_score(self, pace: RankPace) -> RankPace:
        busy_s = sum(pace.seconds.values())
        if self.covered_s >= _BEST_S:
            self._best_s[pace.rank] = min(busy_s, self._best_s.get(pace.rank, busy_s))
        best_s = self._best_s.get(pace.rank, busy_s)
        return replace(pace, own_score=_score(best_s, busy_s))

    def is_mostly_slow(self, rank: int, threshold: float) -> bool:
        """Whether this rank has cost more than the threshold in most of the time: not in a few long steps alone."""
        slow_s = 0.0
        for (began_s, older), (ended_s, newer) in pairwise(self._common):
            paces = paces_between(older, newer, self._hosts)
            if any(each.rank == rank and each.cost > threshold for each in paces):
                slow_s += ended_s - began_s
        return slow_s >= self.covered_s / 2


class StragglerWatch:
    """Compares the readings of all ranks, and warns of one that holds up the others."""

    def __init__(
        self, hosts: Sequence[str], threshold: float | None, time_of_day: Callable[[], float] = time.time
    ) -> None:
        """``threshold``: lines are about a larger `RankPace.cost`; None: no lines."""
        self._hosts = hosts
        self._threshold = threshold
        self._time_of_day = time_of_day
        self._companies: dict[int, _Company] = {}
        self._slow: dict[int, _Slow] = {}
        self.warnings: list[str] = []
        self.remarks: list[str] = []

    def add(self, rank: int, reading: Reading, now_s: float) -> bool:
        """Adds a rank's reading; returns whether `paces` has changed."""
        for set_id, company in list(self._companies.items()):
            if set_id != reading.set_id:
                company.remove(rank)
                if not company.by_rank:
                    del self._companies[set_id]
        company = self._companies.setdefault(reading.set_id, _Company(self._hosts))
        is_new = company.add(rank, reading, now_s)
        if is_new and self._threshold is not None:
            self._judge(reading.set_id, company, self._threshold, now_s)
        return is_new

    def paces(self) -> list[RankPace]:
        """Returns the paces of all ranks that take steps, by rank."""
        return sorted((pace for each in self._companies.values() for pace in each.paces), key=lambda pace: pace.rank)

    def _judge(self, set_id: int, company: _Company, threshold: float, now_s: float) -> None:
        slow = self._slow.get(set_id)
        worst = max(company.paces, key=lambda pace: pace.cost, default=None)
        if slow is not None and not any(pace.rank == slow.rank and pace.cost > threshold / 2 for pace in company.paces):
            del self._slow[set_id]
            self.remarks.append(
                f"straggler: {self._name(slow.rank)} no longer holds up the other ranks. It did for "
                f"{now_s - slow.since_s:.0f} s"
            )
            slow = None
        if worst is None or worst.cost <= threshold or company.covered_s < WINDOW_S:
            return
        if not company.is_mostly_slow(worst.rank, threshold):
            return
        since_s = now_s - company.covered_s
        if slow is not None and slow.rank == worst.rank:
            since_s = slow.since_s
            told_before_s = now_s - slow.told_at_s
            if told_before_s < (_AGAIN_S if slow.phase == worst.phase else WINDOW_S):
                return
        self._slow[set_id] = _Slow(worst.rank, worst.phase, since_s, now_s)
        self.warnings.append(self._words(worst, company.paces, now_s - since_s))

    def _words(self, pace: RankPace, paces: Sequence[RankPace], slow_s: float) -> str:
        assert pace.phase is not None, "it costs something"
        own_s = pace.seconds[pace.phase]
        usual_s = _median([each.seconds[pace.phase] for each in paces if each.rank != pace.rank])
        since = time.strftime("%H:%M:%S", time.localtime(self._time_of_day() - slow_s))
        return (
            f"straggler: {self._name(pace.rank)} holds up the other ranks since {since} ({slow_s:.0f} s): it costs "
            f"{pace.cost:.0%} of each step. It takes longest in {pace.phase}: {_short(own_s)} per step, and the other "
            f"ranks {_short(usual_s)}. hvd.stragglers() has the times of all ranks; HVDLITE_STRAGGLER_WARNING=0 turns "
            "these lines off"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})"


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
