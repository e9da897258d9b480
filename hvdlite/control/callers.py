"""
Tracks which threads of this process call operations, and whether all of them are blocked.

    called ── a thread that may ask for more ── blocked_in ── all that live are: this rank asks for nothing else

Only a rank that asks for nothing else can be part of a circle of waiting ranks: while one thread waits, another may
still come with what the other ranks wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

_OWN_PREFIX = "hvdlite"


class Callers:
    """Tells of the operations (by ticket) that this rank is blocked in, once no thread of it can ask for others."""

    def __init__(self, tell: Callable[[int], None], beginners: Set[int] = frozenset()) -> None:
        """``tell`` is called with a ticket; ``beginners`` are the threads that begin collectives of an engine."""
        self._tell = tell
        self._beginners = beginners
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        # By thread: the ticket, and since when (`time.monotonic`).
        self._blocked: dict[int, tuple[int, float]] = {}
        self._told: set[int] = set()

    def called(self) -> None:
        """The current thread calls operations."""
        self._threads.add(threading.get_ident())

    @contextmanager
    def blocked_in(self, ticket: int) -> Iterator[None]:
        """The current thread waits for this operation, inside."""
        own = threading.get_ident()
        with self._lock:
            self._blocked[own] = (ticket, time.monotonic())
        self.look()
        try:
            yield
        finally:
            with self._lock:
                del self._blocked[own]
                self._told.discard(ticket)

    def look(self) -> None:
        """Tell what has not been told; now and then, since a thread that ends asks for nothing any more."""
        if not self._blocked:
            return
        alive = _living_threads()
        with self._lock:
            if not (self._threads | set(self._beginners)) & alive <= self._blocked.keys():
                return
            untold = {ticket for ticket, _ in self._blocked.values()} - self._told
            self._told |= untold
        for ticket in untold:
            self._tell(ticket)

    def tell_again(self) -> None:
        """Tell what has been told once more, at the next look."""
        with self._lock:
            self._told.clear()

    def blocked(self) -> list[tuple[int, float]]:
        """The operations that threads wait for, by ticket, and since when."""
        with self._lock:
            return list(self._blocked.values())

    def threads(self) -> frozenset[int]:
        """The idents of threads that have called operations; some may have ended."""
        return frozenset(self._threads)

    def can_ask(self, elsewhere: Set[int]) -> bool:
        """Whether a thread that calls operations, or begins collectives, is not blocked as ``elsewhere`` are.

        One that is blocked in an operation counts: it goes on when that is done, which says nothing of the others.
        """
        alive = _living_threads()
        with self._lock:
            self._threads &= alive
            return not (self._threads | (set(self._beginners) & alive)) <= elsewhere


def _living_threads() -> set[int | None]:
    """The idents of live threads, without hvdlite's own, which begin only what all ranks have agreed on."""
    return {thread.ident for thread in threading.enumerate() if not thread.name.startswith(_OWN_PREFIX)}
