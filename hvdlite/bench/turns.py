"""
Turns: what is compared runs block by block in one process, so that whatever else the machine does befalls all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from .progress import Progress
from .ranks import Ranks

Samples = dict[str, list[float]]


def timed(ranks: Ranks, action: Callable[[], object], repeats: int = 1) -> float:
    """The seconds of an action on this rank, in the mean of so many, with the device's part of it."""
    begun = time.perf_counter()
    for _ in range(repeats):
        action()
    ranks.synchronize()
    return (time.perf_counter() - begun) / repeats


def take_turns(
    ranks: Ranks, blocks: Mapping[str, Callable[[], float]], rounds: int, samples: Samples, progress: Progress
) -> None:
    """Have each block run once a round, and add what it took on the slowest rank to its ``samples``.

    All ranks must call it with the same blocks; they begin each together. No block always follows the same other.
    """
    names = list(blocks)
    for number in range(rounds):
        start = number % len(names)
        order = names[start:] + names[:start]
        for name in order if number % 2 == 0 else reversed(order):
            ranks.barrier()
            samples[name].append(ranks.slowest(blocks[name]()))
        progress.advance()
