"""
`ShmWork`: the `torch.distributed.Work` of an operation under way, with a future.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Of two threads that ask for a work's future at once, both get the same one.
_making_a_future = threading.Lock()


class InBackground(Protocol):
    """Has a background thread carry on the queue's operations; a moment later, unless ``at_once``."""

    def __call__(self, *, at_once: bool) -> None: ...


class ShmWork(dist.Work):
    """Done when its tensors may be read; the failure, if there is one, is raised by `wait`."""

    def __init__(
        self,
        tensors: list[Tensor],
        carry_on: Callable[[ShmWork], None],
        in_background: InBackground,
        progress: Callable[[], str],
    ) -> None:
        """``carry_on`` returns when it is done; ``in_background`` has a thread see to that.

        ``progress`` says, for an error, what it is and which ranks it waits for.
        """
        super().__init__()
        self._tensors = tensors
        self._carry_on = carry_on
        self._in_background = in_background
        self._progress = progress
        self._future: torch.futures.Future[Any] | None = None
        # Taken, for ever, by who gives the future its result.
        self._telling = threading.Lock()
        self._is_seen_to = False
        # Of each thread that waits with a timeout.
        self._bells: list[threading.Event] = []
        self.is_done = False
        self.failure: BaseException | None = None

    def end(self, failure: BaseException | None = None) -> bool:
        """To be called once, by whoever carried it on; whether `tell` must be called afterwards."""
        self.failure = failure
        self.is_done = True
        # Read after the flag is set, as whoever waits adds his before the flag is read.
        for bell in self._bells:
            bell.set()
        return self._future is not None

    def tell(self) -> None:
        """Give the future its result, and so have its callbacks run, which may do anything: hold no lock."""
        # Twice at the same moment: by the thread that ends it, and by one that asks for the future just then.
        if self._future is None or not self._telling.acquire(blocking=False):
            return
        self._over.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the tensors may be read; raise what went wrong.

        If it is not done within ``timeout``, unless that is 0, a RuntimeError, as of torch's own; it goes on, and
        may be waited for again.
        """
        if not self.is_done:
            if timeout > timedelta(0):
                self._wait_for(timeout)
            else:
                self._carry_on(self)
        self._outcome()
        return True

    def _wait_for(self, timeout: timedelta) -> None:
        # By a thread in the background: who carries on himself cannot leave in the midst of it.
        bell = threading.Event()
        self._bells.append(bell)
        self._is_seen_to = True
        self._in_background(at_once=True)
        if not (self.is_done or bell.wait(timeout.total_seconds()) or self.is_done):
            raise RuntimeError(
                f"Operation timed out! It was not done within {timeout.total_seconds():g} s: {self._progress()}"
            )

    def is_completed(self) -> bool:
        """Whether it is done; it will be, even if nobody does anything but ask."""
        if not (self.is_done or self._is_seen_to):
            self._is_seen_to = True
            self._in_background(at_once=False)
        return self.is_done

    def is_success(self) -> bool:
        return self.is_done and self.failure is None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Done when this is, by a thread of the engine's if nobody waits."""
        if self._future is None:
            with _making_a_future:
                if self._future is None:
                    # What a callback raises is an error to C++ too; what `set_exception` is given is to DDP a result,
                    # of which it makes nothing.
                    self._over = torch.futures.Future[None]()
                    self._future = self._over.then(lambda _: self._outcome())
            if self.is_done:
                self.tell()
            else:
                self._is_seen_to = True
                self._in_background(at_once=True)
        return self._future

    def _outcome(self) -> list[Tensor]:
        if self.failure is not None:
            raise self.failure
        return self._tensors
