"""Signals to this process and its descendants, their ends, and how many files they may open.

`host.agent` and `host.remote_parent` end a job's processes with it on each host, and `agents.agent_group` what is left
of the launcher's own. A process that has called `adopt_orphans` becomes the parent of descendants whose own parent
ends, so `kill_descendants` finds even a daemon that forked twice.

The launcher and its agents raise their limit of open files where many hosts or workers need that. Programs that they
start get the limit back that this process began with: some close each number below it, or cannot use one above 1023.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ..errors import LauncherError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process adopt its orphaned descendants."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def dying_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Returns a function for a new child to call first, so that ``signum`` is sent to it when its parent dies.

    For `subprocess.Popen(preexec_fn=...)`, which is safe in a process without threads, such as the agent.
    """
    prctl, parent = _prctl(), os.getpid()

    def set_up() -> None:
        prctl(_PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return set_up


@functools.cache  # ctypes keeps a part of each function that it makes
def _prctl() -> Callable[[int, int], int]:
    import ctypes  # noqa: PLC0415  # costs 10 ms

    prctl = ctypes.CDLL(None).prctl
    return lambda option, value: int(prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def signal_group(pid: int, signum: int) -> None:
    """Signals the process group that ``pid`` leads. The group may have ended already."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)


def signal_handlers(pid: int, signum: int) -> None:
    """Signals ``pid`` and its descendants as far as they handle this signal, so that it ends none of them."""
    import psutil  # noqa: PLC0415  # as in kill_tree

    processes = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    for each in processes:
        with contextlib.suppress(OSError):
            if handles(each, signum):
                os.kill(each, signum)


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for this signal. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/status", "rb") as file:  # a process may have any bytes as its name
        mask = next((int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")), 0)
    return bool(mask >> (signum - 1) & 1)


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process that leads a group, to that group, and to its descendants in other groups.

    Descendants that may not be killed, such as those of sudo, are left alone.
    """
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    try:
        # Listed first, since children of a dead parent are no longer its children.
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    signal_group(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()


class Reaped(NamedTuple):
    """A child that has ended; ``peak_memory``: the most bytes that it, or a child it has waited for, had at a time."""

    pid: int
    returncode: int
    peak_memory: int


def reap() -> tuple[list[Reaped], bool]:
    """Reaps the children that have ended. Returns these, and whether other children still live."""
    ended: list[Reaped] = []
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append(Reaped(pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024))


def kill_descendants(*, within_s: float = 10.0) -> bool:
    """Sends SIGKILL to all descendants of this process. Returns False if some are left after ``within_s``."""
    give_up_at = time.monotonic() + within_s
    while reap()[1]:
        import psutil  # noqa: PLC0415  # as in kill_tree

        if time.monotonic() > give_up_at:
            return False
        # Repeated, since a listed process may fork before it is killed.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def signals_as_bytes(
    signums: Collection[signal.Signals], *, even_ignored: Collection[signal.Signals] = ()
) -> Iterator[int]:
    """Catches these signals and gives the end of the pipe to read, one byte per signal.

    The pipe is at its end after this context; the caller closes it. A signal that is ignored (under nohup, or in a
    script's background job) stays ignored, in this process and its children, unless it is in ``even_ignored``.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    caught = [signum for signum in signums if signum in even_ignored or signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda *_: None) for signum in caught}
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(previous_fd)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(write_end)


def shell_code(returncode: int) -> int:
    """Returns a shell's exit code for ``returncode``: 128 + n for signal n, for which `subprocess` has -n."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(signum: int) -> str:
    """Returns the name of a signal, such as SIGTERM."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


_AT_START = resource.getrlimit(resource.RLIMIT_NOFILE)


def allow_open_files(more: int) -> int:
    """Makes room for so many more open files, and some: raises the soft limit, where they come near it.

    Returns how many files there will be in all, which the hard limit may not allow. Raises no error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/dev/fd")) + more
    except OSError:  # as many are open as may be, so that not even this can be opened
        needed = soft + more
    if soft != resource.RLIM_INFINITY and soft < 2 * needed:
        most = 4 * needed if hard == resource.RLIM_INFINITY else min(hard, 4 * needed)
        with contextlib.suppress(ValueError, OSError):  # the system may have a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return needed


def require_open_files(more: int, why: str) -> None:
    """Makes room for so many more open files; raises `LauncherError` with ``why`` if the hard limit is too low."""
    needed, most = allow_open_files(more), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and needed > most:
        raise LauncherError(
            f"{why} need {needed} open files in this process, and the limit is "
            f"{most}: raise it as root with ulimit -n, or with a line such as '* hard nofile 65536' in "
            "/etc/security/limits.conf and a new login"
        )


def as_before(argv: Sequence[str]) -> list[str]:
    """Returns the command that runs ``argv`` under the limit that this process was started with.

    Raises FileNotFoundError if there is no such program.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE) == _AT_START:
        return list(argv)
    if shutil.which(argv[0]) is None:  # sh would say so in words of its own
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    soft = "unlimited" if _AT_START[0] == resource.RLIM_INFINITY else _AT_START[0]
    # A function to be called in the child is not safe, since the launcher has threads.
    return ["/bin/sh", "-c", f'ulimit -S -n {soft} && exec "$@"', "sh", *argv]


def setting_back(set_up: Callable[[], None] | None = None) -> Callable[[], None]:
    """Returns a function for a new child to call first, which restores that limit; then it calls ``set_up``.

    For a ``preexec_fn``, which is safe in a process without threads, such as the agent.
    """

    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, _AT_START)
        if set_up is not None:
            set_up()

    return restore


def with_absolute_python_path() -> dict[str, str]:
    """Returns the environment for a Python of the launcher's own that is started in another directory."""
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return environment
