"""
Futex calls, to sleep until a word of shared memory changes, what comes before the sleep, and a full memory barrier.

Linux only. `board`, `peers` and `setup` call these; the words are in `control_block`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable

from .. import forks

_NUMBER_OF_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
# Not FUTEX_PRIVATE_FLAG, which is for threads of one process.
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

# How long a rank with a core of its own checks before it sleeps: enough for two ranks in step.
_SPIN_S = 100e-6
_LOOKS_PER_CLOCK = 50
# With fewer cores than ranks, spinning would delay the other ranks: this rank yields its core a few times instead.
_YIELDS = 4

_IS_X86 = platform.machine() == "x86_64"
# Whether a reader needs no `fence`. ARM may read the data that a counter stands for before it reads the counter.
READS_IN_ORDER = _IS_X86
_libc = ctypes.CDLL(None, use_errno=True)
_barrier = forks.lock_of_process()


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


def is_available() -> bool:
    """Whether this machine has what this package uses: futexes, pidfds and /proc."""
    return _NUMBER_OF_FUTEX is not None and hasattr(os, "pidfd_open") and os.path.isdir("/proc/self/fd")


def fence() -> None:
    """Act as a full memory barrier: no later read or write is seen before an earlier one."""
    # Acquiring a lock is an atomic read-modify-write, a full barrier on x86. On ARM, a release followed by an acquire
    # is one.
    with _barrier:
        pass
    if not _IS_X86:
        with _barrier:
            pass


def comes_soon(is_over: Callable[[], bool], *, has_core: bool) -> bool:
    """Whether ``is_over()`` within the time for which it pays not to sleep; ``has_core``: each rank has one."""
    if not has_core:
        for _ in range(_YIELDS):
            os.sched_yield()
            if is_over():
                return True
        return False
    until_s = time.monotonic() + _SPIN_S
    while time.monotonic() < until_s:
        for _ in range(_LOOKS_PER_CLOCK):
            if is_over():
                return True
    return False


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep until a rank calls `wake`, unless the 32-bit word differs from ``value``; it may return early.

    Python runs signal handlers only after it returns, so ``timeout_s`` bounds their delay.
    """
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _libc.syscall(_NUMBER_OF_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(timeout))


def wake(address: int) -> None:
    """Wake every thread, in all processes, that sleeps at this address."""
    _libc.syscall(_NUMBER_OF_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY)
