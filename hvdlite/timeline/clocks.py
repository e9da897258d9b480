"""
Measures by how much the clocks of a group's ranks differ.

    all-gather of everyone's time, a few times ── how long each took at least to reach each ── where the truth must lie

On one host all processes read the same clock. Between hosts `time.monotonic_ns` begins anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..comm.group import Group

_ROUNDS = 10


def clock_ahead_ns(group: Group, what: str, now_ns: Callable[[], int] = time.monotonic_ns) -> int:
    """How far this rank's clock is ahead of that of the group's first rank; 0 if it cannot be told that it is not.

    Every rank must call it. The error is at most half of what a time takes from one to the other and back.
    """
    # shortest[i]: from sending on rank i, by its clock, to receiving here, by ours. The difference between the clocks
    # is in it, and the way, which takes some time.
    shortest: list[int] = []
    for _ in range(_ROUNDS):
        sent = group.all_gather_json(now_ns(), what)
        received = now_ns()
        took = [received - time_ns for time_ns in sent]
        shortest = [min(pair) for pair in zip(shortest or took, took, strict=True)]
    of_all = group.all_gather_json(shortest, what)
    return between(-of_all[0][group.rank], of_all[group.rank][0])


def between(at_least: int, at_most: int) -> int:
    """0 if that is possible, else the middle."""
    return 0 if at_least <= 0 <= at_most else (at_least + at_most) // 2
