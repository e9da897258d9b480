"""
`Handle`: an asynchronous operation, as its caller holds it; it also serves as a number where one is asked for.

    operation_async ── Handle ── poll, synchronize

Who finishes it is the controller; see `controller`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import say_where

_numbers = itertools.count(1)

# Most waits are over by then, and need not be told of.
_PATIENCE_S = 0.5


class Handle(int):
    """An operation under way. It is a number too, unlike any other handle's, as in Horovod; nothing is kept by it."""

    def __new__(cls, what: str) -> Handle:
        return super().__new__(cls, next(_numbers))

    def __init__(self, what: str) -> None:
        self.what = what
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        # Around a wait that takes more than a moment: so the ranks can tell who waits for whom.
        self.while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        # What the thread that takes the result does first: its stream waits for the one that the result is made on.
        self.before_taking: Callable[[], None] | None = None

    def succeed(self, result: Any) -> None:
        """The operation is done; whoever waits goes on."""
        self._result = result
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """The operation is over; whoever waits gets this error."""
        self._error = error
        self._ended.set()

    def is_ended(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

    def wait(self) -> Any:
        """Block until the operation is over, without burning a core; what it came to, as often as one asks."""
        try:
            if not self._ended.wait(_PATIENCE_S):
                with self.while_waiting():
                    self._ended.wait()
        except KeyboardInterrupt as interrupt:
            say_where(interrupt, self.what)
            raise
        if self._error is not None:
            raise self._error
        if self.before_taking is not None:
            self.before_taking()
        return self._result

    def __call__(self) -> Any:
        """The same as `wait`: Horovod's `sparse_allreduce_async` gives something to call."""
        return self.wait()

    def ended_within(self, timeout_s: float) -> bool:
        """Block until the operation is over, or for so long; whether it is."""
        return self._ended.wait(timeout_s)

    def __repr__(self) -> str:
        return f"<Handle {int(self)} of {self.what}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"a handle ({self.what}) means nothing in another process: synchronize it in this one")
