"""
The errors that hvdlite raises, drawn once as a tree.

    HvdliteError
    ├── NotInitializedError    a function was called before hvd.init()
    ├── LaunchEnvironmentError the launcher's variables are incomplete or contradict each other
    ├── MismatchError          ranks built different models, or passed different arguments
    ├── GradientError          gradients came, or were zeroed, when they should not have been
    ├── UnsupportedError       what is asked for cannot be done with such tensors, or by that op
    └── CommunicationError     a collective failed or timed out
        └── PeerLostError      ... because another rank has gone

Wrong arguments are `ValueError` or `TypeError`, as everywhere in Python; `WrongTypeError` is both. What a program that
was written for Horovod expects to catch, each of them is besides. Nothing here decides when to raise; the messages are
made where the names of the things are known.
"""

from __future__ import annotations


class HvdliteError(RuntimeError):
    """Base class of hvdlite's errors.

    Wrong arguments are a `ValueError` or `TypeError` instead, but for those that Horovod too reports when it runs them.
    """


class NotInitializedError(HvdliteError, ValueError):
    """A function that needs the other ranks was called before ``hvd.init()``.

    It is a `ValueError` too, since that is what programs written for Horovod expect here.
    """


class LaunchEnvironmentError(HvdliteError):
    """The environment says that a launcher started this process, and contradicts itself."""


class MismatchError(HvdliteError):
    """The ranks do not agree on what they are about to do together."""


class GradientError(HvdliteError, AssertionError):
    """Gradients were computed, zeroed or stepped in an order that would lose some of them.

    It is an `AssertionError` too, since that is what programs written for Horovod expect here.
    """


class UnsupportedError(HvdliteError, ValueError):
    """What was asked for cannot be done: not with such a tensor, or not by that op.

    A wrong argument, and so a `ValueError`; Horovod notices it when the operation runs, where it is a `RuntimeError`.
    """


class WrongTypeError(TypeError, ValueError):
    """An argument of a type that will not do, which in Horovod is a `TypeError` or a `ValueError`, as it comes."""


class CommunicationError(HvdliteError):
    """A collective failed; the message says which one, on which rank, and why."""


class PeerLostError(CommunicationError):
    """Another rank has gone. The cause is on that rank, never on the one that raises this."""


# How gloo and NCCL say that the other end of a connection is no more.
_PEER_LOSS_WORDS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "socket closed",
    "failed to recv, got 0 bytes",
)


def says_peer_lost(error: BaseException) -> bool:
    """Whether this error, or one that it came from, means that another rank has gone."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = str(current).lower()
        if isinstance(current, PeerLostError) or any(words in text for words in _PEER_LOSS_WORDS):
            return True
        current = current.__cause__ or current.__context__
    return False


def say_where(interrupt: KeyboardInterrupt, what: str) -> None:
    """Have a Ctrl-C in a wait tell which one that was, unless it tells something already."""
    if not interrupt.args:
        interrupt.args = (f"interrupted while waiting in {what}",)
