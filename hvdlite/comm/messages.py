"""
`Messages`: has each rank of a gloo group send its parts to the others while it receives theirs, at the full rate.

    Messages.swap ── receives, then sends ── a queue for each other rank, and a thread that waits ── Swap (a work)

`torch_engine` sends all-to-alls of CPU tensors in this way, and larger all-gathers of two ranks. In gloo's own the two
directions of a connection take turns, so that they have half the rate of the link: a rank sends first, and what tells
the other that this one is ready to receive then comes after all of its data. Here the receives are first.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# The tags of messages. A program's own on the default process group, and those of `gloo_sockets`, have small ones.
_FIRST_TAG, _TAGS = 2**30, 2**30

# c10d's message when a wait times out before the operation is complete.
NOT_DONE_YET = "Operation timed out!"

# Groups of more ranks use gloo's all-to-all, for which no threads wait.
MOST_RANKS = 16


class Swap:
    """The messages of one swap in progress, with the methods of a work of c10d. Any number of threads may wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The number of `end_part` to come, once it is known.
        self._left = 0
        self._failure: RuntimeError | None = None
        # Whether all parts have ended, or one has failed.
        self._is_over = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def expect(self, parts: int) -> None:
        """Says how often `end_part` will be called, before the first time."""
        self._left = parts

    def end_part(self, failure: RuntimeError | None) -> None:
        """Ends a part, with an error or without. The first error ends the waits."""
        with self._lock:
            self._left -= 1
            is_first = self._failure is None
            if is_first:
                self._failure = failure
        if is_first and failure is not None:
            self._is_over.set()
            self._future.set_exception(failure)
        elif is_first and self._left == 0:
            self._is_over.set()
            self._future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until it is over, or raises its error; a RuntimeError of `NOT_DONE_YET` after ``timeout``."""
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(NOT_DONE_YET)
        if self._failure is not None:
            raise self._failure
        return True

    def is_completed(self) -> bool:
        """Whether gloo uses no tensor any more, which may be later than an error."""
        return self._left == 0

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Messages:
    """Swaps parts between the ranks of one gloo group. All ranks must begin their swaps in the same order.

    A message of gloo has no future, and if a wait for one times out, gloo closes all connections: so only a thread can
    wait for it, while others look whether the wait is in vain. It is a thread for each other rank, since a lost one
    must be noticed while another one is late.
    """

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group
        self._begun = itertools.count()
        self._queues: dict[int, SimpleQueue[_Part | None]] = {}

    def swap(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Swap:
        """Sends each rank its tensor of ``sent``, and receives one of each rank in ``received``; returns at once.

        Both are in rank order, contiguous and on the CPU. What one rank sends has the size of what the other receives;
        no message is sent for no elements. This rank's own is copied.
        """
        group, swap = self._process_group, Swap()
        gloo: Any = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
        own, size = gloo.rank(), gloo.size()
        # Each swap has a tag of its own, so that its messages cannot be taken for those of another one in progress.
        tag = _FIRST_TAG + next(self._begun) % _TAGS
        # In inference mode, since its tensors may be changed in no other, and others in any.
        with torch.inference_mode():
            received[own].copy_(sent[own])
        # Each rank begins with another one, so that not all send to the same.
        others = [(own + distance) % size for distance in range(1, size)]
        posted: dict[int, list[Any]] = {other: [] for other in others}
        failure = None
        try:
            for other in reversed(others):
                if received[other].numel():
                    posted[other].append(gloo.recv([received[other]], other, tag))
            for other in others:
                if sent[other].numel():
                    posted[other].append(gloo.send([sent[other]], other, tag))
        except RuntimeError as error:
            # As from gloo's collectives, it comes out of the wait.
            failure = error
        # The timeout is not left to gloo, which would take that of connecting.
        parts = {other: _Part(swap, works, gloo.options._timeout) for other, works in posted.items() if works}
        swap.expect(len(parts) + 1)
        for other, part in parts.items():
            self._queue_of(other).put(part)
        swap.end_part(failure)
        return swap

    def _queue_of(self, other: int) -> SimpleQueue[_Part | None]:
        queue = self._queues.get(other)
        if queue is None:
            queue = self._queues[other] = SimpleQueue()
            # The thread knows the queue alone, so that it keeps no engine.
            threading.Thread(target=_wait_for_all, args=(queue,), daemon=True, name="hvdlite-messages").start()
            weakref.finalize(self, queue.put, None).atexit = False
        return queue


class _Part(NamedTuple):
    """The messages of a swap with one rank: works of c10d, which keep their tensors."""

    swap: Swap
    works: list[Any]
    timeout: timedelta

    def wait(self) -> None:
        failure = None
        try:
            for work in self.works:
                work.wait(self.timeout)
        except RuntimeError as error:
            failure = error
        # With its work gloo forgets a message, in the destructor, which waits while gloo reads or writes the tensor.
        self.works.clear()
        self.swap.end_part(failure)


def _wait_for_all(queue: SimpleQueue[_Part | None]) -> None:
    while (part := queue.get()) is not None:
        part.wait()
        # The variable would keep its tensors until the next one comes.
        del part
