"""
The queue of an engine's operations on one rank, and the threads that carry them out.

An operation begins when it is submitted, if possible: it shows this rank's data, so that no other rank has to wait for
them. Then the operations are carried out one after the other, in the order of submission, which is the same on all
ranks. This is done by the thread that waits (`ShmWork.wait`), by the thread that submits the next operation, or by a
background thread. `ShmEngine` owns the queue.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import forks
from ..comm.engine import LostError
from .control_block import FAILED
from .peers import Peers
from .shm_operation import Condition, ShmOperation, Steps

# How long the background thread leaves work to the program's threads, which are likely to do it themselves.
_GRACE_S = 0.02

# Held to make a future, so that two threads that ask at once get the same one.
_making_a_future = forks.lock_of_process()


class ShmWork(dist.Work):
    """An operation in the queue. It is done when its tensors may be read; `wait` raises its failure, if any."""

    def __init__(self, queue: Queue, tensors: list[Tensor], operation: ShmOperation, steps: Steps) -> None:
        super().__init__()
        self._queue = queue
        self._tensors = tensors
        self.operation = operation
        self._steps = steps
        self.awaited: Condition | None = None
        self.has_begun = False
        # Whether all of this rank's data have been shown.
        self.is_shown = False
        self._future: torch.futures.Future[Any] | None = None
        # Acquired, and never released, by the thread that sets the future's result.
        self._running_callbacks = threading.Lock()
        self._is_seen_to = False
        # One event for each thread that waits with a timeout.
        self._bells: list[threading.Event] = []
        self.is_done = False
        self.failure: BaseException | None = None

    # -- for the queue

    def begin(self) -> None:
        """Shows this rank's data, if that is possible at once."""
        self.has_begun = True
        self.awaited = next(self._steps)
        self.is_shown = self.awaited is not None

    def advance(self) -> None:
        """Carries it out up to its next wait; a StopIteration where it has none."""
        self.awaited = next(self._steps)

    def end(self, failure: BaseException | None = None) -> bool:
        """Marks it done. The thread that carried it on calls this once, and then `run_callbacks` if it returns True."""
        self._steps = iter(())
        self.failure = failure
        self.is_done = True
        # Read the list only after setting the flag: a waiting thread adds its event before it reads the flag.
        for bell in self._bells:
            bell.set()
        return self._future is not None

    def run_callbacks(self) -> None:
        """Sets the future's result, which runs its callbacks. These may do anything, so the caller holds no lock."""
        # Two threads may call this at once: the one that ends the work, and one that asks for the future just then.
        if self._future is not None and self._running_callbacks.acquire(blocking=False):
            self._over.set_result(None)

    # -- for the program

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the tensors may be read, or raise what went wrong.

        If it is not done within ``timeout``, unless that is 0, it raises a RuntimeError like torch's. The operation
        continues, and may be waited for again.
        """
        if not self.is_done:
            if timeout > timedelta(0):
                self._wait_for(timeout)
            else:
                self._queue.carry_on(self)
        self._outcome()
        return True

    def _wait_for(self, timeout: timedelta) -> None:
        # The background thread carries it on: a thread that does so itself cannot stop in the middle.
        bell = threading.Event()
        self._bells.append(bell)
        self._have_it_done(at_once=True)
        if not (self.is_done or bell.wait(timeout.total_seconds()) or self.is_done):
            within = f"It was not done within {timeout.total_seconds():g} s"
            raise RuntimeError(f"Operation timed out! {within}: {self.operation.progress()}")

    def _have_it_done(self, *, at_once: bool) -> None:
        self._is_seen_to = True
        self._queue.carry_on_in_background(at_once=at_once)

    def not_begun(self) -> list[int]:
        """Returns the other ranks that have not begun it, or an operation before it. It does not block."""
        return self.operation.not_begun()

    def is_completed(self) -> bool:
        """Whether it is done. It will be done even if the program only asks."""
        if not (self.is_done or self._is_seen_to):
            self._have_it_done(at_once=False)
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
                self._have_it_done(at_once=True)
        return self._future

    def _outcome(self) -> list[Tensor]:
        if self.failure is not None:
            raise self.failure
        return self._tensors


class Queue:
    """The operations of one engine on this rank. Any thread may use it."""

    def __init__(self, peers: Peers, name: str) -> None:
        """``name`` is the background thread's."""
        self._peers = peers
        self._name = name
        self._works: deque[ShmWork] = deque()
        # Held to read the works, or to begin one; never while waiting.
        self._works_lock = threading.Lock()
        # Held by the thread that carries out the operations. The others wait at `_changed` until it is released, or
        # until their own operation is done.
        self._carrying = threading.Lock()
        self._changed = threading.Condition()
        self._standing_by = 0
        # Ended works whose futures have yet to get their result, by a thread that holds none of the locks.
        self._ended: deque[ShmWork] = deque()
        self._waiters = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        # Wakes the background thread.
        self._is_wanted = threading.Event()
        self._is_urgent = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, work: ShmWork, *, in_background: bool) -> None:
        """Adds an operation. The caller must call `run_callbacks` afterwards.

        ``in_background``: the background thread carries it out even if no thread waits for it.
        """
        with self._works_lock:
            if isinstance(self._failure, LostError):
                raise LostError(str(self._failure))
            if self._failure is not None or self._is_closed:
                why = "was closed" if self._failure is None else f"has failed before ({self._failure})"
                raise RuntimeError(f"this process group {why}: make a new one") from self._failure
            self._begin(work, self._works[-1] if self._works else None)
            self._works.append(work)
        # Earlier operations may be ready by now.
        self._carry_on_without_waiting()
        # An operation that found no room must still begin when there is, because other ranks may wait for it, even if
        # no thread here does.
        if (in_background or not work.has_begun) and not work.is_done:
            self.carry_on_in_background(at_once=False)

    def carry_on(self, work: ShmWork) -> None:
        """Waits until this work is done or has failed, carrying out the queue unless another thread does."""
        while not work.is_done:
            with self._works_lock:
                self._waiters += 1
            try:
                if self._take_over(work):
                    try:
                        while not (work.is_done or self._ended):
                            self._step(may_wait=True)
                    finally:
                        self._let_go()
            finally:
                with self._works_lock:
                    self._waiters -= 1
            if self._thread is not None and self._works:
                self._is_wanted.set()
            self.run_callbacks()

    def carry_on_in_background(self, *, at_once: bool) -> None:
        """Has the background thread carry out the queue until it is empty or another thread waits.

        Unless ``at_once`` is set or there is a free core, it starts a moment later: the program is likely to do it
        itself.
        """
        with self._works_lock:
            # A callback on the background thread may wait for an operation that it begins here: then start another
            # thread.
            if self._thread in (None, threading.current_thread()) and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        if at_once:
            self._is_urgent.set()
        self._is_wanted.set()

    def drain(self) -> None:
        """Waits until everything submitted so far has ended or failed."""
        with self._works_lock:
            last = self._works[-1] if self._works else None
        if last is not None:
            self.carry_on(last)

    def revoke(self, error: LostError) -> None:
        """Ends all operations, now and later, with this error, unless the queue has failed before.

        Those that all ranks have come to are done first, since some ranks may have done them. A thread that is carrying
        out the queue finds the revocation in the peers' states.
        """
        with self._works_lock:
            if self._failure is None:
                self._failure = error
        self._carry_on_without_waiting(error)
        self.run_callbacks()

    def close(self) -> None:
        """Ends all operations as failed. It does not block."""
        with self._works_lock:
            self._is_closed = True
        self._is_urgent.set()
        self._is_wanted.set()
        if self._carrying.acquire(blocking=False):
            try:
                self._fail(RuntimeError("the engine was closed"))
            finally:
                self._let_go()
        self.run_callbacks()

    def leave_to_parent(self, error: BaseException) -> None:
        """Ends all operations in a forked child with ``error``; callbacks are not run, and other ranks not told."""
        self._works_lock, self._carrying, self._changed = threading.Lock(), threading.Lock(), threading.Condition()
        self._failure = error
        for work in self._works:
            work.failure, work.is_done = error, True
        self._works.clear()

    def wait_until_idle(self) -> None:
        """Waits until no thread carries out an operation any more. Call it after `close`."""
        with self._carrying:
            pass

    def run_callbacks(self) -> None:
        """Sets the futures of ended works, which runs their callbacks; these may begin and await operations."""
        while self._ended:
            try:
                work = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            work.run_callbacks()

    def _run(self) -> None:
        while not self._is_closed and self._thread is threading.current_thread():
            self._is_wanted.wait()
            # Clear before reading the works: an operation submitted after this point sets it again.
            self._is_wanted.clear()
            if not self._peers.has_free_cores():
                self._is_urgent.wait(_GRACE_S)
            self._is_urgent.clear()
            while self._works and not self._waiters and not self._is_closed:
                with self._carrying:
                    self._step(may_wait=True, in_background=True)
                self._let_others_look()
                self.run_callbacks()

    def _carry_on_without_waiting(self, failure: LostError | None = None) -> None:
        """Carries out what is ready, unless another thread does so; then fails the rest, if there is a ``failure``."""
        if self._carrying.acquire(blocking=False):
            try:
                while self._step(may_wait=False):
                    pass
                if failure is not None:
                    self._fail(failure)
            finally:
                self._let_go()

    def _take_over(self, work: ShmWork) -> bool:
        """Waits for the right to carry out the queue; returns False if ``work`` is done before."""
        if self._carrying.acquire(blocking=False):
            return True
        with self._changed:
            # Count this thread before the last check: a thread that lets go after that sees that one waits.
            self._standing_by += 1
            try:
                while not work.is_done:
                    if self._carrying.acquire(blocking=False):
                        return True
                    self._changed.wait()
                return False
            finally:
                self._standing_by -= 1

    def _let_go(self) -> None:
        self._carrying.release()
        self._let_others_look()

    def _let_others_look(self) -> None:
        """Wakes the waiting threads, to check whether their work is done, or take over."""
        if self._standing_by:
            with self._changed:
                self._changed.notify_all()

    def _begin(self, work: ShmWork, before: ShmWork | None) -> None:
        """Begins the operation, so that no other rank waits for its data, if all before it have shown theirs."""
        # This rank must be done with that room, too: it may still have to read what is in it.
        if (before is None or before.is_shown) and self._peers.has_reached(*work.operation.has_room()):
            work.begin()

    def _step(self, may_wait: bool, in_background: bool = False) -> bool:
        """Carries out the first operation up to its next wait; returns whether there may be more to do at once."""
        with self._works_lock:
            if not self._works:
                return False
            work = self._works[0]
        try:
            awaited = work.awaited if work.has_begun else work.operation.has_room()
            if awaited is not None and not self._peers.reached(*awaited):
                if not may_wait:
                    return False
                self._peers.wait_for(*awaited, time.monotonic() + self._peers.timeout_s, may_spin=not in_background)
            if work.has_begun:
                work.advance()
            else:
                with self._works_lock:
                    work.begin()
        except StopIteration:
            self._end(work)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _end(self, work: ShmWork) -> None:
        with self._works_lock:
            self._works.popleft()
            # The next operations could not begin before this one had shown all its data.
            before: ShmWork | None = None
            for other in self._works:
                if not other.has_begun:
                    self._begin(other, before)
                before = other
        self._end_work(work)

    def _end_work(self, work: ShmWork, failure: BaseException | None = None) -> None:
        if work.end(failure):
            self._ended.append(work)
        self._let_others_look()

    def _fail(self, error: BaseException) -> None:
        """Fails all operations, now and later."""
        with self._works_lock:
            if self._failure is None:
                self._failure = error
            error = self._failure
            failed = list(self._works)
            self._works.clear()
        if failed:
            self._peers.leave(FAILED)
        for work in failed:
            self._end_work(work, error)
