"""The errors that a user sees as one line after `hvdlite-run: `, each with the launcher's exit code."""

from __future__ import annotations

import errno
import os

# What the machine may run out of, with a remedy.
_SHORT = {
    errno.EMFILE: "too many open files in this process: raise the limit with ulimit -n",
    errno.ENFILE: "too many open files on this machine: end some programs, or raise fs.file-max",
    errno.EAGAIN: "cannot start more processes or threads: raise the limits with ulimit -u and ulimit -v, or end some",
    errno.ENOMEM: "out of memory: end some programs",
    errno.ENOSPC: "no space or no inodes left: see df and df -i",
    errno.EDQUOT: "this user's disk quota is used up: see quota",
    errno.EROFS: "the file system is read-only",
    errno.EFBIG: "this process may write no larger files: raise the limit with ulimit -f",
}


class LauncherError(Exception):
    """An error that one line can explain; it is never shown with a traceback."""

    exit_code = 1


class UsageError(LauncherError):
    """The command line asks for something impossible."""

    exit_code = 2


class JobError(LauncherError):
    """Raised by `run` when its job failed and there is no exception of the function that could be raised instead."""


class JobEndsError(LauncherError):
    """The hvdlite-run that was asked gives no answer, as its job is ending; it may be about to restart it."""


class ProtocolError(LauncherError):
    """The other end of a connection sent bytes or messages that are not allowed."""


def in_words(error: BaseException) -> str | None:
    """Returns what the machine ran out of, with a remedy, if that is the reason for ``error``; else None."""
    if isinstance(error, MemoryError):
        return _SHORT[errno.ENOMEM]
    if isinstance(error, ImportError):  # a library that could not be loaded: the error has no errno
        lacked = [number for number in _SHORT if os.strerror(number) in str(error)]
        return _SHORT[lacked[0]] if lacked else None
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return _SHORT[errno.EAGAIN]
    if isinstance(error, OSError) and error.errno in _SHORT:
        where = f"{error.filename!r}: " if error.filename else ""
        return f"{where}{_SHORT[error.errno]}"
    return None


def one_reason(error: Exception) -> str:
    """Returns the reason for an error in one line, whatever error it is."""
    if isinstance(error, LauncherError):
        return str(error)
    return in_words(error) or (isinstance(error, OSError) and error.strerror) or repr(error)


def why_not_written(error: OSError) -> str:
    """Returns why a file that the user has named cannot be written, without its path."""
    return in_words(OSError(error.errno, "")) or error.strerror or str(error)
