"""
Processes that a rank forks: each gets a copy of all that the rank has, and leaves the rank's part in the job to it.

    os.fork ── in the child: `leave_to_parent` of each object that `when_forked` knows ── its operations are refused

A child has its parent's memory, open files and exit handlers, and none of its threads but the one that forked. So what
has a connection, shared memory, a hook of autograd or a lock of several threads notes itself with `when_forked`.
Nothing is done in the parent, and nothing is checked per gradient.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from .errors import NotInitializedError


class Parent(NamedTuple):
    """The rank that a process was forked from."""

    rank: int
    pid: int


class Inherited(Protocol):
    """An object of which a forked child gets a copy."""

    def leave_to_parent(self) -> None:
        """Makes the copy harmless, and free of locks. Called in the child, before the fork returns there."""
        ...


parent: Parent | None = None
"""The rank that this process was forked from, or that its parent was; None if this process may be a rank itself."""

_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


_own_rank: Callable[[], Parent | None] = lambda: None  # noqa: E731


def when_forked(thing: Inherited) -> None:
    """Has ``thing.leave_to_parent()`` called in each forked child, as long as the object lives."""
    _inherited.add(thing)


def tell_own_rank(function: Callable[[], Parent | None]) -> None:
    """Sets the function that returns which rank this process is, None if it is none."""
    global _own_rank  # noqa: PLW0603 - `runtime.world`, which knows it, imports this module
    _own_rank = function


def become_rank() -> None:
    """Notes that this process, a child that has called `hvd.shutdown`, enters a world of its own."""
    global parent  # noqa: PLW0603 - of this process
    parent = None


def require_rank(what: str) -> None:
    """Raises a NotInitializedError in a forked child, which names ``what``."""
    if parent is not None:
        raise refusal(what)


def refusal(what: str) -> NotInitializedError:
    """Returns the error for ``what`` in a forked child."""
    return NotInitializedError(f"{what}: {description()}: call it in the rank's own process")


def description() -> str:
    """Says in words what this process is, a forked child."""
    rank = "a rank" if parent is None else f"rank {parent.rank} (pid {parent.pid})"
    return (
        f"this process (pid {os.getpid()}) is a forked child of {rank}, such as a worker of a DataLoader, and no rank "
        "itself"
    )


def keep_for_ever(*things: object) -> None:
    """Keeps objects from being destroyed in this process, even at its end.

    The destructors of gloo's and NCCL's groups join threads, which a forked child does not have.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def lock_of_process() -> threading.Lock:
    """Returns a lock for a module variable. It is free in a forked child, whichever thread held it at the fork."""
    lock = threading.Lock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # as the standard library does
    return lock


def _leave_to_parent() -> None:
    global parent  # noqa: PLW0603 - of this process
    parent = _own_rank() or parent
    # All are called even if one raises.
    with contextlib.ExitStack() as steps:
        for thing in list(_inherited):
            steps.callback(thing.leave_to_parent)


os.register_at_fork(after_in_child=_leave_to_parent)
