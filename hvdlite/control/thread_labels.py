"""
Names the thread that calls an operation, by a label that is the same on all ranks.

Operations without a name of the user's pair up in the order of their calls. That is no order where several threads of a
rank call them; so each says who calls, and whether that can be doubted, and `negotiation` refuses what does not fit.

    the thread's name ── without its number ── label         "Thread-3 (serve)" ── "Thread (serve)"
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

_NUMBER = re.compile(r"[-_]?\d+")
# For all threads that Python has not made, as autograd's of a GPU: they come and go unseen, and are one caller.
_FOREIGN = threading.Thread(name="autograd")
# Those of hvdlite call no operations for themselves.
_OWN_PREFIX = "hvdlite"


@dataclass(frozen=True, slots=True)
class CallingThread:
    """A thread that calls an operation without a name.

    ``has_rivals``: two threads that lived at a time have called such operations. ``has_twins``: one that had, or might,
    had the same label, so that threads are told apart by their whole names. ``others``: labels of threads that live
    beside it when it calls for the first time.
    """

    label: str
    name: str
    has_rivals: bool = False
    has_twins: bool = False
    others: Sequence[str] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether this rank may have meant the operation of another thread."""
        return self.has_rivals or self.has_twins or bool(self.others)

    def pack(self) -> list[Any]:
        """For a message. Short where nothing can be doubted."""
        if not self.is_doubtful:
            return [self.label, self.name]
        return [self.label, self.name, self.has_rivals, self.has_twins, list(self.others)]

    def may_be(self, other: CallingThread) -> bool:
        """Whether it is the other rank's thread of the same part, as far as one can tell."""
        if self.name == other.name:
            return True
        has_twins = self.has_twins or other.has_twins
        if self.label == other.label and not has_twins:
            return True
        # Another one. Where each rank has but this, it is theirs.
        return not (
            has_twins or self.has_rivals or other.has_rivals or other.label in self.others or self.label in other.others
        )


@dataclass(slots=True)
class _Seen:
    """Who has called operations that pair up with each other.

    Rivals and twins are remembered when they have ended: where an error ends one thread on each rank, it may be another
    one on each, and those that remain are not to be taken for each other.
    """

    threads: dict[int, threading.Thread] = field(default_factory=dict)
    had_rivals: bool = False
    # Labels of threads that lived beside one that called for the first time.
    beside: set[str] = field(default_factory=set)
    # Labels, and whole names, that two living threads have had at a time.
    twins: set[str] = field(default_factory=set)
    namesakes: set[str] = field(default_factory=set)


class ThreadLabels:
    """The threads of this process that have called operations without a name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Hashable, _Seen] = {}

    def of_call(self, key: Hashable) -> CallingThread:
        """The current thread, which calls an operation that pairs up with others of this key."""
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
                # Not even their names tell them apart: on no rank is it known which of them is meant.
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
