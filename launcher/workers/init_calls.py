"""Tracks which workers have called hvd.init(), which waits for all of them, and names those that are missing.

Called by `first_failure`. All ranks must be connected within the start timeout. It begins at the first call of
hvd.init() by any rank, since before that nobody knows whether the program will call it. It begins anew when the call
of one rank raises an exception while others wait: they do not know of it, and its program may try again or go on
alone. Once all have been connected, later calls have no timeout here: the program decides how long they may wait.
"""

from __future__ import annotations

from collections import Counter
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
        self._were_connected = False
        self._calls: Counter[int] = Counter()  # of hvd.init(), by the worker's number
        self._gave_up: set[int] = set()  # the workers whose last hvd.init() has raised an exception
        self._connected: set[int] = set()  # the workers whose last hvd.init() has succeeded

    def note(self, event: InitStarted | InitDone | InitFailed) -> None:
        """Records what a worker's hvd.init() does."""
        worker = event.worker
        self._gave_up.discard(worker)
        self._connected.discard(worker)
        match event:
            case InitStarted():
                self._calls[worker] += 1
                if self._late_at is None:
                    self._begin_timeout()
            case InitFailed():
                self._gave_up.add(worker)
                self._late_at = None
                if self._waiting():
                    self._begin_timeout()
            case InitDone():
                self._connected.add(worker)
                if len(self._connected) == len(self._workers):
                    self._late_at, self._were_connected = None, True

    def _begin_timeout(self) -> None:
        if not self._were_connected:
            self._late_at = self._clock() + self._start_timeout_s

    def _waiting(self) -> set[int]:
        return self._calls.keys() - self._connected - self._gave_up

    def time_left_s(self) -> float | None:
        """Returns the seconds until the start timeout; None if it does not apply now."""
        return None if self._late_at is None else self._late_at - self._clock()

    def timeout_message(self) -> str:
        """Ends the timeout and returns a message that names the ranks for which the others wait."""
        self._late_at = None
        within = f"within {self._start_timeout_s:g} s (--start-timeout)"
        of_first = f"{within} of the first rank that did"
        waiting = self._waiting()
        waits = f"{self._ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} there"
        if absent := self._workers.keys() - self._calls.keys():
            return f"{self._named(absent)} did not call hvd.init() {of_first}; {waits}"
        if self._gave_up:
            return (
                f"{self._named(self._gave_up)} left hvd.init() with an exception, and did not call it again {within}; "
                f"{waits}"
            )
        return (
            f"{self._named(waiting)} called hvd.init(), but did not connect to all other ranks {of_first}: does a "
            "firewall block them, or is it the wrong network? hvdlite-run --check shows that, and --network-interface "
            "chooses another"
        )

    def missing_message(self, running: Collection[int], done: Collection[int]) -> str | None:
        """Returns a message if ``running`` ranks wait in hvd.init() for ``done`` ones that cannot come; or None."""
        waiting = self._waiting().intersection(running)
        if not waiting:
            return None
        last_call = max(self._calls[worker] for worker in waiting)
        # One that was connected by that same call came: the others are about to be.
        came = {worker for worker in self._connected if self._calls[worker] >= last_call}
        absent = set(done) - came
        if not absent:
            return None
        waits = f"{self._ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        if absent.intersection(self._calls):
            return (
                f"{self._ranks(absent)} ended with exit code 0 without a connection by the hvd.init() in which {waits}"
            )
        return f"{self._ranks(absent)} ended with exit code 0 without calling hvd.init(), in which {waits}"

    def _named(self, numbers: Collection[int]) -> str:
        slots = sorted((self._workers[number] for number in numbers), key=lambda slot: slot.rank)
        hosts = ", ".join(dict.fromkeys(slot.host.label for slot in slots))
        return f"{self._ranks(numbers)} on {hosts}"

    def _ranks(self, numbers: Collection[int]) -> str:
        return name_ranks([self._workers[number].rank for number in numbers])
