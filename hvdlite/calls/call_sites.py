"""
Describes where this process's threads are in the user's program, for messages about stalled ranks.

    a thread's frames ── the innermost frame of the user's own code ── "train.py:41 in load_batch (time.sleep)"

It reads no file, since a hanging file system may be the cause of the stall.
"""

from __future__ import annotations

import dis
import gc
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from types import FrameType

import torch

from .. import forks

LONGEST = 300
"""Most characters of a description."""

_MOST_THREADS = 3

_LISTS_FRAMES = forks.lock_of_process()

_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_LIBRARIES = {
    *(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(*site.getsitepackages(), site.getusersitepackages()),
}
_OWN_AND_TORCH = (_OWN, _TORCH, "<frozen")
NOT_THE_USERS = (*_OWN_AND_TORCH, *(os.path.join(path, "") for path in _LIBRARIES))
"""How the paths of files begin that are not the user's: hvdlite's, PyTorch's and other libraries'."""


def places_of_threads(idents: Collection[int]) -> str:
    """Describes where at most three of these threads are, the main thread first; the main thread if none is alive."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    places: list[str] = []
    with FramesOfThreads() as frames:
        found = sorted((ident for ident in idents if ident in frames), key=lambda ident: ident != main)
        if not found and main in frames:
            found = [main]
        for ident in found[:_MOST_THREADS]:
            place = place_of(frames[ident])
            places.append(place if not places else f"thread {names.get(ident, ident)!r} at {place}")
    more = f" and {len(found) - _MOST_THREADS} more threads" if len(found) > _MOST_THREADS else ""
    # The count of further threads is never cut off.
    return ", ".join(places)[: LONGEST - len(more)] + more


class FramesOfThreads:
    """A context in which to follow the frames of all threads of this process: the garbage collector is off.

    ``with FramesOfThreads() as frames:`` gives the innermost frame of each thread, by thread ident. Follow their
    ``f_back`` only within the block:

    - `sys._current_frames` holds a lock that every starting or ending thread needs. Some versions of Python may collect
      garbage while they hold it (CPython's issue 106883), and a finalizer that lets such a thread run would deadlock
      both.
    - Python 3.11 makes the frame that ``f_back`` returns when it is asked for, and may collect garbage then. Where a
      finalizer lets the thread go on, and return from that frame, its memory is used again while it is read.

    It is no generator, whose own frame would stand for the calling thread, and lead to no other once it is suspended.
    """

    def __enter__(self) -> dict[int, FrameType]:
        # One thread at a time: another would find the collector off, and this one would turn it on during its block.
        _LISTS_FRAMES.acquire()
        self._collects = gc.isenabled()
        gc.disable()
        return sys._current_frames()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        _LISTS_FRAMES.release()


def place_of(frame: FrameType) -> str:
    """Describes the thread whose innermost frame this is, such as ``train.py:41 in load_batch (time.sleep)``."""
    own, inner = _frame_of_user(frame)
    doing = _call_under_way(own) if inner is None else _name_of(inner)
    at = f"{seen_from_here(own.f_code.co_filename)}:{own.f_lineno} in {own.f_code.co_name}"
    return f"{at} ({doing})" if doing else at


def _frame_of_user(innermost: FrameType) -> tuple[FrameType, FrameType | None]:
    """The innermost frame of the user's own code, and the Python frame that it calls, if any.

    For an installed program, which has no frame outside the libraries, it is the innermost frame that belongs neither
    to hvdlite nor to torch.
    """
    for prefixes in (NOT_THE_USERS, _OWN_AND_TORCH):
        inner = None
        for frame in outwards(innermost):
            if not frame.f_code.co_filename.startswith(prefixes):
                return frame, inner
            inner = frame
    return innermost, None


def outwards(innermost: FrameType) -> Iterator[FrameType]:
    """Yields a frame, the one that called it, and so on; see `FramesOfThreads`."""
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def seen_from_here(path: str) -> str:
    """The path relative to the working directory if it is inside; unchanged if that directory no longer exists."""
    try:
        return path.removeprefix(os.path.join(os.getcwd(), ""))
    except OSError:
        return path


def _name_of(frame: FrameType) -> str:
    module = str(frame.f_globals.get("__name__", "?"))
    # Users know hvdlite's functions by their public names.
    module = "hvdlite" if module.startswith("hvdlite.") else module
    # Python 3.10 has no `co_qualname`.
    return f"{module}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"


def _call_under_way(frame: FrameType) -> str:
    """The non-Python function that the frame is calling, such as ``time.sleep``; empty where that is unknown."""
    if sys.version_info < (3, 11):
        return ""
    instructions = list(dis.get_instructions(frame.f_code))
    at = next((place for place, each in enumerate(instructions) if each.offset == frame.f_lasti), None)
    if at is None or not instructions[at].opname.startswith("CALL"):
        return ""
    begins = _beginning_of(instructions[at])
    names: list[str] = []
    for each in instructions[:at]:
        # The callee is a name and its attributes, at the position where the call expression begins.
        if each.opname.startswith("LOAD_") and _beginning_of(each) == begins:
            is_attribute = "ATTR" in each.opname or "METHOD" in each.opname
            names = [*names, str(each.argval)] if is_attribute else [str(each.argval)]
    return ".".join(names)


def _beginning_of(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    """The line and column where the instruction's expression begins."""
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)
