"""
Installs exception hooks that shorten the traceback of an uncaught error to the user's own lines.

    PeerLostError, KeyboardInterrupt              one line, because the cause is elsewhere
    other errors of hvdlite's, wrong arguments    the traceback without hvdlite's own frames
    all others                                    unchanged

The hooks call the ones that were installed before: PyTorch's, which prefixes each line with the rank, or a user's own.
A user's hook gets the shortened traceback, and never the single line.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from ..calls.call_sites import seen_from_here
from ..errors import CommunicationError, HvdliteError, PeerLostError, says_peer_lost

_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# Path prefixes of files that are not the user's: hvdlite, PyTorch, threading, and Python's import system.
_INTERNAL = (_OWN, os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""), threading.__file__, "<frozen ")
# The modules whose hooks are not a user's, with the variable in which each hook keeps the hook installed before it.
_HOOKS = {__name__: "previous", "torch.distributed.distributed_c10d": "old_hook"}


def shorten_tracebacks() -> None:
    """Installs the hooks. It may be called again if other hooks have been installed since."""
    if getattr(sys.excepthook, "__module__", None) != __name__:
        sys.excepthook = _hook_before(sys.excepthook)
    if getattr(threading.excepthook, "__module__", None) != __name__:
        threading.excepthook = _thread_hook_before(threading.excepthook)


def remove_hooks() -> None:
    """Removes hvdlite's and PyTorch's hooks of an earlier world, or each world of an elastic job would add to them."""
    hook = _last_hook(sys.excepthook)
    if callable(hook):
        sys.excepthook = hook


def _hook_before(previous: Callable[..., Any]) -> Callable[..., Any]:
    is_users = _last_hook(previous) is not sys.__excepthook__

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with _shortened(error, traceback, in_one_line=not is_users) as shown:
            previous(kind, error, shown)

    return hook


def _thread_hook_before(previous: Callable[..., Any]) -> Callable[..., Any]:
    is_users = _last_hook(previous) is not threading.__excepthook__

    def hook(told: threading.ExceptHookArgs) -> None:
        if told.exc_value is None:
            previous(told)
            return
        with _shortened(told.exc_value, told.exc_traceback, in_one_line=not is_users) as shown:
            previous(threading.ExceptHookArgs((told.exc_type, told.exc_value, shown, told.thread)))

    return hook


def _last_hook(hook: object) -> object:
    """Follows the chain of hvdlite's and PyTorch's hooks to the last one: Python's own, or a user's."""
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
    """Shortens the tracebacks of the error and its causes within the block; yields the error's traceback.

    ``in_one_line``: also replaces the message by the single line, if there is one. Restores everything at the end.
    """
    args, line = error.args, _one_line(error, traceback) if in_one_line else None
    chain = _chain(error)
    kept = [(each.__traceback__, each.__cause__, each.__context__, each.__suppress_context__) for each in chain]
    try:
        for each in chain:
            _shorten(each)
        if line is not None:
            error.args = (line,)
            error.__traceback__ = error.__cause__ = error.__context__ = None
        yield error.__traceback__
    finally:
        error.args = args
        for each, (own, cause, context, is_suppressed) in zip(chain, kept, strict=True):
            each.__traceback__, each.__cause__, each.__context__ = own, cause, context
            each.__suppress_context__ = is_suppressed


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and the causes that Python would print with it."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is each for each in chain):
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _shorten(error: BaseException) -> None:
    """Removes the frames below the user's last line, and a cause that was raised inside hvdlite or PyTorch."""
    if not _is_told(error):
        return
    error.__traceback__ = _users_part(error.__traceback__)
    cause = error.__cause__ or error.__context__
    if cause is not None and _users_part(cause.__traceback__) is None:
        error.__cause__ = error.__context__ = None


def _is_told(error: BaseException) -> bool:
    """Whether hvdlite raised the error on purpose, in a call from the user's code."""
    entries = _entries(error.__traceback__)
    if not any(map(_is_users, entries)):
        return False
    if isinstance(error, KeyboardInterrupt):
        return _called(entries) is not None
    last = entries[-1]
    is_own = _file_of(last).startswith(_OWN)
    if isinstance(error, ValueError | TypeError):
        # Without a ``raise`` statement it is a bug in hvdlite, and is shown in full.
        return is_own and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return isinstance(error, HvdliteError) or (isinstance(error, OSError) and is_own)


def _one_line(error: BaseException, traceback: TracebackType | None) -> str | None:
    """Returns the single line for an error whose cause is elsewhere, with the user's line; None for other errors."""
    entries = _entries(traceback)
    if isinstance(error, KeyboardInterrupt):
        called = _called(entries)
        words = str(error) or (f"interrupted in {called}()" if called else "interrupted")
    elif isinstance(error, PeerLostError) or (isinstance(error, CommunicationError) and says_peer_lost(error)):
        words = " ".join(str(error).split())
    else:
        return None
    users = next((entry for entry in reversed(entries) if _is_users(entry)), None)
    return words if users is None else f"{words} (at {seen_from_here(_file_of(users))}:{users.tb_lineno})"


def _called(entries: list[TracebackType]) -> str | None:
    """Returns the name of hvdlite's function that the user's last line called; None if it called none."""
    name = None
    for entry in reversed(entries):
        if _is_users(entry):
            return name
        if _file_of(entry).startswith(_OWN):
            name = entry.tb_frame.f_code.co_name
    return None


def _users_part(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the traceback up to the user's last line; None if it has no line of the user's."""
    part: TracebackType | None = None
    for entry in reversed(_entries(traceback)):
        if part is not None or _is_users(entry):
            part = TracebackType(part, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return part


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _is_users(entry: TracebackType) -> bool:
    return not _file_of(entry).startswith(_INTERNAL)


def _file_of(entry: TracebackType) -> str:
    name = entry.tb_frame.f_code.co_filename
    return name if name.startswith("<") else os.path.abspath(name)
