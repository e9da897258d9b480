"""
Tracks which threads of this process call operations, and whether all of them are blocked.

    called: this thread may request more ── blocked_in (ticket) ── all living callers are blocked: `WaitsIn`, to rank 0

`requests` notes the calls, and `Handle.wait` the blocked threads. A rank can be part of a deadlock only if all its
calling threads are blocked: a thread that still runs may request the operation that the other ranks wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager

from ..calls.messages import WaitsIn
from .rank0_connection import Rank0Connection

_OWN_PREFIX = "hvdlite"


class Callers:
    """Reports the operations (by ticket) that this rank is blocked in, once all its calling threads are blocked."""

    def __init__(self, connection: Rank0Connection) -> None:
        self._connection = connection
        self._watch = connection.watch
        # The thread that called hvd.init() has begun collectives, but need not be one that trains.
        self._watch.beginners.clear()
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        # By thread: the ticket, and when it began to wait (`time.monotonic`).
        self._blocked: dict[int, tuple[int, float]] = {}
        self._reported: set[int] = set()

    def called(self) -> None:
        """Notes that the current thread calls operations."""
        self._threads.add(threading.get_ident())

    @contextmanager
    def blocked_in(self, ticket: int) -> Iterator[None]:
        """Marks the current thread as waiting for this operation while the context is open."""
        own = threading.get_ident()
        with self._lock:
            self._blocked[own] = (ticket, time.monotonic())
        self.look()
        try:
            yield
        finally:
            with self._lock:
                del self._blocked[own]
                self._reported.discard(ticket)

    def look(self) -> None:
        """Reports the tickets not yet reported, if all calling threads are blocked.

        Must also be called now and then, since a thread that ends no longer requests anything.
        """
        if not self._blocked:
            return
        alive = _living_threads()
        with self._lock:
            if not (self._threads | self._watch.beginners) & alive <= self._blocked.keys():
                return
            unreported = {ticket for ticket, _ in self._blocked.values()} - self._reported
            self._reported |= unreported
        for ticket in unreported:
            self._connection.say(WaitsIn(ticket, self._watch.begun.copy()))

    def report_again(self) -> None:
        """Forgets what has been reported, so that the next `look` reports every blocked operation again."""
        with self._lock:
            self._reported.clear()

    def blocked(self) -> list[tuple[int, float]]:
        """The operations that threads wait for, each as its ticket and when the wait began."""
        with self._lock:
            return list(self._blocked.values())

    def threads(self) -> frozenset[int]:
        """The idents of threads that have called operations; some may have ended."""
        return frozenset(self._threads)

    def can_ask(self, blocked_in_engine: Set[int]) -> bool:
        """Whether some living thread that calls operations, or begins collectives, is not among ``blocked_in_engine``.

        A thread that is blocked in an operation, and not in an engine, counts as able to request more: it continues
        when that operation ends.
        """
        called = self._threads.copy()
        alive = _living_threads()
        with self._lock:
            # A thread that has begun to call meanwhile is not among the living, and stays.
            self._threads -= called - alive
            return not (self._threads | (self._watch.beginners & alive)) <= blocked_in_engine


def _living_threads() -> set[int | None]:
    """The idents of living threads, without hvdlite's own, which begin only what all ranks have agreed on."""
    return {thread.ident for thread in threading.enumerate() if not thread.name.startswith(_OWN_PREFIX)}
