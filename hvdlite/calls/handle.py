"""
`Handle`: the caller's reference to an asynchronous operation; it also serves as a number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .. import forks
from ..errors import describe_interrupt
from ..outside_graphs import keep_outside_graphs

_numbers = itertools.count(1)


# Waits shorter than this are not reported to rank 0.
_PATIENCE_S = 0.5


class Handle(int):
    """An operation in progress. As in Horovod it is also a number, unique in this process; no table is kept by it."""

    def __new__(cls, what: str) -> Handle:
        return super().__new__(cls, next(_numbers))

    def __init__(self, what: str) -> None:
        self.what = what
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        # Entered during waits longer than `_PATIENCE_S`, so that rank 0 can find ranks that wait for each other.
        self.while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        # Entered during every wait: `StepClock.waiting`.
        self.timed: Callable[[], AbstractContextManager[None]] = nullcontext
        # The ranks that it waits for, in words, as of rank 0's last report; empty where unknown.
        self.waits_for: Callable[[], str] = str
        # Called before the result is taken: makes the calling thread's CUDA stream wait for the one that computes it.
        self.before_taking: Callable[[], None] | None = None

    def succeed(self, result: Any) -> None:
        self._result = result
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ended.set()

    def is_ended(self) -> bool:
        return self._ended.is_set()

    def has_succeeded(self) -> bool:
        return self._ended.is_set() and self._error is None

    def refuse_in_child(self) -> None:
        """Raises a NotInitializedError in a forked child if the operation had not ended before: it never will there."""
        if not self._ended.is_set():
            forks.require_rank(self.what)

    def wait(self) -> Any:
        """Blocks, without using the CPU, until the operation ends; returns its result, also when called repeatedly.

        Raises the operation's error if it failed.
        """
        try:
            if not self._ended.is_set():
                self.refuse_in_child()
                with self.timed():
                    if not self._ended.wait(_PATIENCE_S):
                        with self.while_waiting():
                            self._ended.wait()
        except KeyboardInterrupt as interrupt:
            describe_interrupt(interrupt, self.what, self.waits_for())
            raise
        if self._error is not None:
            raise self._error
        if self.before_taking is not None:
            self.before_taking()
        return self._result

    def __call__(self) -> Any:
        """Waits, since Horovod's `sparse_allreduce_async` returns a callable."""
        return self.wait()

    def ended_within(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def __repr__(self) -> str:
        return f"<Handle {int(self)} of {self.what}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"a handle ({self.what}) cannot be pickled: call hvd.synchronize() in the process that has it")


keep_outside_graphs(globals())
