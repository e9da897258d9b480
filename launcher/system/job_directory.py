"""Creates the private directory of a job on one host, locks it while it is used, and clears away what dead jobs left.

Called by `host.agent`. The agent holds a lock on the directory, which the system releases when the agent ends for any
reason: the next job removes the directories that are not locked, and before that kills the processes that have one of
them in HVDLITE_JOB_DIR. Launcher, agent and remote parent may have been killed at once, so that nobody else does.

On a file system that hosts share, a lock may be invisible to other hosts. So a file in the directory contains the boot
ID of its machine, and only that machine removes it, in the same boot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from typing import TYPE_CHECKING

from hvdlite_wire.job_contract import JOB_DIR

from ..errors import LauncherError
from .machine import boot_id

if TYPE_CHECKING:
    import psutil

_NAME = re.compile(r"hvdlite-[0-9a-f]{16}-[0-9]+")  # see `worker_environment.job_dir` and `agents.agent_group.Agents`
_NOTE = "boot"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 10

_ROUNDS, _PAUSE_S = 200, 0.005


def temporary_directory() -> str:
    """Returns this host's directory for temporary files; raises `LauncherError` if none can be written."""
    try:
        return tempfile.gettempdir()
    except OSError:
        places = ", ".join(dict.fromkeys([os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"]))
        raise LauncherError(
            "no temporary directory can be written (no space, no inodes, read-only, or ulimit -f is 0; see df -i): "
            f"{places}. Free space there, or set TMPDIR to another directory"
        ) from None


def make(path: str) -> int:
    """Creates the directory and locks it; closing the returned descriptor releases it.

    Raises OSError if it cannot be created or exists already.
    """
    for _ in range(_TRIES):
        os.mkdir(path, 0o700)
        try:
            held = os.open(path, _DIRECTORY)
        except FileNotFoundError:  # another job has removed it, as it was still empty and unlocked
            continue
        with contextlib.suppress(OSError):  # a file system without locks: no other job gets the lock either
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
    raise FileNotFoundError(errno.ENOENT, "another process keeps removing it", path)


def clear_abandoned(within: str) -> None:
    """Kills the processes of this user's dead jobs, and removes their directories. Keeps any whose job may be alive."""
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
        # Raises BlockingIOError if it is locked by a running job's agent, or by another process that removes it now.
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.listdir(held):
            os.rmdir(path)  # fails if a file was created there since
        elif _read_note(held) == boot and _kill_all_of(os.path.basename(path)):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)


def _kill_all_of(name: str) -> bool:
    """Kills the processes of the job with this directory. Returns False if some are left, or this process is of it."""
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    own = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    for _ in range(_ROUNDS):
        found = [each for each in psutil.process_iter() if _is_of(each, name)]
        # A terminal that a job has opened, from which this one is started, is its user's.
        if not found or own.intersection(each.pid for each in found):
            return not found
        # Repeated, since a listed process may fork before it is killed.
        for each in found:
            with contextlib.suppress(psutil.Error):
                each.kill()
        time.sleep(_PAUSE_S)
    return False


def _is_of(process: psutil.Process, name: str) -> bool:
    import psutil  # noqa: PLC0415  # as in _kill_all_of

    try:
        return os.path.basename(process.environ().get(JOB_DIR, "")) == name
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return False


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
