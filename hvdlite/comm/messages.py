"""
`Messages`: has each rank of a gloo group send tensors to the others while it receives theirs, at the full rate.

    Messages.swap ── the first receive, then all sends ── for each, a thread that waits ──┬── Swap (as works of c10d)
                  └─ a thread that receives from one rank after the other ────────────────┘

`torch_engine` sends all-to-alls of CPU tensors in this way, and larger all-gathers of two ranks. In gloo's own the two
directions of a connection take turns, so that they have half the rate of the link: a rank sends first, and what tells
the other that this one is ready to receive then comes after all of its data. Here the receive is first.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

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

    def __init__(self, waits: int, cut: Callable[[], None]) -> None:
        """It is over when it has `run` so many waits for messages, or one of them has failed.

        ``cut`` then ends the others, which would still read tensors that the program may change.
        """
        self._cut = cut
        self._lock = threading.Lock()
        self._left = waits
        # In words: an error would keep, by its traceback, what the threads have in their hands, and with it the group.
        self._failure: str | None = None
        self._is_over = threading.Event()
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def run(self, wait: Callable[[], object]) -> None:
        """Waits for a message, and notes how that has ended. The first error ends the waits of other threads."""
        failure = None
        try:
            wait()
        except RuntimeError as error:
            failure = str(error)
        except BaseException as error:  # noqa: BLE001 - raised by threads that wait
            failure = f"{type(error).__name__}: {error}"
        with self._lock:
            is_first_failure = failure is not None and self._failure is None
            if is_first_failure:
                self._failure = failure
        if is_first_failure:
            self._cut()
        with self._lock:
            self._left -= 1
            is_done = self._left == 0 and self._failure is None
        if is_first_failure or is_done:
            self._is_over.set()
        if is_first_failure:
            self._future.set_exception(RuntimeError(failure))
        elif is_done:
            self._future.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until it is over, or raises its error; a RuntimeError of `NOT_DONE_YET` after ``timeout``."""
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(NOT_DONE_YET)
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True

    def is_completed(self) -> bool:
        """Whether gloo uses no tensor any more, which may be later than an error."""
        return self._left == 0

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class Messages:
    """Swaps tensors between the ranks of one gloo group. All ranks must begin their swaps in the same order.

    If a wait for a message of gloo times out, gloo closes all connections: so only a thread can wait for it, while
    others look whether that is in vain. There is one for each other rank, since a lost one must be noticed while
    another one is late.

    Each rank receives from one other at a time, first from its left neighbour. Since gloo sends a message only when its
    receive has been posted, each also sends to one at a time: all at once would share the links unevenly.
    """

    def __init__(self, process_group: Any, cut: Callable[[], None] = lambda: None) -> None:
        """``cut`` ends all of the group's waits, here and on the other ranks."""
        self._process_group = process_group
        self._cut = cut
        self._begun = itertools.count()
        # By rank, what its thread does next: waits for what was sent to that rank. This rank's own thread receives.
        self._queues: dict[int, SimpleQueue[Callable[[], object] | None]] = {}

    def swap(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Swap:
        """Sends each rank its tensor of ``sent``, and receives one of each rank in ``received``; returns at once.

        Both are in rank order, contiguous and on the CPU. This rank's own is copied.
        """
        group = self._process_group
        gloo: Any = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
        own, size = gloo.rank(), gloo.size()
        others = [(own + distance) % size for distance in range(1, size)]
        # Before anything that the other ranks see: no thread may be left to start.
        queues = [self._queue_of(other) for other in (own, *others)]
        # Each swap has a tag of its own, so that its messages cannot be taken for those of another one in progress.
        tag = _FIRST_TAG + next(self._begun) % _TAGS
        # The timeout is not left to gloo, which would take that of connecting.
        timeout = gloo.options._timeout
        # In inference mode, since its tensors may be changed in no other, and others in any.
        with torch.inference_mode():
            received[own].copy_(sent[own])
        swap = Swap(size, self._cut)
        receives = [partial(gloo.recv, [received[other]], other, tag) for other in reversed(others)]
        try:
            # Before the sends.
            first = [_posted(receive, timeout) for receive in receives[:1]]
            waits = [_posted(partial(gloo.send, [sent[other]], other, tag), timeout) for other in others]
            waits.insert(0, partial(_receive, first, receives[1:], timeout))
            for queue, wait in zip(queues, waits, strict=True):
                queue.put(partial(swap.run, wait))
        except BaseException:
            # The other ranks would wait for what was not sent.
            self._cut()
            raise
        return swap

    def _queue_of(self, other: int) -> SimpleQueue[Callable[[], object] | None]:
        queue = self._queues.get(other)
        if queue is None:
            queue = SimpleQueue()
            # The thread knows the queue alone, so that it keeps no engine.
            threading.Thread(target=_run_all, args=(queue,), daemon=True, name="hvdlite-messages").start()
            self._queues[other] = queue
            weakref.finalize(self, queue.put, None).atexit = False
        return queue


def _posted(post: Callable[[], Any], timeout: timedelta) -> Callable[[], object]:
    """Posts a message, and returns what waits for it, and raises an error of either."""
    try:
        return partial(post().wait, timeout)
    except RuntimeError as error:
        return partial(_raise, error.with_traceback(None))


def _raise(error: RuntimeError) -> None:
    raise error


def _receive(first: Sequence[Callable[[], object]], others: Sequence[Callable[[], Any]], timeout: timedelta) -> None:
    for wait in first:
        wait()
    for receive in others:
        receive().wait(timeout)


def _run_all(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    while (run := queue.get()) is not None:
        run()
        del run  # it would keep its tensors until the next one comes
