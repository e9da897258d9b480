"""`KilledWorkers`: notices that a worker was killed, before the kernel has taken back the memory of its process.

    InitDone ──► watch ── pidfds of some threads ──► all threads are exiting? ──► on_killed(pid, signum)

SIGCHLD comes last, and a process of some GB is taken down for 0.1 s before it. Its threads end at once, all but the
last one, which does this work. Since Linux 6.9 a pidfd can be that of a thread. Elsewhere nothing is noticed early.

A fired pidfd alone says little: a program's thread may end while others go on. So a worker counts as killed once the
kernel says of each thread that it is exiting, and by which signal: then no instruction of its program runs any more,
and nothing more is written into the memory that it shares with other ranks.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import time
from collections.abc import Callable
from functools import partial

from hvdlite_wire.linux import exit_statuses

# Of each worker: whichever of its threads takes down the memory ends last, and the others tell.
_THREADS = 4
_LOOK_EACH_S = 0.002
# After so many looks the thread has ended by itself.
_LOOKS = 100

_SYS_PIDFD_OPEN = 434
_PIDFD_THREAD = os.O_EXCL


class KilledWorkers:
    """The workers that are watched, by pid. ``on_killed(pid, signum)`` is called at most once for each."""

    def __init__(self, selector: selectors.BaseSelector, on_killed: Callable[[int, int], None]) -> None:
        self._selector = selector
        self._on_killed = on_killed
        self._syscall = ctypes.CDLL(None).syscall
        self._pidfds: dict[int, set[int]] = {}
        self._looks: dict[int, int] = {}  # how often to look yet, at those of which a thread has ended
        self._look_at = 0.0

    def watch(self, pid: int) -> None:
        """Watches a child of this process from now on, with the threads that it has now."""
        self.forget(pid)
        pidfds = self._pidfds[pid] = set()
        for thread in sorted(_threads_of(pid))[:_THREADS]:
            if (pidfd := int(self._syscall(_SYS_PIDFD_OPEN, thread, _PIDFD_THREAD))) >= 0:
                pidfds.add(pidfd)
                self._selector.register(pidfd, selectors.EVENT_READ, partial(self._fired, pid, pidfd))

    def forget(self, pid: int) -> None:
        """Watches it no longer. To be called when it is reaped, since its number may be given to another process."""
        for pidfd in list(self._pidfds.get(pid, ())):
            self._close(pid, pidfd)
        self._pidfds.pop(pid, None)
        self._looks.pop(pid, None)

    def _close(self, pid: int, pidfd: int) -> None:
        self._pidfds[pid].remove(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _fired(self, pid: int, pidfd: int) -> None:
        if pidfd not in self._pidfds.get(pid, ()):
            return  # forgotten for another that fired at the same time
        self._close(pid, pidfd)
        self._looks[pid] = _LOOKS
        self._look(pid)

    def time_left_s(self) -> float | None:
        """Returns the seconds until `tick` must be called, or None."""
        return max(0.0, self._look_at - time.monotonic()) if self._looks else None

    def tick(self) -> None:
        """Looks again at those of which a thread has ended."""
        if self._looks and time.monotonic() >= self._look_at:
            for pid in list(self._looks):
                self._look(pid)

    def _look(self, pid: int) -> None:
        self._look_at = time.monotonic() + _LOOK_EACH_S
        self._looks[pid] -= 1
        signum = killed_by(pid)
        if signum is not None:
            self.forget(pid)
            self._on_killed(pid, signum)
        elif self._looks[pid] == 0:
            del self._looks[pid]


def killed_by(pid: int) -> int | None:
    """Returns the signal by which all threads of this process are exiting; None as long as any of them goes on.

    None too where that cannot be read, since this process can open no more files.
    """
    # The lowest seven bits of a wait status are 0 if the program has ended by itself.
    signals = [signum for status in exit_statuses(pid) if (signum := status & 0x7F)]
    return signals[-1] if signals else None


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
