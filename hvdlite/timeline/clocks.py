"""
Measures the difference between the clocks of a group's ranks.

The ranks all-gather their times, a few rounds. The shortest interval between two ranks, in each direction, bounds the
difference of their clocks. `session` calls it at the start and end of a timeline.

On one host all processes read the same clock. Between hosts `time.monotonic_ns` has arbitrary origins.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..comm.group import Group

_ROUNDS = 10


def clock_ahead_ns(group: Group, what: str, now_ns: Callable[[], int] = time.monotonic_ns) -> int:
    """Returns how far this rank's clock is ahead of the clock of the group's first rank.

    It is 0 if the measurement allows that. Every rank must call it. The error is at most half of a round trip.
    """
    # shortest[i] is the shortest time from sending on rank i, by its clock, to receiving here, by ours. It is the
    # difference between the clocks plus the transfer time.
    shortest: list[int] = []
    for _ in range(_ROUNDS):
        sent = group.all_gather_json(now_ns(), what)
        received = now_ns()
        took = [received - time_ns for time_ns in sent]
        shortest = [min(pair) for pair in zip(shortest or took, took, strict=True)]
    of_all = group.all_gather_json(shortest, what)
    return between(-of_all[0][group.rank], of_all[group.rank][0])


def between(at_least: int, at_most: int) -> int:
    """Returns 0 if it is in the range, else the middle."""
    return 0 if at_least <= 0 <= at_most else (at_least + at_most) // 2
