"""
`Retry`: how often the same ranks of an elastic job may fail, before the error is raised.

    ranks fail ── failed(...) ── they may try again ── progress: begin_anew
                                                    └─ ranks were lost or added: the count begins anew by itself

A worker that dies over and over is lost, or replaced by a new one, each time. So it never uses up the tries of the
others. These do so only if they fail together without a loss, where another try would end alike.
"""

from __future__ import annotations


class Retry:
    """The tries that the same ranks have left, at a step, a world or a commit."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._failures = 0
        self._size = 0

    def failed(self, size: int, newcomers: int) -> bool:
        """Counts a failure of ``size`` ranks, ``newcomers`` of them in their first world. Returns if they may go on."""
        if newcomers or size != self._size:
            self._failures = 0
        self._size = size
        self._failures += 1
        return self._failures < self._tries

    def begin_anew(self) -> None:
        """Gives the ranks all tries again, since they have made progress."""
        self._failures = 0
