"""Signals processes together with their descendants, and adopts orphans so that none is missed.

`host.agent` and `host.remote_parent` end a job's processes with it on each host, and `agents.agent_group` what is left
of the launcher's own. A process that has called `adopt_orphans` becomes the parent of descendants whose own parent
ends, so `kill_descendants` finds even a daemon that forked twice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process adopt its orphaned descendants."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def dying_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Returns a function for a new child to call first, so that ``signum`` is sent to it when its parent dies.

    For `subprocess.Popen(preexec_fn=...)`, which is safe in a process without threads, such as the agent.
    """
    prctl, parent = _prctl(), os.getpid()

    def set_up() -> None:
        prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return set_up


@functools.cache  # ctypes keeps a part of each function that it makes
def _prctl() -> Callable[[int, int], int]:
    import ctypes  # noqa: PLC0415  # costs 10 ms

    prctl = ctypes.CDLL(None).prctl
    return lambda option, value: int(prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def signal_group(pid: int, signum: int) -> None:
    """Signals the process group that ``pid`` leads. The group may have ended already."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)


def signal_handlers(pid: int, signum: int) -> None:
    """Signals ``pid`` and its descendants as far as they handle this signal, so that it ends none of them."""
    import psutil  # noqa: PLC0415  # as in kill_tree

    processes = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    for each in processes:
        with contextlib.suppress(OSError):
            if handles(each, signum):
                os.kill(each, signum)


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for this signal. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/status", "rb") as file:  # a process may have any bytes as its name
        mask = next((int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")), 0)
    return bool(mask >> (signum - 1) & 1)


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process that leads a group, to that group, and to its descendants in other groups.

    Descendants that may not be killed, such as those of sudo, are left alone.
    """
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    try:
        # Listed first, since children of a dead parent are no longer its children.
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    signal_group(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()


class Reaped(NamedTuple):
    """A child that has ended; ``peak_memory``: the most bytes that it, or a child it has waited for, had at a time."""

    pid: int
    returncode: int
    peak_memory: int


def reap() -> tuple[list[Reaped], bool]:
    """Reaps the children that have ended. Returns these, and whether other children still live."""
    ended: list[Reaped] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append(Reaped(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))


def kill_descendants(*, within_s: float = 10.0) -> bool:
    """Sends SIGKILL to all descendants of this process. Returns False if some are left after ``within_s``."""
    give_up_at = time.monotonic() + within_s
    while reap()[1]:
        import psutil  # noqa: PLC0415  # as in kill_tree

        if time.monotonic() > give_up_at:
            return False
        # Repeated, since a listed process may fork before it is killed.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)
    return True
