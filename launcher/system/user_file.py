"""Reads a file that the user names, if it is not too long; whatever is wrong with it is told in one line."""

from __future__ import annotations

from ..errors import UsageError


def read_user_file(path: str, *, max_bytes: int, what: str) -> bytes:
    """All of it. A `UsageError` begins with a colon, to follow what `name_file` gives."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f": {reason.lower()}") from error
    if len(data) > max_bytes:
        raise UsageError(f": too long for {what}, more than {max_bytes} bytes")
    return data


def name_file(flag: str, path: str) -> str:
    """How a message names it, in one line whatever its name holds."""
    return f"{flag} {path if path.isprintable() and path else repr(path)}"
