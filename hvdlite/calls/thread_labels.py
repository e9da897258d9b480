"""
Identifies the thread that calls an operation, by a label that is the same on all ranks.

    the thread's name ── without its number ── label         "Thread-3 (serve)" ── "Thread (serve)"

Operations without a user's name pair up in the order of their calls. If several threads of a rank call them, that order
is not defined. So `control.requests` sends with each call which thread made it, and whether other threads might have.
`coordinator.negotiation` refuses calls whose threads do not match.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

_NUMBER = re.compile(r"[-_]?\d+")
# Represents all threads that Python has not made, such as autograd's for a GPU: Python does not see them start or end,
# so they count as one caller.
_FOREIGN = threading.Thread(name="autograd")
# hvdlite's own threads call no operations of their own.
_OWN_PREFIX = "hvdlite"


@dataclass(frozen=True, slots=True)
class CallingThread:
    """A thread that calls an operation without a name.

    ``has_rivals``: two threads that were alive at the same time have called such operations. ``has_twins``: another
    thread with the same label has called them, or may have; then full names are compared, not labels.
    ``others``: the labels of the other living threads at this thread's first call.
    """

    label: str
    name: str
    has_rivals: bool = False
    has_twins: bool = False
    others: tuple[str, ...] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether this rank may have meant the operation of another thread."""
        return self.has_rivals or self.has_twins or bool(self.others)

    def may_be(self, other: CallingThread) -> bool:
        """Whether it may have the same role as the other rank's thread."""
        if self.name == other.name:
            return True
        has_twins = self.has_twins or other.has_twins
        if self.label == other.label and not has_twins:
            return True
        # The labels differ. They still match if neither rank has another thread that could be meant.
        return not (
            has_twins or self.has_rivals or other.has_rivals or other.label in self.others or self.label in other.others
        )


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
    """The threads of this process that have called operations without a name."""

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
