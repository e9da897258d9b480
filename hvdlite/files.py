"""
Files that are written where others may write too: never through a symbolic link that another user has put there.

The path is walked name by name, each directory held while its next name is looked up, so that nothing can be exchanged
meanwhile. A link is followed if it is this user's own, or root's; another user's is an OSError that names it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_LINKS = 40  # as the kernel has it
# Not there on every system: what is held then has to be readable.
_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_DIRECTORY = _PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666  # less what the user's umask takes away


def create(path: str) -> int:
    """Open a new file to write and read, in place of what has this name; a link in its place is removed as well."""
    with _directory_of(path, follow_last=False) as (at, name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
        return os.open(name, os.O_RDWR | os.O_EXCL | _FILE, _MODE, dir_fd=at)


def append(path: str, text: str) -> None:
    """Add text to a file, which is made if it is not there."""
    if os.path.dirname(path) in ("/dev", "/dev/fd"):
        # There links lead to what has no name, and nobody but root makes them.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    else:
        with _directory_of(path, follow_last=True) as (at, name):
            descriptor = os.open(name, os.O_WRONLY | os.O_APPEND | _FILE, _MODE, dir_fd=at)
    with open(descriptor, "a", encoding="utf-8") as file:
        file.write(text)


def require_directory(path: str) -> None:
    """An OSError unless the directory of a file is there, and no other user's link leads to it."""
    with _directory_of(path, follow_last=False):
        pass


@contextmanager
def _directory_of(path: str, *, follow_last: bool) -> Iterator[tuple[int, str]]:
    """The directory of a path, open, and the last name in it, which may be that of a link unless it is followed."""
    try:
        at, name = _walk(path, follow_last=follow_last)
        try:
            yield at, name
        finally:
            os.close(at)
    except OSError as error:
        # By the whole path, and not by one name of it.
        raise OSError(error.errno, error.strerror, path) from None


def _walk(path: str, *, follow_last: bool) -> tuple[int, str]:
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
    """The next name of a path, its names last first; empty if there is none."""
    while left:
        name = left.pop()
        if name not in ("", "."):
            return name
    return ""


def _step(at: int, down: int) -> int:
    os.close(at)
    return down


def _target_of_link(at: int, name: str) -> str | None:
    """Where the link of this name leads; None if there is none, and an OSError if it is another user's."""
    try:
        if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            return None
        if hasattr(os, "O_PATH"):
            link = os.open(name, _PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            try:
                owner, target = os.fstat(link).st_uid, os.readlink("", dir_fd=link)
            finally:
                os.close(link)
        else:  # then its owner and where it leads cannot be asked at once
            owner, target = os.stat(name, dir_fd=at, follow_symlinks=False).st_uid, os.readlink(name, dir_fd=at)
    except FileNotFoundError:
        return None
    if owner not in (os.geteuid(), 0):
        raise OSError(errno.ELOOP, f"{name!r} is a link that another user made: name the place that it leads to")
    return target
