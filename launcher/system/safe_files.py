"""Creates files in directories that others can write too, and never through a link that another user made.

The path is walked name by name, each directory held while its next name is looked up, so that nothing can be
exchanged meanwhile. A symbolic link is followed if it is the user's own, or root's: another user's is refused, and
named. What owner and mode a directory has does not matter then: in one that others can write they may remove what
lies there, but not make us write elsewhere. A file of another user's, or one that has further names, is not written:
a new one takes its place.
"""

from __future__ import annotations

import errno
import os
import stat

_MOST_LINKS = 40  # as the kernel has it
_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINK = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC


class ForeignLinkError(OSError):
    """A symbolic link that is another user's."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ELOOP, "it is a link that another user made: name the place that it leads to", path)


def create(path: str) -> int:
    """Open an empty file at ``path`` to write, with the directories that it takes. An OSError names what is wrong."""
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


def _no_more_than(most: int, links: int, path: str) -> None:
    if links > most:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _walk(path: str) -> tuple[int, str, str]:
    """The directory of a path, made where it is missing and open; the last name in it, and what path it has there."""
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
    """Where the link of this name leads; None if there is none, and `ForeignLinkError` if it is another user's."""
    try:
        if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            return None
        if not hasattr(os, "O_PATH"):  # then its owner and where it leads cannot be asked at once
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
    """The open file; or, where a link of the user's lies there, where that leads."""
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
        opened = os.open(name, _WRITE | os.O_NONBLOCK, dir_fd=at)  # nobody may ever read a pipe
    except ForeignLinkError:
        raise
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    kind = os.fstat(opened)
    if stat.S_ISREG(kind.st_mode) and _is_ours(kind):
        os.ftruncate(opened, 0)
    elif not stat.S_ISCHR(kind.st_mode):  # /dev/null, say
        os.close(opened)
        raise OSError(errno.EEXIST, "there is something that is not a file of yours", path)
    os.set_blocking(opened, True)
    return opened


def _is_ours(file: os.stat_result) -> bool:
    return file.st_uid == os.geteuid() and file.st_nlink == 1
