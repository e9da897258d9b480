"""
Finds the rank that ended first, and the ranks that ended because of it.

    lost (rank)  ── an error there was caused by another rank's end; it is likely to end too
    ended (rank) ── reported at once if it had not sent "lost"; else once the first end is known, or after HELD_S

`negotiation` calls it; there is no connection, thread or clock here. A rank reports that it has lost another before it
can end because of that. So a rank that ends without such a report was the first, in whatever order the ends of several
ranks are noticed.
"""

from __future__ import annotations

# For how long the end of a rank that had sent "lost" is held back, so that the first rank to end can be found.
HELD_S = 2.0

End = tuple[int, bool]  # the rank, and whether it left in an orderly way


class Endings:
    """Holds the ends of ranks, and decides in which order they are reported."""

    def __init__(self) -> None:
        self._lost_another: set[int] = set()
        self._held: dict[int, tuple[bool, float]] = {}
        self._first_is_told = False

    @property
    def is_idle(self) -> bool:
        """Whether no end is held back, so that time alone changes nothing."""
        return not self._held

    def lost(self, rank: int) -> None:
        self._lost_another.add(rank)

    def ended(self, rank: int, ended_normally: bool, now_s: float) -> list[End]:
        """Notes that ``rank`` has ended; returns the ends to report now.

        ``ended_normally`` is False if it crashed.
        """
        if rank in self._lost_another and not self._first_is_told:
            self._held.setdefault(rank, (ended_normally, now_s))
            return []
        self._first_is_told = True
        return [(rank, ended_normally), *self._release(now_s, 0.0)]

    def due(self, now_s: float) -> list[End]:
        """Returns the ends that have been held back long enough."""
        return self._release(now_s, HELD_S)

    def _release(self, now_s: float, least_s: float) -> list[End]:
        released = [rank for rank, (_, since_s) in self._held.items() if now_s - since_s >= least_s]
        self._first_is_told |= bool(released)
        return [(rank, self._held.pop(rank)[0]) for rank in released]
