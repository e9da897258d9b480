"""The errors a user sees as one line after `hvdlite-run: `, each with the exit code of the launcher."""

from __future__ import annotations

import errno
import os

# What a machine may lack: of what, and what to do about that.
_SHORT = {
    errno.EMFILE: "too many files are open in this process: give it more with ulimit -n",
    errno.ENFILE: "too many files are open on this machine: end some programs, or raise fs.file-max",
    errno.EAGAIN: "no more processes or threads may be started: give this user more with ulimit -u, or end some",
    errno.ENOMEM: "there is no memory left: end some programs",
    errno.ENOSPC: "there is no room left, or no inode: df and df -i say where; TMPDIR names another directory",
    errno.EDQUOT: "this user's quota is used up: quota says where; TMPDIR names another directory",
    errno.EROFS: "that file system is read-only: TMPDIR names another directory",
}
_NO_THREAD = "can't start new thread"


class LauncherError(Exception):
    """Something went wrong that one line can tell; never shown with a traceback."""

    exit_code = 1


class UsageError(LauncherError):
    """The command line asks for what cannot be done."""

    exit_code = 2


class JobError(LauncherError):
    """Raised by `run` when its job failed and there is no exception of the function's that could be raised instead."""


class ProtocolError(LauncherError):
    """Bytes that are no frame of ours came from the other end."""


def in_words(error: BaseException) -> str | None:
    """What the machine lacked, and the way out, where that is what ``error`` is about; else None."""
    if isinstance(error, MemoryError):
        return _SHORT[errno.ENOMEM]
    if isinstance(error, ImportError):  # a library that could not be loaded has no number of an error
        lacked = [number for number in _SHORT if os.strerror(number) in str(error)]
        return _SHORT[lacked[0]] if lacked else None
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return _SHORT[errno.EAGAIN]
    if isinstance(error, OSError) and error.errno in _SHORT:
        where = f"{error.filename!r}: " if error.filename else ""
        return f"{where}{_SHORT[error.errno]}"
    return None
