"""
Creates and appends to files in directories where other users can write too, such as /tmp.

It never follows a symbolic link that another user has made: that raises an OSError that names the link. Links of this
user and of root are followed. The path is resolved one name at a time, and each directory is kept open while the next
name is looked up in it, so that nobody can replace it in between. `timeline` and `optim` write their files with these
functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_LINKS = 40  # the kernel's own limit
# O_PATH does not exist on every system. Without it, directories on the path must be readable.
_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_DIRECTORY = _PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666  # the umask removes bits from it


def create(path: str) -> int:
    """Creates a file and returns its descriptor, open to read and write. Removes a file or link of this name first."""
    with _directory_of(path, follow_last=False) as (at, name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
        return os.open(name, os.O_RDWR | os.O_EXCL | _FILE, _MODE, dir_fd=at)


def append(path: str, text: str) -> None:
    """Appends text to a file; creates the file if needed."""
    if os.path.dirname(path) in ("/dev", "/dev/fd"):
        # Links in there point to pipes and terminals, which have no path to resolve. Only root can create them.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    else:
        with _directory_of(path, follow_last=True) as (at, name):
            descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | _FILE, _MODE, dir_fd=at)
    with open(descriptor, "a", encoding="utf-8") as file:
        file.write(text)


def require_directory(path: str) -> None:
    """Raises an OSError unless the directory of the file exists and is reached without another user's links."""
    with _directory_of(path, follow_last=False):
        pass


@contextmanager
def _directory_of(path: str, *, follow_last: bool) -> Iterator[tuple[int, str]]:
    """Yields the open directory of a path and the last name in it; closes the directory at the end.

    Unless ``follow_last``, the last name may be that of a link.
    """
    try:
        at, name = _walk(path, follow_last=follow_last)
        try:
            yield at, name
        finally:
            os.close(at)
    except OSError as error:
        # The original error names only one part of the path.
        raise OSError(error.errno, error.strerror, path) from None


def _walk(path: str, *, follow_last: bool) -> tuple[int, str]:
    """Resolves a path; returns the open directory of its last name, and that name."""
    left, links = os.path.join(os.getcwd(), path).split("/")[::-1], 0
    at = os.open("/", _DIRECTORY)
    try:
        while name := _next_name(left):
            is_last = not any(part not in ("", ".") for part in left)
            target = None if is_last and not follow_last else _target_of_link(at, name)
            if target is not None:
                links = _one_more(links)
                left += target.split("/")[::-1]
                if target.startswith("/"):
                    at = _step(at, os.open("/", _DIRECTORY))
            elif is_last:
                return at, name
            else:
                at = _step(at, os.open(name, _DIRECTORY, dir_fd=at))
        return _step(at, os.open("/", _DIRECTORY)), "."
    except BaseException:
        os.close(at)
        raise


def _one_more(links: int) -> int:
    if links == _MOST_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return links + 1


def _next_name(left: list[str]) -> str:
    """Removes and returns the next name of a path; empty at its end. ``left`` holds the names in reverse order."""
    while left:
        name = left.pop()
        if name not in ("", "."):
            return name
    return ""


def _step(at: int, down: int) -> int:
    os.close(at)
    return down


def _target_of_link(at: int, name: str) -> str | None:
    """Returns the target of the link of this name; None if it is no link. Raises an OSError for another user's link."""
    try:
        if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            return None
        if hasattr(os, "O_PATH"):
            link = os.open(name, _PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            try:
                owner, target = os.fstat(link).st_uid, os.readlink("", dir_fd=link)
            finally:
                os.close(link)
        else:  # without O_PATH, owner and target need two system calls
            owner, target = os.stat(name, dir_fd=at, follow_symlinks=False).st_uid, os.readlink(name, dir_fd=at)
    except FileNotFoundError:
        return None
    if owner not in (os.geteuid(), 0):
        raise OSError(errno.ELOOP, f"{name!r} is a symbolic link of another user: pass the path that it points to")
    return target
