"""
The queue of an engine's operations, which waiting threads, submitting threads or a background thread carry on.

    submit ── begun at once where that is possible ── carried on, one after the other:
              by whoever waits, by whoever submits the next, or by a thread in the background

They end in the order in which they were submitted, which is the same on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from ..comm.engine_state import RevokedError
from .control_block import FAILED
from .peers import Peers
from .shm_operation import Condition, ShmOperation, Steps
from .shm_work import ShmWork

# How long a thread in the background leaves to the program what that is likely to do itself, with the core it has.
_GRACE_S = 0.02


class CollectiveSteps(Protocol):
    """What one operation does: an all-reduce, a broadcast, ..."""

    def begin(self) -> bool:
        """Show all of this rank's data, if they can be shown at once; whether they were."""
        ...

    def run(self, has_begun: bool, /) -> Steps:
        """The rest of it; yields what must have come to pass before it goes on."""
        ...


class _Entry:
    """An operation in the queue."""

    __slots__ = ("awaited", "collective", "has_begun", "is_shown", "operation", "steps", "work")

    def __init__(self, operation: ShmOperation, collective: CollectiveSteps, work: ShmWork) -> None:
        self.operation = operation
        self.collective = collective
        self.work = work
        self.has_begun = False
        # Whether all of this rank's data have been shown.
        self.is_shown = False
        self.steps: Steps | None = None
        self.awaited: Condition | None = None


class Queue:
    """The operations of one engine on this rank."""

    def __init__(self, peers: Peers, name: str) -> None:
        """``name`` is for the thread in the background."""
        self._peers = peers
        self._name = name
        self._entries: deque[_Entry] = deque()
        # Held to look at the entries, or to begin one; never while waiting.
        self._entries_lock = threading.Lock()
        # Held by whoever carries on; those who wait for that, or for the end of what they wait for, stand by.
        self._carrying = threading.Lock()
        self._changed = threading.Condition()
        self._standing_by = 0
        # Whose futures are to be told, by somebody who holds none of the locks.
        self._ended: deque[ShmWork] = deque()
        self._waiters = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        # For the thread in the background: set as often as one likes, it wakes once.
        self._is_wanted = threading.Event()
        self._is_urgent = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, operation: ShmOperation, collective: CollectiveSteps, work: ShmWork, in_background: bool) -> None:
        """Have it carried out after all before it; ``in_background``: without anybody waiting for it.

        To be followed by `tell`.
        """
        entry = _Entry(operation, collective, work)
        with self._entries_lock:
            if isinstance(self._failure, RevokedError):
                raise RevokedError(str(self._failure))
            if self._failure is not None or self._is_closed:
                why = "it was closed" if self._failure is None else f"it failed before: {self._failure}"
                raise RuntimeError(f"this group communicates no more, make a new one: {why}") from self._failure
            self._begin(entry, self._entries[-1] if self._entries else None)
            self._entries.append(entry)
        # What lies before it may be ready by now.
        self._carry_on_without_waiting()
        # What has no room yet is shown when there is: others may wait for it, and nobody here.
        if (in_background or not entry.has_begun) and not work.is_done:
            self.carry_on_in_background(at_once=False)

    def carry_on(self, work: ShmWork) -> None:
        """Return when this one is done, or has failed."""
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
            self.tell()

    def carry_on_in_background(self, *, at_once: bool) -> None:
        """Have a thread carry on until there is nothing left, or somebody else does.

        Unless ``at_once``, or if there is a core for it, a moment later: the program is likely to do it itself.
        """
        with self._entries_lock:
            # It is of no use while a callback that it runs waits for what is begun here: then there is another.
            if self._thread in (None, threading.current_thread()) and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        if at_once:
            self._is_urgent.set()
        self._is_wanted.set()

    def drain(self) -> None:
        """Return when all that was submitted by now is over, whether it has failed or not."""
        with self._entries_lock:
            last = self._entries[-1].work if self._entries else None
        if last is not None:
            self.carry_on(last)

    def revoke(self, error: RevokedError) -> None:
        """End what is under way, and all that would be submitted, with this error, unless there was one before.

        Whoever carries on now sees it by the state of its peers. Waits for nobody.
        """
        with self._entries_lock:
            if self._failure is None:
                self._failure = error
        if self._carrying.acquire(blocking=False):
            try:
                self._fail(error)
            finally:
                self._let_go()
        self.tell()

    def close(self) -> None:
        """End what is under way as failed. Waits for nobody."""
        with self._entries_lock:
            self._is_closed = True
        self._is_urgent.set()
        self._is_wanted.set()
        if self._carrying.acquire(blocking=False):
            try:
                self._fail(RuntimeError("the engine was closed"))
            finally:
                self._let_go()
        self.tell()

    def tell(self) -> None:
        """Have callbacks run that wait for what has ended. They may begin operations, and wait for them."""
        while self._ended:
            try:
                work = self._ended.popleft()
            except IndexError:  # another thread was faster
                return
            work.tell()

    def _run(self) -> None:
        while not self._is_closed and self._thread is threading.current_thread():
            self._is_wanted.wait()
            # Before it looks at the entries: what is submitted from now on sets it again.
            self._is_wanted.clear()
            if not self._peers.has_free_cores():
                self._is_urgent.wait(_GRACE_S)
            self._is_urgent.clear()
            while self._entries and not self._waiters and not self._is_closed:
                with self._carrying:
                    self._step(may_wait=True, in_background=True)
                self._let_others_look()
                self.tell()

    def _take_over(self, work: ShmWork) -> bool:
        """Become the one who carries on, as soon as nobody else does; False if ``work`` is done before."""
        if self._carrying.acquire(blocking=False):
            return True
        with self._changed:
            # Before the last look: whoever lets go after that finds that somebody stands by.
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
        """Carry on no more."""
        self._carrying.release()
        self._let_others_look()

    def _let_others_look(self) -> None:
        """Have those who stand by see whether what they wait for is done, or is for them to carry on."""
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
        """Show what this rank has, so that no other waits for it, if all before it is shown."""
        if before is None or before.is_shown:
            counter, value = entry.operation.has_room()
            # On this rank too: what is shown in that room may be what it is itself about to read.
            if self._peers.has_reached(counter, value):
                entry.has_begun = True
                entry.is_shown = entry.collective.begin()

    def _step(self, may_wait: bool, in_background: bool = False) -> bool:
        """Carry the first one on as far as it goes; whether there may be more to do at once."""
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
            # The next ones could not begin before its data were all shown.
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
        """Nothing that was or will be submitted can come to an end."""
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
