"""How many files this process may have open: more where many hosts or workers need it, and as before in its children.

`agents` and `screen` raise the limit in the launcher, `host.agent` in an agent. Programs that these start get the one
back that the launcher was started with: some close each number below it, or cannot use a number above 1023.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Callable, Sequence

from ..errors import LauncherError

_AT_START = resource.getrlimit(resource.RLIMIT_NOFILE)


def allow(more: int) -> int:
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


def require(more: int, why: str) -> None:
    """Makes room for so many more open files; raises `LauncherError` with ``why`` if the hard limit is too low."""
    needed, most = allow(more), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
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
