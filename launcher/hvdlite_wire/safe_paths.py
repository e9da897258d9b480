"""
Makes and appends to files in directories where other users can write too, such as /tmp.

It never follows a symbolic link that another user has made: that is an error that names the link. Links of this user
and of root are followed. A path is walked name by name, and each directory is held open while the next name is looked
up in it. So whoever owns or may write a directory can remove files, but cannot make us write elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

_NOT_REGULAR = "it exists, and is not a regular file of yours: give another name"
_MOST_LINKS = 40  # the kernel's limit
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = _PATH | os.O_DIRECTORY
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666  # the umask removes bits from it


class ForeignLinkError(OSError):
    """A symbolic link that another user owns."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "it is a symbolic link of another user: pass the path that it points to", path)


def write_file(path: str) -> int:
    """Makes an empty file, and missing directories, and returns its descriptor. An OSError names the path.

    A file that another user owns, or that has other hard links, is replaced by a new one.
    """
    return _open(path, _open_to_write, makes_directories=True)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of the data; an OSError also where the file has been removed, so that nobody could read it."""
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "it was removed")
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def new_file(path: str) -> int:
    """Makes a file and returns its descriptor, open to read and write. Removes a file or link of this name first."""

    def open_new(at: int, name: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
        return os.open(name, os.O_RDWR | _NEW, _MODE, dir_fd=at)

    return _open(path, open_new, follows_last=False)


def append(path: str, text: str) -> None:
    """Appends text to a file; makes the file if needed."""
    if os.path.dirname(path) in ("/dev", "/dev/fd"):
        # Links in there point to pipes and terminals, which have no path to walk. Only root can make them.
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    else:
        fd = _open(path, lambda at, name: os.open(name, _WRITE | os.O_APPEND | os.O_CREAT, _MODE, dir_fd=at))
    with open(fd, "a", encoding="utf-8") as file:
        file.write(text)


def require_directory(path: str) -> None:
    """Raises an OSError unless the directory of the file exists and is reached without another user's links."""
    os.close(_open(path, lambda at, name: os.dup(at), follows_last=False))


def _open(
    path: str, open_at: Callable[[int, str], int], *, makes_directories: bool = False, follows_last: bool = True
) -> int:
    """Returns ``open_at(directory, last name)`` of a path; its errors get the path.

    Unless ``follows_last``, the last name may be that of a link.
    """
    at, name, walked = _walk(path, makes_directories, follows_last)
    try:
        return open_at(at, name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, walked) from None
    finally:
        os.close(at)


def _walk(path: str, makes_directories: bool, follows_last: bool) -> tuple[int, str, str]:
    """Returns the directory of a path, open, the last name of the path, and the path without links."""
    left = _names(os.path.join(os.getcwd(), path))
    at, walked, links = os.open("/", _DIRECTORY), ["/"], 0
    try:
        while True:
            _require(bool(left), errno.EISDIR, path)
            name = left.pop()
            here = os.path.join(*walked, name)
            target = _target_of_link(at, name, here) if left or follows_last else None
            if target is not None:
                links += 1
                _require(links <= _MOST_LINKS, errno.ELOOP, here)
                left += _names(target)
                if not target.startswith("/"):
                    continue
                down, walked = os.open("/", _DIRECTORY), ["/"]
            elif left:
                down = _open_directory(at, name, here, makes_directories)
                walked = walked[:-1] or ["/"] if name == ".." else [*walked, name]
            else:
                return at, name, here
            os.close(at)
            at = down
    except BaseException:
        os.close(at)
        raise


def _require(holds: bool, error: int, path: str) -> None:
    if not holds:
        raise OSError(error, os.strerror(error), path)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")][::-1]


def _target_of_link(at: int, name: str, path: str) -> str | None:
    """Returns the target of a link, None if it is no link; a `ForeignLinkError` if another user owns it."""
    try:
        if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            return None
        # Held open, so that both are of the same link.
        link = os.open(name, _PATH, dir_fd=at)
        try:
            owner, target = os.fstat(link).st_uid, os.readlink("", dir_fd=link)
        finally:
            os.close(link)
    except FileNotFoundError:
        return None
    if owner not in (os.geteuid(), 0):
        raise ForeignLinkError(path)
    return target


def _open_directory(at: int, name: str, path: str, makes_directories: bool) -> int:
    try:
        try:
            return os.open(name, _DIRECTORY, dir_fd=at)
        except FileNotFoundError:
            if not makes_directories:
                raise
            with contextlib.suppress(FileExistsError):  # another process was first
                os.mkdir(name, dir_fd=at)
            return os.open(name, _DIRECTORY, dir_fd=at)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _open_to_write(at: int, name: str) -> int:
    try:
        return os.open(name, os.O_WRONLY | _NEW, _MODE, dir_fd=at)
    except FileExistsError:
        pass
    kind = os.stat(name, dir_fd=at, follow_symlinks=False)
    if stat.S_ISREG(kind.st_mode) and not _is_ours(kind):
        os.unlink(name, dir_fd=at)
        return os.open(name, os.O_WRONLY | _NEW, _MODE, dir_fd=at)
    try:
        opened = os.open(name, _WRITE | os.O_NONBLOCK, dir_fd=at)  # a pipe without a reader would block
    except OSError as error:
        if error.errno == errno.ENXIO:  # such a pipe, or a socket
            raise OSError(errno.EEXIST, _NOT_REGULAR) from None
        raise
    kind = os.fstat(opened)
    if stat.S_ISREG(kind.st_mode) and _is_ours(kind):
        os.ftruncate(opened, 0)
    elif not stat.S_ISCHR(kind.st_mode):  # allows /dev/null
        os.close(opened)
        raise OSError(errno.EEXIST, _NOT_REGULAR)
    os.set_blocking(opened, True)
    return opened


def _is_ours(file: os.stat_result) -> bool:
    return file.st_uid == os.geteuid() and file.st_nlink == 1
