"""
Closes, on a thread of its own, what the garbage collector has found.

    finalizer ── close_later ── a queue that can be added to at any point ── this thread ── close

The collector comes in whatever thread, in the middle of whatever that does: of a collective of the very engine that is
to be closed, holding the locks that closing needs. So a finalizer does no more than to add to this queue.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..log import log

# Its put may interrupt its own put or get, in the same thread, unlike that of any other queue.
_found: SimpleQueue[Callable[[], None]] = SimpleQueue()
_starting = threading.Lock()
_running_in: int | None = None


def prepare() -> None:
    """To be called before anything is made whose finalizer calls `close_later`; not by a finalizer."""
    global _running_in  # noqa: PLW0603 - one thread for the process, as there is one collector
    with _starting:
        if _running_in != os.getpid():
            _running_in = os.getpid()
            threading.Thread(target=_run, name="hvdlite-collected", daemon=True).start()


def close_later(close: Callable[[], None]) -> None:
    """Have it called soon. By any thread, at any point."""
    _found.put(close)


def wait_until_closed() -> None:
    """Return when all that has been found so far is closed. Not by a finalizer."""
    prepare()
    done = threading.Event()
    _found.put(done.set)
    done.wait()


def _run() -> None:
    while True:
        close = _found.get()
        try:
            close()
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and others are to be closed
            log.warning("what was no longer referred to could not be closed: %s", error)
        # Else the last one found would live until the next is.
        del close
