"""Who has called hvd.init(), which waits for all: what is known of each rank, and what follows. No decisions."""

from __future__ import annotations

from collections.abc import Collection

from .messages import Joined, Joining
from .report import name_ranks


class Attendance:
    def __init__(self) -> None:
        self.begun: set[int] = set()
        """Ranks that have ever called it."""
        self.connected: set[int] = set()
        """Those that have returned from their last call."""

    def note(self, event: Joining | Joined) -> None:
        self.begun.add(event.rank)
        if isinstance(event, Joined):
            self.connected.add(event.rank)
        else:
            self.connected.discard(event.rank)

    def missed(self, running: Collection[int], done: Collection[int]) -> str | None:
        """Why ranks that are ``running`` wait for ever: others are ``done`` and never came. None if they do not."""
        waiting = (self.begun - self.connected).intersection(running)
        absent = set(done) - self.begun
        if not waiting or not absent:
            return None
        waits = f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        return f"{name_ranks(absent)} ended with exit code 0 without calling hvd.init(), in which {waits}"
