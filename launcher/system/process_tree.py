"""Ends processes together with everything that they started, so that none is left.

On Linux a process can adopt the orphans among its descendants, so that a daemon that forked twice is still
found; elsewhere what left its process group and lost its parent stays unseen. Whom to end, and when, is
decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent dies. False where the system cannot do that."""
    prctl = _prctl()
    return prctl is not None and prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def dying_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None] | None:
    """What a new child is to call first, so that even kill -9 of its parent ends it, by ``signum``.

    For `subprocess.Popen(preexec_fn=…)`, which is safe in a process without threads (as the agent is).
    """
    prctl = _prctl()
    if prctl is None:
        return None
    parent = os.getpid()

    def set_up() -> None:
        prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return set_up


def _prctl() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    import ctypes  # noqa: PLC0415  # costs 10 ms, and only Linux needs it

    prctl = ctypes.CDLL(None).prctl
    return lambda option, value: int(prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group that ``pid`` leads; it may be gone already."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)


def kill_tree(pid: int) -> None:
    """SIGKILL a process that leads its group, the group, and its descendants in other groups."""
    import psutil  # noqa: PLC0415  # costs 20 ms, and most jobs end without it

    try:
        # Listed first: the children of a dead parent are no longer its own.
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    signal_group(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def reap() -> tuple[list[tuple[int, int]], bool]:
    """Collect the children that have ended as (pid, returncode); and whether other children still live."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def kill_descendants(*, within_s: float = 10.0) -> bool:
    """SIGKILL every descendant of this process, and return once none is left. False if some will not go."""
    give_up_at = time.monotonic() + within_s
    while reap()[1]:
        import psutil  # noqa: PLC0415  # as in kill_tree

        if time.monotonic() > give_up_at:
            return False
        # Again and again: what is listed may fork before it is killed.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.005)
    return True
