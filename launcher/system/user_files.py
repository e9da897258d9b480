"""Files that the user has named: read up to a maximal size, or replaced as a whole for other programs.

All errors fit in one line. What a job leaves is tried before the job, and written under another name first, so a reader
never sees half of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError, why_not_written

# The modes of a file that a program creates, which node_exporter, another user, must be able to read.
_MODE = 0o644


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


def replace_file(path: str, text: str) -> None:
    """Writes a file as a whole: a reader sees the old one or the new one."""
    fd, temporary = _make_beside(path)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            os.fchmod(fd, _MODE)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@dataclass
class ReplacedFile:
    """A file that a flag asks for. That it cannot be written is said once, until it can be again.

    ``name`` begins what is said, and ``after`` ends it.
    """

    name: str
    path: str
    say: Callable[[str], object]
    after: str = ""
    _has_failed: bool = False

    def write(self, text: str) -> None:
        has_failed, self._has_failed = self._has_failed, False
        try:
            replace_file(self.path, text)
        except OSError as error:
            self._has_failed = True
            if not has_failed:
                self.say(f"{self.name}: cannot be written: {why_not_written(error)}{self.after}")


def write_json(flag: str, path: str, data: object, say: Callable[[str], object]) -> None:
    """Writes a file that a flag asks for, or tells the user that it cannot be written."""
    write_text(flag, path, json.dumps(data, indent=1) + "\n", say)


def write_text(flag: str, path: str, text: str, say: Callable[[str], object]) -> None:
    """Does what `write_json` does with a text."""
    ReplacedFile(f"{flag} {path}", path, say).write(text)


def require_writable(flag: str, path: str) -> None:
    """Raises `UsageError` if a file with this path cannot be written: no job is started then."""
    if not path:
        raise UsageError(f"{flag}: '' is not the name of a file")
    if os.path.isdir(path) or not os.path.basename(path):
        raise UsageError(f"{flag}: {path!r} is a directory: give the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):
        # It would be replaced: root's job would destroy /dev/null.
        raise UsageError(f"{flag}: {path!r} is not a regular file, which it would be replaced by: give another name")
    _try(flag, path)


def require_directory(flag: str, path: str) -> None:
    """Makes a directory if it is missing; raises `UsageError` if no file can be made in it."""
    if not path:
        raise UsageError(f"{flag}: '' is not the name of a directory, such as reports")
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag}: cannot make the directory {path}: {why_not_written(error)}") from error
    _try(flag, os.path.join(path, "report"))


def _try(flag: str, path: str) -> None:
    try:
        fd, temporary = _make_beside(path)
        os.close(fd)
        os.unlink(temporary)
    except OSError as error:
        directory = os.path.dirname(path) or "."
        way = "create it first" if isinstance(error, FileNotFoundError) else "choose another, or allow it"
        why = f"no file can be made in {directory} ({why_not_written(error)}): {way}"
        raise UsageError(f"{flag}: cannot write {path}: {why}") from error


def _make_beside(path: str) -> tuple[int, str]:
    return tempfile.mkstemp(prefix=f".{os.path.basename(path)[:100]}.", dir=os.path.dirname(path) or ".")
