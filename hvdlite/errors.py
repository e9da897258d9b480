"""
The exception classes that hvdlite raises, and helpers that every package uses for error messages.

    HvdliteError
    ├── NotInitializedError    a function was called before hvd.init()
    ├── LaunchEnvironmentError the launcher's variables are incomplete or contradict each other
    ├── MismatchError          ranks built different models, or passed different arguments
    ├── GradientError          gradients were computed or zeroed at a time that would lose some of them
    ├── UnsupportedError       the operation cannot be done on such a tensor, or by that reduction op
    ├── WorkerRemovedError     this worker's host has been removed from an elastic job
    ├── StateLostError         the ranks of an elastic job that had the state of its training are lost
    └── CommunicationError     a collective failed or timed out
        └── PeerLostError      ... because another rank has ended

A wrong argument raises `ValueError` or `TypeError`, as everywhere in Python; `WrongTypeError` is both. Where a program
written for Horovod catches another type, the class here derives from that type too. This module imports nothing of
hvdlite.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence


class HvdliteError(RuntimeError):
    """Base class of hvdlite's errors."""


class NotInitializedError(HvdliteError, ValueError):
    """A function that needs the other ranks was called before ``hvd.init()``."""


class LaunchEnvironmentError(HvdliteError):
    """A launcher started this process, and the variables that it sets are incomplete or contradict each other."""


class MismatchError(HvdliteError):
    """The ranks disagree about an operation that all of them take part in: its arguments, shapes or model."""


class GradientError(HvdliteError, AssertionError):
    """Gradients were computed, zeroed or stepped in an order that would lose some of them."""


class UnsupportedError(HvdliteError, ValueError):
    """The operation cannot be done on such a tensor, or by that reduction op."""


class WrongTypeError(TypeError, ValueError):
    """An argument has the wrong type. Horovod raises `TypeError` in some such cases and `ValueError` in others."""


class WorkerRemovedError(HvdliteError, SystemExit):
    """This worker has been removed from an elastic job, so `hvd.init` has no rank for it.

    It is also a `SystemExit`: a process that does not catch it ends, with exit code 0 and without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 0


class StateLostError(HvdliteError):
    """A new rank of an elastic job has not got the state of the training: the rank that was to send it was lost."""


class CommunicationError(HvdliteError):
    """A collective failed or timed out. The message names the collective, the rank and the cause."""


class PeerLostError(CommunicationError):
    """A collective failed because another rank has ended. The cause is on that rank, not on the one that raises."""


# Texts of gloo's and NCCL's errors when the peer has closed its connection.
_PEER_LOSS_WORDS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "socket closed",
    "failed to recv, got 0 bytes",
)


def words_of(error: BaseException) -> str:
    """Returns the text of any error, "" for one of the program's own class whose ``__str__`` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # whatever it raises must not hide the error
        return ""


def says_peer_lost(error: BaseException) -> bool:
    """Whether this error, or one in its chain of causes, means that another rank has ended."""
    return any(
        isinstance(each, PeerLostError) or any(words in words_of(each).lower() for words in _PEER_LOSS_WORDS)
        for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, its cause or context, theirs, and so on; each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


# What a process may run out of while it connects, with a remedy.
_LACKS = {
    errno.EMFILE: "this process has too many open files: close some, or raise the limit with ulimit -n",
    errno.ENFILE: "this machine has too many open files: end some programs, or raise fs.file-max",
    errno.ENOMEM: "this machine is out of memory: end some programs",
}


def lack_of(error: BaseException) -> str | None:
    """Returns what this process has run out of, with a remedy, if that is the reason for an error; else None.

    Torch's errors of gloo have only the text of the system's error. Messages of `HvdliteError` may quote another rank,
    so only their causes count.
    """
    for each in _chain(error):
        if isinstance(each, OSError) and each.errno in _LACKS:
            return _LACKS[each.errno]
        if isinstance(each, RuntimeError) and not isinstance(each, HvdliteError):
            line = words_of(each).partition("\n")[0]
            for number, words in _LACKS.items():
                # As the system says it, behind the call's name or, in gloo's own checks, a full stop.
                if line.endswith((f": {os.strerror(number)}", f". {os.strerror(number)}")):
                    return words
    return None


# For errors whose cause is on another rank.
LOOK_THERE = "look for that rank's own error"
UNKNOWN_END = "another rank has ended"


def describe_end(rank: str, ended_normally: bool) -> str:
    """Returns how a rank has ended, for the message of an error: ``rank 1 (node2) has crashed or was killed``."""
    return f"{rank} {'has ended' if ended_normally else 'has crashed or was killed'}"


# The most ranks or hosts that a message names.
MOST_NAMED = 8


def list_names(names: Sequence[str], count: int) -> str:
    """Joins the first `MOST_NAMED` of ``names``: ``rank 1 (node2), rank 3 (node4) and 5 more``.

    ``count`` is the number of all that are meant; ``names`` may hold only the first of them.
    """
    shown = names[:MOST_NAMED]
    return ", ".join(shown) + (f" and {count - len(shown)} more" if count > len(shown) else "")


def describe_interrupt(interrupt: KeyboardInterrupt, what: str, ranks: str = "") -> None:
    """Sets the message of a Ctrl-C that interrupted a wait: the operation, and the ranks that it waited for.

    Keeps a message that the exception already has. ``ranks`` is a result of `list_names`, or empty if unknown.
    """
    if not interrupt.args:
        interrupt.args = (f"interrupted while waiting in {what}" + (f", which waits for {ranks}" if ranks else ""),)
