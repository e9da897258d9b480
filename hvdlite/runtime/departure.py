"""
Exit handlers of a rank: its program ends without a hang or an abort, and with its own exit code.

Which ranks there are, and how they are left, is told by `world`.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ..environment import told_by_launcher
from ..errors import says_peer_lost

_LAST_TURN_S = 0.1


def say_farewell(size: int, leave: Callable[[], None], save: Callable[[], None]) -> None:
    """The last thing that a program does, as one of ``size`` ranks.

    ``leave`` closes the connections; ``save`` is called instead where they cannot be used any more.
    """
    # The interpreter leaves the exception that ends the program here before it runs exit handlers.
    error = getattr(sys, "last_value", None)
    if size > 1 and error is not None and not isinstance(error, KeyboardInterrupt):
        _end_after(error, save)
    elif size > 1 and threading.current_thread() is threading.main_thread():
        _leave_note("left")
        # Once the connections are closed the others fail, and the launcher ends what still runs. This
        # process ends by itself: its own exit code, which may be the cause of it all, must not be lost.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Cycles of the program's own, such as a DistributedDataParallel, may hold on to the default group.
    gc.collect()
    leave()
    if size > 1:
        # What still holds it keeps gloo's threads alive, and one that needs the interpreter to drop its last
        # tensor when that is going aborts the process: let them have it now.
        time.sleep(_LAST_TURN_S)


def _end_after(error: BaseException, save: Callable[[], None]) -> NoReturn:
    """End this process here and now, with the exit code of an exception.

    It may have collectives under way that will never end. Destroying their group waits for them, and not
    destroying it aborts when the interpreter goes. The others learn of the end from the system.
    """
    if says_peer_lost(error):
        _leave_note("peer-lost")
    save()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _leave_note(what: str) -> None:
    """Let hvdlite-run tell a rank that ends because of another's end from the one that ended first."""
    directory, rank = told_by_launcher("JOB_DIR", os.environ), told_by_launcher("RANK", os.environ)
    if directory and rank and Path(directory).is_dir():
        Path(directory, f"rank.{rank}.{what}").touch()
