"""Who has called hvd.init(), which waits for all: what is known of each rank, and what follows. No decisions.

The first time all are waited for no longer than the start may take, counted from when the first rank calls it: before,
nobody knows whether the program will. What a later call waits for is the program's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..wire.messages import GaveUp, Joined, Joining
from .report import name_ranks


class InitCalls:
    def __init__(self, hosts: Mapping[int, str], start_timeout_s: float, clock: Callable[[], float]) -> None:
        """``hosts`` are the names of all ranks' hosts."""
        self._hosts = hosts
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._late_at: float | None = None
        self._gave_up: set[int] = set()
        self.begun: set[int] = set()
        """Ranks that have ever called it."""
        self.connected: set[int] = set()
        """Those that have returned from their last call."""

    def note(self, event: Joining | Joined | GaveUp) -> None:
        if not self.begun:
            self._late_at = self._clock() + self._start_timeout_s
        self.begun.add(event.rank)
        # Its program knows, and decides what follows.
        if isinstance(event, GaveUp):
            self._gave_up.add(event.rank)
            self._late_at = None
            return
        self._gave_up.discard(event.rank)
        if isinstance(event, Joined):
            self.connected.add(event.rank)
        else:
            self.connected.discard(event.rank)
        if len(self.connected) == len(self._hosts):
            self._late_at = None

    def time_left_s(self) -> float | None:
        """How long those that are not connected may still take; None if nobody counts."""
        return None if self._late_at is None else self._late_at - self._clock()

    def late(self) -> str:
        """Once no time is left: who keeps the others waiting."""
        self._late_at = None
        within = f"within {self._start_timeout_s:g} s (--start-timeout) of the first that did"
        if absent := self._hosts.keys() - self.begun:
            waits = f"{name_ranks(self.begun)} {'waits' if len(self.begun) == 1 else 'wait'} there"
            return f"{self._named(absent)} did not call hvd.init() {within}; {waits}"
        waiting = self._hosts.keys() - self.connected
        return (
            f"{self._named(waiting)} called hvd.init(), but were not connected to all others {within}: is a firewall "
            "between the hosts, or is it the wrong network? See hvdlite-run --check, and --network-interface"
        )

    def missed(self, running: Collection[int], done: Collection[int]) -> str | None:
        """Why ranks that are ``running`` wait for ever: others are ``done`` and never came. None if they do not."""
        waiting = (self.begun - self.connected - self._gave_up).intersection(running)
        absent = set(done) - self.begun
        if not waiting or not absent:
            return None
        waits = f"{name_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        return f"{name_ranks(absent)} ended with exit code 0 without calling hvd.init(), in which {waits}"

    def _named(self, ranks: Collection[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._hosts[rank] for rank in sorted(ranks)))
        return f"{name_ranks(ranks)} on {hosts}"
