"""
Shortens the traceback of an uncaught error to the message and the user's own lines.

    PeerLostError, KeyboardInterrupt in a wait    one line: the cause is elsewhere
    other errors of hvdlite's, wrong arguments    the traceback as far as the user's own lines
    all others                                    as they are

The hooks stand before those that there are, PyTorch's (which begins each line with the rank) and a user's own: these
are called as ever. A user's own is given the shortened traceback, and never the one line.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from ..control.call_sites import seen_from_here
from ..errors import CommunicationError, HvdliteError, PeerLostError, says_peer_lost

# The package that this one lies in.
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# How files begin whose lines are not the user's: hvdlite's, PyTorch's, threading's, and those that import programs.
_INTERNAL = (_OWN, os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""), threading.__file__, "<frozen ")
# The hooks that are not a user's, by their module, and what each calls the one that it stands before.
_HOOKS = {__name__: "previous", "torch.distributed.distributed_c10d": "old_hook"}


def shorten_tracebacks() -> None:
    """Print uncaught errors in short from now on. May be called again, where other hooks have been set since."""
    _shorten_in_main_thread()
    _shorten_in_other_threads()


def _shorten_in_main_thread() -> None:
    previous = sys.excepthook
    if _is_ours(previous):
        return
    is_users = _last_hook(previous) is not sys.__excepthook__

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with _shortened(error, traceback, in_one_line=not is_users) as shown:
            previous(kind, error, shown)

    sys.excepthook = hook


def _shorten_in_other_threads() -> None:
    previous = threading.excepthook
    if _is_ours(previous):
        return
    is_users = _last_hook(previous) is not threading.__excepthook__

    def hook(told: threading.ExceptHookArgs) -> None:
        if told.exc_value is None:
            previous(told)
            return
        with _shortened(told.exc_value, told.exc_traceback, in_one_line=not is_users) as shown:
            previous(threading.ExceptHookArgs((told.exc_type, told.exc_value, shown, told.thread)))

    threading.excepthook = hook


def _is_ours(hook: object) -> bool:
    return getattr(hook, "__module__", None) == __name__


def _last_hook(hook: object) -> object:
    """The one behind ours and PyTorch's: Python's own, or a user's."""
    while name := _HOOKS.get(getattr(hook, "__module__", "")):
        behind = inspect.getclosurevars(hook).nonlocals.get(name) if inspect.isfunction(hook) else None
        if behind is None:
            return hook
        hook = behind
    return hook


@contextmanager
def _shortened(
    error: BaseException, traceback: TracebackType | None, *, in_one_line: bool
) -> Iterator[TracebackType | None]:
    """Within it the error and its causes have the tracebacks that are to be printed; gives the error's."""
    kept: list[tuple[BaseException, TracebackType | None, BaseException | None, BaseException | None, bool]] = []
    args = error.args
    line = _one_line(error, traceback) if in_one_line else None
    try:
        for each in _chain(error):
            own = each.__traceback__
            kept.append((each, own, each.__cause__, each.__context__, each.__suppress_context__))
            _shorten(each)
        if line is not None:
            error.args = (line,)
            error.__traceback__ = error.__cause__ = error.__context__ = None
        yield error.__traceback__
    finally:
        error.args = args
        for each, own, cause, context, is_suppressed in kept:
            each.__traceback__, each.__cause__, each.__context__ = own, cause, context
            each.__suppress_context__ = is_suppressed


def _chain(error: BaseException) -> list[BaseException]:
    """The error and those it came from, as far as they would be printed."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is each for each in chain):
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _shorten(error: BaseException) -> None:
    """Leave what is below the user's own lines, and causes that are hvdlite's own to know, out of what is printed."""
    if not _is_told(error, error.__traceback__):
        return
    error.__traceback__ = _users_part(error.__traceback__)
    cause = error.__cause__ or error.__context__
    if cause is not None and _users_part(cause.__traceback__) is None:
        error.__cause__ = error.__context__ = None


def _is_told(error: BaseException, traceback: TracebackType | None) -> bool:
    """Whether hvdlite has raised it to tell the user something, in a call of the user's."""
    entries = list(_entries(traceback))
    if not entries or _users_part(traceback) is None:
        return False
    if isinstance(error, KeyboardInterrupt):
        return _called(entries) is not None
    is_own = _file_of(entries[-1]).startswith(_OWN)
    if isinstance(error, ValueError | TypeError):
        return is_own and _is_raised(entries[-1])
    return isinstance(error, HvdliteError) or (isinstance(error, OSError) and is_own)


def _is_raised(entry: TracebackType) -> bool:
    """Whether it came from a ``raise``. One that did not is a fault of hvdlite's own, which is to be seen whole."""
    return entry.tb_frame.f_code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _one_line(error: BaseException, traceback: TracebackType | None) -> str | None:
    """All there is to say of an error whose cause is elsewhere, and where it happened; None of other errors."""
    entries = list(_entries(traceback))
    if isinstance(error, KeyboardInterrupt):
        if not _is_told(error, traceback):
            return None
        words = str(error) or f"interrupted in {_called(entries)}()"
    elif isinstance(error, PeerLostError) or (isinstance(error, CommunicationError) and says_peer_lost(error)):
        words = " ".join(str(error).split())
    else:
        return None
    users = [entry for entry in entries if _is_users(entry)]
    return f"{words} (at {_place(users[-1])})" if users else words


def _called(entries: list[TracebackType]) -> str | None:
    """The function of hvdlite's that was called from the user's last line; None where it was none."""
    name = None
    for entry in reversed(entries):
        if _is_users(entry):
            return name
        if _file_of(entry).startswith(_OWN):
            name = entry.tb_frame.f_code.co_name
    return None


def _users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback as far as the last line that is the user's; None where there is no such."""
    part: TracebackType | None = None
    for entry in reversed(list(_entries(traceback))):
        if part is not None or _is_users(entry):
            part = TracebackType(part, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return part


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_users(entry: TracebackType) -> bool:
    return not _file_of(entry).startswith(_INTERNAL)


def _file_of(entry: TracebackType) -> str:
    name = entry.tb_frame.f_code.co_filename
    return name if name.startswith("<") else os.path.abspath(name)


def _place(entry: TracebackType) -> str:
    return f"{seen_from_here(_file_of(entry))}:{entry.tb_lineno}"
