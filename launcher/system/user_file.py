"""Reads a file that the user named, up to a maximal size; all its errors fit in one line."""

from __future__ import annotations

from ..errors import UsageError


def read_user_file(path: str, *, max_bytes: int, what: str) -> bytes:
    """Returns the file's bytes. A `UsageError` begins with a colon, to follow the result of `name_file`."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f": {reason.lower()}") from error
    if len(data) > max_bytes:
        raise UsageError(f": too large for {what}: more than {max_bytes} bytes")
    return data


def name_file(flag: str, path: str) -> str:
    """Returns the flag and the file's name for a message, as one line whatever characters the name has."""
    return f"{flag} {path if path.isprintable() and path else repr(path)}"
