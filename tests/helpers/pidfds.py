"""Whether the kernel has pidfds of threads, which Linux 6.9 brought."""

from __future__ import annotations

import os

from hvdlite_launcher.host import killed_workers


def has_pidfds_of_threads() -> bool:
    opener = killed_workers._opener()
    pidfd = -1 if opener is None else opener(os.getpid())
    if pidfd >= 0:
        os.close(pidfd)
    return pidfd >= 0
