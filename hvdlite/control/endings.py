"""
Finds the rank that ended first, and those that ended because of it; rules without a connection, thread or clock.

    lost (rank)  ── it has met an error that another rank's end is the cause of; it is likely to end too
    ended (rank) ── told at once where nothing was lost before; else once the cause is known, or has not shown itself

A rank says that it has lost another before it can end of that. So whoever ends without a word was the first, in
whatever order the ends of several come to be known.
"""

from __future__ import annotations

# How long an end that is likely to follow from another waits for that to be known.
HELD_S = 2.0

End = tuple[int, bool]  # the rank, and whether it has left by itself


class Endings:
    """The ends of ranks, in the order in which they are to be told."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._held: dict[int, tuple[bool, float]] = {}
        self._first_is_told = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen by the mere passing of time."""
        return not self._held

    def lost(self, rank: int) -> None:
        """``rank`` has lost another one."""
        self._lost.add(rank)

    def ended(self, rank: int, by_itself: bool, now_s: float) -> list[End]:
        """``rank`` takes part in nothing any more; the ends to be told now."""
        if rank in self._lost and not self._first_is_told:
            self._held.setdefault(rank, (by_itself, now_s))
            return []
        self._first_is_told = True
        return [(rank, by_itself), *self._release(now_s, 0.0)]

    def due(self, now_s: float) -> list[End]:
        """Those that have waited for long enough."""
        return self._release(now_s, HELD_S)

    def _release(self, now_s: float, least_s: float) -> list[End]:
        released = [rank for rank, (_, since_s) in self._held.items() if now_s - since_s >= least_s]
        self._first_is_told |= bool(released)
        return [(rank, self._held.pop(rank)[0]) for rank in released]
