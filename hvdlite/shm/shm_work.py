"""
`ShmWork`: an operation in progress, as a `torch.distributed.Work` with a future.

`shm_engine` makes one for each call. Its waits carry on the operation through `queue`, which calls `end` and
`run_callbacks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import forks
from .shm_operation import ShmOperation

# Held to make a future, so that two threads that ask at once get the same one.
_making_a_future = forks.lock_of_process()


class ShmWork(dist.Work):
    """An operation in progress. It is done when its tensors may be read; `wait` raises its failure, if any."""

    def __init__(
        self,
        tensors: list[Tensor],
        carry_on: Callable[[ShmWork], None],
        in_background: Callable[..., None],
        operation: ShmOperation,
    ) -> None:
        """``carry_on`` returns once the operation is done.

        ``in_background`` has a thread carry out the queue, after a moment unless it is called with ``at_once=True``.
        """
        super().__init__()
        self._tensors = tensors
        self._carry_on = carry_on
        self._in_background = in_background
        self._operation = operation
        self._future: torch.futures.Future[Any] | None = None
        # Acquired, and never released, by the thread that sets the future's result.
        self._running_callbacks = threading.Lock()
        self._is_seen_to = False
        # One event for each thread that waits with a timeout.
        self._bells: list[threading.Event] = []
        self.is_done = False
        self.failure: BaseException | None = None

    def end(self, failure: BaseException | None = None) -> bool:
        """Mark it done. The thread that carried it on calls this once, and then `run_callbacks` if it returns True."""
        self.failure = failure
        self.is_done = True
        # Read the list only after setting the flag: a waiting thread adds its event before it reads the flag.
        for bell in self._bells:
            bell.set()
        return self._future is not None

    def run_callbacks(self) -> None:
        """Set the future's result, which runs its callbacks. These may do anything, so the caller must hold no lock."""
        # Two threads may call this at once: the one that ends the work, and one that asks for the future just then.
        if self._future is None or not self._running_callbacks.acquire(blocking=False):
            return
        self._over.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the tensors may be read, or raise what went wrong.

        If it is not done within ``timeout``, unless that is 0, it raises a RuntimeError like torch's. The operation
        continues, and may be waited for again.
        """
        if not self.is_done:
            if timeout > timedelta(0):
                self._wait_for(timeout)
            else:
                self._carry_on(self)
        self._outcome()
        return True

    def _wait_for(self, timeout: timedelta) -> None:
        # The background thread carries it on: a thread that does so itself cannot stop in the middle.
        bell = threading.Event()
        self._bells.append(bell)
        self._is_seen_to = True
        self._in_background(at_once=True)
        if not (self.is_done or bell.wait(timeout.total_seconds()) or self.is_done):
            within = f"It was not done within {timeout.total_seconds():g} s"
            raise RuntimeError(f"Operation timed out! {within}: {self._operation.progress()}")

    def not_begun(self) -> list[int]:
        """Returns the other ranks that have not begun it, or an operation before it. It does not block."""
        return self._operation.not_begun()

    def is_completed(self) -> bool:
        """Whether it is done. It will be done even if the program only asks."""
        if not (self.is_done or self._is_seen_to):
            self._is_seen_to = True
            self._in_background(at_once=False)
        return self.is_done

    def is_success(self) -> bool:
        return self.is_done and self.failure is None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future that is done when this is; a thread of the engine completes it if no thread waits."""
        if self._future is None:
            with _making_a_future:
                if self._future is None:
                    # A `then` that raises makes the future fail in C++, too; DDP would take the argument of
                    # `set_exception` for a result, and ignore it.
                    self._over = torch.futures.Future[None]()
                    self._future = self._over.then(lambda _: self._outcome())
            if self.is_done:
                self.run_callbacks()
            else:
                self._is_seen_to = True
                self._in_background(at_once=True)
        return self._future

    def _outcome(self) -> list[Tensor]:
        if self.failure is not None:
            raise self.failure
        return self._tensors
