"""
Futex calls, to sleep until a word of shared memory changes, and a full memory barrier.

Linux alone. What the words mean is in `control_block`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_NUMBER_OF_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
# Not the private kind, which is between threads of one process.
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_barrier = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


def is_available() -> bool:
    """Whether this machine has what is used here."""
    return _NUMBER_OF_FUTEX is not None and hasattr(os, "pidfd_open") and os.path.isdir("/proc/self/fd")


def reads_in_order() -> bool:
    """Whether this machine never does a later read before an earlier one, so that a reader needs no `fence`.

    So it is on x86; ARM may read what a counter stands for before the counter itself.
    """
    return platform.machine() == "x86_64"


def fence() -> None:
    """Let no later read or write be seen before an earlier one."""
    # A lock is taken by an atomic read-modify-write, and given back by a release: on x86 the former alone is a full
    # barrier, on ARM a release followed by an acquire is.
    with _barrier:
        pass
    with _barrier:
        pass


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep until somebody calls `wake`, unless the 32-bit word has another value; perhaps for nothing.

    Signal handlers of Python run when it returns, so that ``timeout_s`` bounds how late they may be.
    """
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _libc.syscall(_NUMBER_OF_FUTEX, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(value), ctypes.byref(timeout))


def wake(address: int) -> None:
    """Wake everybody who sleeps there, in all processes."""
    _libc.syscall(_NUMBER_OF_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY)
