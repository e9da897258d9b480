"""Tracks which workers have called hvd.init(), which waits for all of them, and names those that are missing.

Called by `first_failure`. All ranks must be connected within the start timeout. It begins at the first call of
hvd.init() by any rank, since before that nobody knows whether the program will call it. Later calls have no timeout
here: the program decides how long they may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..plan.slots import Slot
from ..wire.messages import InitDone, InitFailed, InitStarted
from .failure_message import name_ranks


class InitCalls:
    """The workers that have called hvd.init(), and those that are connected."""

    def __init__(self, workers: Mapping[int, Slot], start_timeout_s: float, clock: Callable[[], float]) -> None:
        """``workers`` are all workers of the job, by their numbers."""
        self._workers = workers
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._late_at: float | None = None
        self._gave_up: set[int] = set()
        self.started: set[int] = set()
        """The numbers of the workers that have ever called hvd.init()."""
        self.connected: set[int] = set()
        """The numbers of the workers whose last hvd.init() has succeeded."""

    def note(self, event: InitStarted | InitDone | InitFailed) -> None:
        """Records what a worker's hvd.init() does."""
        if not self.started:
            self._late_at = self._clock() + self._start_timeout_s
        self.started.add(event.worker)
        # The worker's program gets the exception and decides what to do, so the timeout ends here.
        if isinstance(event, InitFailed):
            self._gave_up.add(event.worker)
            self._late_at = None
            return
        self._gave_up.discard(event.worker)
        if isinstance(event, InitDone):
            self.connected.add(event.worker)
        else:
            self.connected.discard(event.worker)
        if len(self.connected) == len(self._workers):
            self._late_at = None

    def time_left_s(self) -> float | None:
        """Returns the seconds until the start timeout; None if it does not apply now."""
        return None if self._late_at is None else self._late_at - self._clock()

    def timeout_message(self) -> str:
        """Ends the timeout and returns a message that names the ranks for which the others wait."""
        self._late_at = None
        within = f"within {self._start_timeout_s:g} s (--start-timeout) of the first rank that did"
        if absent := self._workers.keys() - self.started:
            waits = f"{self._ranks(self.started)} {'waits' if len(self.started) == 1 else 'wait'} there"
            return f"{self._named(absent)} did not call hvd.init() {within}; {waits}"
        waiting = self._workers.keys() - self.connected
        return (
            f"{self._named(waiting)} called hvd.init(), but did not connect to all other ranks {within}: does a "
            "firewall block them, or is it the wrong network? hvdlite-run --check shows that, and --network-interface "
            "chooses another"
        )

    def missing_message(self, running: Collection[int], done: Collection[int]) -> str | None:
        """Returns a message if ``running`` ranks wait in hvd.init() for ``done`` ones that never called it; or None."""
        waiting = (self.started - self.connected - self._gave_up).intersection(running)
        absent = set(done) - self.started
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
