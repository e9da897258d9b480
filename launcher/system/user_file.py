"""Reads a file that the user named, up to a maximal size; all its errors fit in one line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ..errors import UsageError
from .terminal_text import say

# A pipe has no end as long as another program may still write to it, and a network file system may not answer.
_LONG_S = 5.0


def read_user_file(path: str, *, max_bytes: int, what: str) -> bytes:
    """Returns the file's bytes. A `UsageError` begins with a colon, to follow the result of `name_file`."""
    try:
        with _told_if_it_takes_long(path), open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f": {reason.lower()}") from error
    if len(data) > max_bytes:
        raise UsageError(f": too large for {what}: more than {max_bytes} bytes")
    return data


@contextlib.contextmanager
def _told_if_it_takes_long(path: str) -> Iterator[None]:
    words = f"still reading {path!r}: if it is a pipe, this ends once the program that writes to it has closed it"
    timer = threading.Timer(_LONG_S, say, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def name_file(flag: str, path: str) -> str:
    """Returns the flag and the file's name for a message, as one line whatever characters the name has."""
    return f"{flag} {path if path.isprintable() and path else repr(path)}"
