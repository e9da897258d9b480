"""
The queue of an engine's operations on one rank, and the threads that carry them out.

An operation begins when it is submitted, if possible: it shows this rank's data, so that no other rank has to wait for
them. Then the operations are carried out one after the other, in the order of submission, which is the same on all
ranks. This is done by the thread that waits, by the thread that submits the next operation, or by a background thread.
`ShmEngine` owns the queue, and `ShmWork` waits through it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from ..comm.engine import LostError
from .control_block import FAILED
from .peers import Peers
from .shm_operation import Condition, ShmOperation, Steps
from .shm_work import ShmWork

# How long the background thread leaves work to the program's threads, which are likely to do it themselves.
_GRACE_S = 0.02


class CollectiveSteps(Protocol):
    """The steps of one collective: an all-reduce, a broadcast, ..."""

    def begin(self) -> bool:
        """Show all of this rank's data, if that is possible at once; returns whether it did."""
        ...

    def run(self, has_begun: bool, /) -> Steps:
        """Carry out the rest; yields each condition that must hold before it continues."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """An operation in the queue; ``is_shown``: all of this rank's data for it have been shown."""

    operation: ShmOperation
    collective: CollectiveSteps
    work: ShmWork
    has_begun: bool = False
    is_shown: bool = False
    steps: Steps | None = None
    awaited: Condition | None = None


class Queue:
    """The operations of one engine on this rank. Any thread may use it."""

    def __init__(self, peers: Peers, name: str) -> None:
        """``name`` is the background thread's."""
        self._peers = peers
        self._name = name
        self._entries: deque[_Entry] = deque()
        # Held to read the entries, or to begin one; never while waiting.
        self._entries_lock = threading.Lock()
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

    def submit(self, operation: ShmOperation, collective: CollectiveSteps, work: ShmWork, in_background: bool) -> None:
        """Add an operation to the queue. The caller must call `run_callbacks` afterwards.

        ``in_background``: the background thread carries it out even if no thread waits for it.
        """
        entry = _Entry(operation, collective, work)
        with self._entries_lock:
            if isinstance(self._failure, LostError):
                raise LostError(str(self._failure))
            if self._failure is not None or self._is_closed:
                why = "was closed" if self._failure is None else f"has failed before ({self._failure})"
                raise RuntimeError(f"this process group {why}: make a new one") from self._failure
            self._begin(entry, self._entries[-1] if self._entries else None)
            self._entries.append(entry)
        # Earlier operations may be ready by now.
        self._carry_on_without_waiting()
        # An operation that found no room must still begin when there is, because other ranks may wait for it, even if
        # no thread here does.
        if (in_background or not entry.has_begun) and not work.is_done:
            self.carry_on_in_background(at_once=False)

    def carry_on(self, work: ShmWork) -> None:
        """Wait until this work is done or has failed, carrying out the queue unless another thread does."""
        while not work.is_done:
            with self._entries_lock:
                self._waiters += 1
            try:
                if self._take_over(work):
                    try:
                        while not (work.is_done or self._ended):
                            self._step(may_wait=True)
                    finally:
                        self._let_go()
            finally:
                with self._entries_lock:
                    self._waiters -= 1
            if self._thread is not None and self._entries:
                self._is_wanted.set()
            self.run_callbacks()

    def carry_on_in_background(self, *, at_once: bool) -> None:
        """Have the background thread carry out the queue until it is empty or another thread waits.

        Unless ``at_once`` is set or there is a free core, it starts a moment later: the program is likely to do it
        itself.
        """
        with self._entries_lock:
            # A callback on the background thread may wait for an operation that it begins here: then start another
            # thread.
            if self._thread in (None, threading.current_thread()) and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        if at_once:
            self._is_urgent.set()
        self._is_wanted.set()

    def drain(self) -> None:
        """Wait until everything submitted so far has ended or failed."""
        with self._entries_lock:
            last = self._entries[-1].work if self._entries else None
        if last is not None:
            self.carry_on(last)

    def revoke(self, error: LostError) -> None:
        """End all operations, now and later, with this error, unless the queue has failed before.

        Those that all ranks have come to are done first, since some ranks may have done them. It waits for no rank. A
        thread that is carrying out the queue finds the revocation in the peers' states.
        """
        with self._entries_lock:
            if self._failure is None:
                self._failure = error
        if self._carrying.acquire(blocking=False):
            try:
                while self._step(may_wait=False):
                    pass
                self._fail(error)
            finally:
                self._let_go()
        self.run_callbacks()

    def close(self) -> None:
        """End all operations as failed. It does not block."""
        with self._entries_lock:
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
        self._entries_lock, self._carrying, self._changed = threading.Lock(), threading.Lock(), threading.Condition()
        self._failure = error
        for entry in self._entries:
            entry.work.failure, entry.work.is_done = error, True
        self._entries.clear()

    def wait_until_idle(self) -> None:
        """Wait until no thread carries out an operation any more. Call it after `close`."""
        with self._carrying:
            pass

    def run_callbacks(self) -> None:
        """Set the futures of ended works, which runs their callbacks; these may begin operations, and wait for them."""
        while self._ended:
            try:
                work = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            work.run_callbacks()

    def _run(self) -> None:
        while not self._is_closed and self._thread is threading.current_thread():
            self._is_wanted.wait()
            # Clear before reading the entries: an operation submitted after this point sets it again.
            self._is_wanted.clear()
            if not self._peers.has_free_cores():
                self._is_urgent.wait(_GRACE_S)
            self._is_urgent.clear()
            while self._entries and not self._waiters and not self._is_closed:
                with self._carrying:
                    self._step(may_wait=True, in_background=True)
                self._let_others_look()
                self.run_callbacks()

    def _take_over(self, work: ShmWork) -> bool:
        """Wait for the right to carry out the queue; returns False if ``work`` is done before."""
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
        """Release the right to carry out the queue."""
        self._carrying.release()
        self._let_others_look()

    def _let_others_look(self) -> None:
        """Wake the waiting threads, to check whether their work is done, or take over."""
        if self._standing_by:
            with self._changed:
                self._changed.notify_all()

    def _carry_on_without_waiting(self) -> None:
        if self._carrying.acquire(blocking=False):
            try:
                while self._step(may_wait=False):
                    pass
            finally:
                self._let_go()

    def _begin(self, entry: _Entry, before: _Entry | None) -> None:
        """Begin the operation, so that no other rank waits for its data, if all before it have shown theirs."""
        if before is None or before.is_shown:
            counter, value = entry.operation.has_room()
            # This rank must be done with that room, too: it may still have to read what is in it.
            if self._peers.has_reached(counter, value):
                entry.has_begun = True
                entry.is_shown = entry.collective.begin()

    def _step(self, may_wait: bool, in_background: bool = False) -> bool:
        """Carry out the first operation up to its next wait; returns whether there may be more to do at once."""
        with self._entries_lock:
            if not self._entries:
                return False
            entry = self._entries[0]
        try:
            if not self._advance(entry, may_wait, in_background):
                return False
        except StopIteration:
            self._end(entry)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        return True

    def _advance(self, entry: _Entry, may_wait: bool, in_background: bool) -> bool:
        awaited = entry.awaited or (None if entry.has_begun else entry.operation.has_room())
        if awaited is not None and not self._peers.reached(*awaited):
            if not may_wait:
                return False
            self._peers.wait_for(*awaited, time.monotonic() + self._peers.timeout_s, may_spin=not in_background)
        if entry.steps is None:
            with self._entries_lock:
                if not entry.has_begun:
                    entry.has_begun = True
                    entry.is_shown = entry.collective.begin()
            entry.steps = entry.collective.run(entry.is_shown)
        entry.awaited = next(entry.steps)
        return True

    def _end(self, entry: _Entry) -> None:
        with self._entries_lock:
            self._entries.popleft()
            entry.is_shown = True
            # The next operations could not begin before this one had shown all its data.
            before: _Entry | None = None
            for other in self._entries:
                if not other.has_begun:
                    self._begin(other, before)
                before = other
        self._end_work(entry.work)

    def _end_work(self, work: ShmWork, failure: BaseException | None = None) -> None:
        if work.end(failure):
            self._ended.append(work)
        self._let_others_look()

    def _fail(self, error: BaseException) -> None:
        """Fail all operations, now and later."""
        with self._entries_lock:
            if self._failure is None:
                self._failure = error
            error = self._failure
            failed = list(self._entries)
            self._entries.clear()
        if failed:
            self._peers.leave(FAILED)
        for entry in failed:
            self._end_work(entry.work, error)
