"""
Checks about twice a second what this rank is blocked in, to tell rank 0, and whether rank 0 still answers.

    what threads are blocked in ── look ── "busy", "alive", for rank 0
    nothing comes from rank 0   ── look ── a warning, an end: rank 0 tells of all stalls but its own

Pure: time is what the caller says it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .stall import Blocked, StallRules

LOOK_S = 0.5
"""How often `look` is to be called, and how long a thread is blocked before it is told of."""

_MOST_TOLD = 16


@dataclass(frozen=True, slots=True)
class Silence:
    """Rank 0 has said nothing for so long, though it was asked."""

    lasted_s: float
    is_end: bool


class Heartbeat:
    """What one rank has told rank 0 of itself, and when it has heard of it."""

    def __init__(self, rules: StallRules) -> None:
        """``rules`` are rank 0's."""
        self._rules = rules
        self._told: list[Blocked] = []
        self._told_stuck = False
        self._told_count = 0
        # When rank 0 was asked for a sign of life that has not come, first and last; None while nothing is asked.
        self._unanswered_since_s: float | None = None
        self._looked_at_s: float | None = None
        self._warned_at_s: float | None = None

    def heard(self) -> None:
        """Something has come from rank 0."""
        self._unanswered_since_s = None
        self._warned_at_s = None

    def look(
        self,
        now_s: float,
        blocked: Sequence[Blocked],
        *,
        is_stuck: bool,
        is_waiting: bool,
        over_count: int,
        begun: Mapping[str, int] = MappingProxyType({}),
        size: int = 0,
    ) -> list[list[Any]]:
        """What is to be said to rank 0 now.

        ``blocked`` are the threads' waits of all lengths, ``is_waiting`` is whether there is anything, in a thread or
        not, that needs rank 0 or other ranks; ``over_count`` operations are over of those that were to be carried out.
        """
        if self._looked_at_s is not None and now_s - self._looked_at_s > 3 * LOOK_S:
            # It is this process that was stopped: whatever rank 0 has said meanwhile is still to be read.
            self._unanswered_since_s = None
        self._looked_at_s = now_s
        messages: list[list[Any]] = []
        told = sorted((each for each in blocked if now_s - each.since_s >= LOOK_S), key=lambda each: each.since_s)
        told = told[:_MOST_TOLD]
        # Only where rank 0 knows of all that this rank waits for.
        is_stuck = is_stuck and bool(told) and len(told) == len(blocked) and all(each.place for each in told)
        if told != self._told or is_stuck != self._told_stuck:
            self._told, self._told_stuck = told, is_stuck
            said = [
                [each.what, round(now_s - each.since_s, 3), each.is_operation, _pack(each.place, size)] for each in told
            ]
            messages.append(["busy", said, is_stuck, dict(begun)])
        if is_waiting or over_count != self._told_count:
            self._told_count = over_count
            messages.append(["alive", over_count])
            if self._unanswered_since_s is None:
                self._unanswered_since_s = now_s
        else:
            self._unanswered_since_s = None
        return messages

    def silence(self, now_s: float) -> Silence | None:
        """Rank 0's, if it is to be told of now, or to end this process."""
        limit_s = self._rules.warn_after_s
        if self._unanswered_since_s is None or limit_s is None:
            return None
        lasted_s = now_s - self._unanswered_since_s
        if self._rules.end_after_s is not None and lasted_s >= self._rules.end_after_s:
            return Silence(lasted_s, is_end=True)
        if lasted_s >= limit_s and (self._warned_at_s is None or now_s - self._warned_at_s >= limit_s):
            self._warned_at_s = now_s
            return Silence(lasted_s, is_end=False)
        return None


def _pack(place: tuple[str, int, tuple[int, ...]] | None, size: int) -> list[Any] | None:
    """For a message: short where all ranks take part."""
    if place is None:
        return None
    label, number, members = place
    return [label, number, None if len(members) == size else list(members)]
