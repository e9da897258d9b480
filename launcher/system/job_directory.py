"""Makes the private directory of a job on one host, holds it while it is used, and removes those of dead jobs.

Its agent holds a lock on it, which the system drops when that ends, however it does; so what the next job finds
without a lock is nobody's. A file system that hosts share may know nothing of other hosts' locks: a note in the
directory says in which boot of which machine it was made, and only that machine clears it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile

from ..errors import LauncherError
from .machine import boot_id

_NAME = re.compile(r"hvdlite-[0-9a-f]{16}-[0-9]+")  # as in `plan.job_dir`, with the tokens of `agents`
_NOTE = "boot"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 10


def temporary_directory() -> str:
    """Where such directories lie here; a `LauncherError` if there is no such place that can be written."""
    try:
        return tempfile.gettempdir()
    except OSError:
        places = ", ".join(dict.fromkeys([os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"]))
        raise LauncherError(
            f"no temporary directory can be written (no room, no inodes, or read-only: df -i says): {places}; "
            "make room there, or let TMPDIR name another"
        ) from None


def make(path: str) -> int:
    """Make it, and hold it as long as what is returned is open. An OSError if it cannot be made, or is there."""
    for _ in range(_TRIES):
        os.mkdir(path, 0o700)
        try:
            held = os.open(path, _DIRECTORY)
        except FileNotFoundError:  # another job took it for one that is nobody's, as it is empty
            continue
        with contextlib.suppress(OSError):  # no locks there: then nobody else gets one either
            fcntl.flock(held, fcntl.LOCK_EX)
        if not _is_at(path, held):
            os.close(held)
            continue
        try:
            _write_note(held)
        except OSError:
            os.close(held)
            shutil.rmtree(path, ignore_errors=True)
            raise
        return held
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", path)


def clear_abandoned(within: str) -> None:
    """Remove this user's directories of jobs of which nothing is left. What cannot be judged stays."""
    boot = boot_id()
    with contextlib.suppress(OSError), os.scandir(within) as entries:
        for entry in entries:
            if boot is not None and _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _clear(entry.path, boot)


def _clear(path: str, boot: str) -> None:
    held = os.open(path, _DIRECTORY)
    try:
        if os.fstat(held).st_uid != os.geteuid():
            return
        # Held by the agent of a job that runs, or just then by another one that clears up: BlockingIOError.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.listdir(held):
            os.rmdir(path)  # which removes nothing that was put there meanwhile
        elif _read_note(held) == boot:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)


def _is_at(path: str, held: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(held))
    except FileNotFoundError:
        return False


def _write_note(held: int) -> None:
    if boot := boot_id():
        fd = os.open(_NOTE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=held)
        with open(fd, "w") as file:
            file.write(boot)


def _read_note(held: int) -> str:
    with open(os.open(_NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=held)) as file:
        return file.read(100)
