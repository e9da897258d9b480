"""
Tracks which threads of this process call operations, whether all of them are blocked, and which calls pair up.

    called: this thread may request more ── blocked_in (ticket) ── all living callers are blocked: `WaitsIn`, to rank 0
    the thread's name ── without its number ── label         "Thread-3 (serve)" ── "Thread (serve)"

A rank can be part of a deadlock only if all its calling threads are blocked: a thread that still runs may request the
operation that the other ranks wait for. Operations without a user's name pair up in the order of their calls, which
several threads of a rank do not have. So each such call is sent with its thread's label, which is the same on all
ranks, and with whether other threads might have made it; rank 0 refuses calls whose threads do not match.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Hashable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..calls.messages import CallingThread, WaitsIn
from .rank0_connection import Rank0Connection

_NUMBER = re.compile(r"[-_]?\d+")
# All threads that Python has not made, such as autograd's for a GPU, count as one: it does not see them start or end.
_FOREIGN = threading.Thread(name="autograd")
_OWN_PREFIX = "hvdlite"  # of hvdlite's own threads, which call no operations of their own


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
        """Reports tickets if all calling threads are blocked. Call it now and then: a thread that ends asks nothing."""
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
        with self._lock:
            self._reported.clear()

    def blocked(self) -> list[tuple[int, float]]:
        with self._lock:
            return list(self._blocked.values())

    def threads(self) -> frozenset[int]:
        return frozenset(self._threads)

    def can_ask(self, blocked_in_engine: Set[int]) -> bool:
        """Whether some living thread that calls operations, or begins collectives, is not among ``blocked_in_engine``.

        So a thread that is blocked in an operation alone counts: it continues when that ends.
        """
        called = self._threads.copy()
        alive = _living_threads()
        with self._lock:
            # A thread that has begun to call meanwhile is not among the living, and stays.
            self._threads -= called - alive
            return not (self._threads | (self._watch.beginners & alive)) <= blocked_in_engine


def _living_threads() -> set[int | None]:
    """The idents of living threads without hvdlite's own."""
    return {thread.ident for thread in threading.enumerate() if not thread.name.startswith(_OWN_PREFIX)}


@dataclass(slots=True)
class _Seen:
    """The threads that have called operations which pair up with each other.

    Rivals and twins are remembered after they end: an error may end a different thread on each rank, and those that
    remain must not be mistaken for each other.
    """

    threads: dict[int, threading.Thread] = field(default_factory=dict)
    had_rivals: bool = False
    # Labels of threads that were alive when another one called for the first time.
    beside: set[str] = field(default_factory=set)
    # Labels, and full names, that two threads have had at the same time.
    twins: set[str] = field(default_factory=set)
    namesakes: set[str] = field(default_factory=set)


class ThreadLabels:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Hashable, _Seen] = {}

    def of_call(self, key: Hashable) -> CallingThread:
        """Describes the current thread as an operation's caller; operations with equal ``key`` pair up."""
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):
            thread = _FOREIGN
        name, label = thread.name, _label_of(thread.name)
        with self._lock:
            seen = self._seen.setdefault(key, _Seen())
            callers = seen.threads
            is_first = callers.get(id(thread)) is not thread
            callers[id(thread)] = thread
            if not is_first and len(callers) == 1 and not seen.had_rivals and not seen.twins:
                return CallingThread(label, name)
            for gone in [number for number, other in callers.items() if not _lives(other)]:
                del callers[gone]
            rivals = [other.name for other in callers.values() if other is not thread]
            beside = names_beside(thread) if is_first else []
            labels = [_label_of(other) for other in [*rivals, *beside]]
            seen.had_rivals |= bool(rivals) or (is_first and label in seen.beside)
            seen.beside.update(map(_label_of, beside))
            if label in labels:
                seen.twins.add(label)
            if name in rivals or name in beside:
                seen.namesakes.add(name)
            if name in seen.namesakes:
                # Several threads have this full name, so the ident is added: it matches on no other rank.
                name = f"{name} ({threading.get_ident()})"
            others = tuple(dict.fromkeys(labels)) if is_first else ()
            return CallingThread(label, name, seen.had_rivals, label in seen.twins, others)


def _lives(thread: threading.Thread) -> bool:
    return thread is _FOREIGN or thread.is_alive()


@functools.cache
def _label_of(name: str) -> str:
    return _NUMBER.sub("", name)


def names_beside(thread: threading.Thread) -> list[str]:
    """The names of the other living threads of this rank that may call operations."""
    return [
        other.name
        for other in threading.enumerate()
        if other is not thread
        and not isinstance(other, threading._DummyThread)
        and not other.name.startswith(_OWN_PREFIX)
    ]
