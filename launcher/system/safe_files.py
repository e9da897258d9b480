"""Creates files, also in directories that other users can write, without following another user's links.

The path is walked name by name. Each directory is held open while the next name in it is looked up, so nobody can
exchange a part of the path. Symbolic links of the user or of root are followed; another user's is an error that names
it. So the owner and mode of a directory do not matter: users who can write it may remove files, but cannot make us
write elsewhere. A file that another user owns, or that has other hard links, is replaced by a new one.
"""

from __future__ import annotations

import errno
import os
import stat

_NOT_REGULAR = "it exists, and is not a regular file of yours: give another name"
_MOST_LINKS = 40  # the kernel's limit
_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINK = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignLinkError(OSError):
    """A symbolic link that another user owns."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "it is a symbolic link of another user: give the path that it points to", path)


def create(path: str) -> int:
    """Creates an empty file, and missing directories, and returns its descriptor. An OSError names the path."""
    links = 0
    while True:
        at, name, walked = _walk(path)
        try:
            target = _create_at(at, name, walked)
        finally:
            os.close(at)
        if isinstance(target, int):
            return target
        links += 1
        _no_more_than(_MOST_LINKS, links, path)
        path = os.path.join(os.path.dirname(walked), target)


def write_all(fd: int, data: bytes) -> None:
    """Writes all of the data; an OSError also where the file has been removed, so that nobody could read it."""
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "it was removed")
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _no_more_than(most: int, links: int, path: str) -> None:
    if links > most:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _walk(path: str) -> tuple[int, str, str]:
    """Returns the open directory of a path, the last name of the path, and the path without links.

    Creates missing directories. The caller closes the descriptor.
    """
    left = os.path.join(os.getcwd(), path).split("/")[::-1]
    at, walked, links = os.open("/", _DIRECTORY), ["/"], 0
    try:
        while (name := left.pop()) in ("", ".") or any(part not in ("", ".") for part in left):
            if name in ("", "."):
                continue
            here = os.path.join(*walked, name)
            target = _link_at(at, name, here)
            if target is None:
                down = _open_directory(at, name, here)
                walked = walked[:-1] or ["/"] if name == ".." else [*walked, name]
            else:
                links += 1
                _no_more_than(_MOST_LINKS, links, here)
                left += target.split("/")[::-1]
                if not target.startswith("/"):
                    continue
                down, walked = os.open("/", _DIRECTORY), ["/"]
            os.close(at)
            at = down
    except BaseException:
        os.close(at)
        raise
    return at, name, os.path.join(*walked, name)


def _link_at(at: int, name: str, path: str) -> str | None:
    """Returns the target of the link with this name, or None if it is no link.

    Raises `ForeignLinkError` if another user owns it.
    """
    try:
        if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            return None
        if not hasattr(os, "O_PATH"):  # without it, owner and target cannot be read of the same link atomically
            owner, target = os.stat(name, dir_fd=at, follow_symlinks=False).st_uid, os.readlink(name, dir_fd=at)
        else:
            link = os.open(name, _LINK, dir_fd=at)
            try:
                owner, target = os.fstat(link).st_uid, os.readlink("", dir_fd=link)
            finally:
                os.close(link)
    except FileNotFoundError:
        return None
    if owner not in (os.geteuid(), 0):
        raise ForeignLinkError(path)
    return target


def _open_directory(at: int, name: str, path: str) -> int:
    try:
        try:
            return os.open(name, _DIRECTORY, dir_fd=at)
        except FileNotFoundError:
            os.mkdir(name, dir_fd=at)
            return os.open(name, _DIRECTORY, dir_fd=at)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _create_at(at: int, name: str, path: str) -> int | str:
    """Returns the open file, or the target of a link of the user."""
    try:
        try:
            return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at)
        except FileExistsError:
            if target := _link_at(at, name, path):
                return target
        kind = os.stat(name, dir_fd=at, follow_symlinks=False)
        if stat.S_ISREG(kind.st_mode) and not _is_ours(kind):
            os.unlink(name, dir_fd=at)
            return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=at)
        opened = os.open(name, _WRITE | os.O_NONBLOCK, dir_fd=at)  # a pipe without a reader would block
    except ForeignLinkError:
        raise
    except OSError as error:
        if error.errno == errno.ENXIO:  # such a pipe, or a socket
            raise OSError(errno.EEXIST, _NOT_REGULAR, path) from None
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    kind = os.fstat(opened)
    if stat.S_ISREG(kind.st_mode) and _is_ours(kind):
        os.ftruncate(opened, 0)
    elif not stat.S_ISCHR(kind.st_mode):  # allows /dev/null
        os.close(opened)
        raise OSError(errno.EEXIST, _NOT_REGULAR, path)
    os.set_blocking(opened, True)
    return opened


def _is_ours(file: os.stat_result) -> bool:
    return file.st_uid == os.geteuid() and file.st_nlink == 1
