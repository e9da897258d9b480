"""Keeps track of the workers that have called hvd.init(), which waits for all, and names those that are missing.

The first time all are waited for no longer than the start may take, counted from when the first rank calls it: before,
nobody knows whether the program will. What a later call waits for is the program's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..plan.slots import Slot
from ..wire.messages import GaveUp, Joined, Joining
from .failure_message import name_ranks


class InitCalls:
    def __init__(self, workers: Mapping[int, Slot], start_timeout_s: float, clock: Callable[[], float]) -> None:
        """``workers`` are all of the job's, by their numbers."""
        self._workers = workers
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._late_at: float | None = None
        self._gave_up: set[int] = set()
        self.begun: set[int] = set()
        """The numbers of those that have ever called it."""
        self.connected: set[int] = set()
        """Those that have returned from their last call."""

    def note(self, event: Joining | Joined | GaveUp) -> None:
        if not self.begun:
            self._late_at = self._clock() + self._start_timeout_s
        self.begun.add(event.worker)
        # Its program knows, and decides what follows.
        if isinstance(event, GaveUp):
            self._gave_up.add(event.worker)
            self._late_at = None
            return
        self._gave_up.discard(event.worker)
        if isinstance(event, Joined):
            self.connected.add(event.worker)
        else:
            self.connected.discard(event.worker)
        if len(self.connected) == len(self._workers):
            self._late_at = None

    def time_left_s(self) -> float | None:
        """How long those that are not connected may still take; None if nobody counts."""
        return None if self._late_at is None else self._late_at - self._clock()

    def late(self) -> str:
        """Once no time is left: who keeps the others waiting."""
        self._late_at = None
        within = f"within {self._start_timeout_s:g} s (--start-timeout) of the first that did"
        if absent := self._workers.keys() - self.begun:
            waits = f"{self._ranks(self.begun)} {'waits' if len(self.begun) == 1 else 'wait'} there"
            return f"{self._named(absent)} did not call hvd.init() {within}; {waits}"
        waiting = self._workers.keys() - self.connected
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
        waits = f"{self._ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        return f"{self._ranks(absent)} ended with exit code 0 without calling hvd.init(), in which {waits}"

    def _named(self, numbers: Collection[int]) -> str:
        slots = sorted((self._workers[number] for number in numbers), key=lambda slot: slot.rank)
        hosts = ", ".join(dict.fromkeys(slot.host.label for slot in slots))
        return f"{self._ranks(numbers)} on {hosts}"

    def _ranks(self, numbers: Collection[int]) -> str:
        return name_ranks([self._workers[number].rank for number in numbers])
