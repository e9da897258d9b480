"""
Closes objects that the garbage collector has found, on a background thread; and keeps objects in use until they end.

    finalizer ── close_later ── queue ── the background thread calls close

The garbage collector may run a finalizer in any thread at any point, for example inside a collective of the engine that
is to be closed, while that thread holds the locks that closing needs. So an optimizer's only calls `close_later`.

A destructor may wait: that of a gloo process group waits for the group's operations. `keep_until` holds a reference
until there are none, so that the thread that drops its own reference does not wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from .. import forks
from ..log import log

# How often `keep_until` looks.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5

# SimpleQueue.put is reentrant, unlike Queue.put: a finalizer may call it while the same thread is inside put or get.
_found: SimpleQueue[Callable[[], None]] = SimpleQueue()
_starting = forks.lock_of_process()
# Held while `keep_until` drops a reference; never released after the end of the program.
_dropping = forks.lock_of_process()
_is_running = False


def prepare() -> None:
    """Start the background thread. Call it before making an object whose finalizer calls `close_later`."""
    global _is_running  # noqa: PLW0603 - one thread per process, as there is one garbage collector
    with _starting:
        if not _is_running:
            _is_running = True
            threading.Thread(target=_run, name="hvdlite-collected", daemon=True).start()


def close_later(close: Callable[[], None]) -> None:
    """Queue ``close`` for the background thread, and return at once. Any thread may call it at any point."""
    _found.put(close)


def wait_until_closed(timeout_s: float | None = None) -> None:
    """Wait until everything queued so far is closed, for at most ``timeout_s``. Never call it from a finalizer."""
    prepare()
    done = threading.Event()
    _found.put(done.set)
    done.wait(timeout_s)


def keep_until(is_over: Callable[[], bool], kept: object) -> None:
    """Keep a reference to ``kept`` until ``is_over()``. If the program ends before, its destructor never runs."""
    threading.Thread(target=_keep, args=(is_over, [kept]), name="hvdlite-kept", daemon=True).start()


def _keep(is_over: Callable[[], bool], kept: list[object]) -> None:
    # Only this frame refers to it, and the frame of a daemon thread outlives the interpreter: so at the end of the
    # program nothing waits in a destructor.
    pause_s = _FIRST_PAUSE_S
    while not is_over():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    with _dropping:
        kept.clear()


def finish(timeout_s: float) -> None:
    """Wait for the queue at the end of the program: closing an engine while the interpreter ends would abort it.

    From now on `keep_until` keeps everything.
    """
    _dropping.acquire(timeout=timeout_s)
    if _is_running:
        wait_until_closed(timeout_s)


def _run() -> None:
    while True:
        close = _found.get()
        try:
            close()
        except Exception as error:  # noqa: BLE001 - no caller waits for it, and the thread has to close the others
            log.warning("could not close an object that is no longer referenced: %s", error)
        del close  # it would keep the last object alive until the next one arrives


def _leave_to_parent() -> None:
    """Forgets, in a forked child, what the parent is about to close, and that its thread runs."""
    global _found, _is_running
    _found, _is_running = SimpleQueue(), False


os.register_at_fork(after_in_child=_leave_to_parent)
