"""
What is told of many measurements of one thing: the median, and the quartiles around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Half of the ``count`` samples lie between ``low`` and ``high``."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread | None:
        """That of the samples; None where nothing has been measured yet."""
        if not samples:
            return None
        ordered = sorted(samples)
        return cls(_quantile(ordered, 0.5), _quantile(ordered, 0.25), _quantile(ordered, 0.75), len(ordered))


def ratio_of(numerator: Spread | None, denominator: Spread | None) -> float | None:
    """Of the medians; None where either was not measured, or took no time."""
    if numerator is None or denominator is None or denominator.median == 0:
        return None
    return numerator.median / denominator.median


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
