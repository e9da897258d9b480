"""Whether the kernel has pidfds of threads, which Linux 6.9 brought."""

from __future__ import annotations

import os
import selectors

from hvdlite_launcher.host.worker_processes import KilledWorkers


def has_pidfds_of_threads() -> bool:
    with selectors.DefaultSelector() as selector:
        workers = KilledWorkers(selector, lambda *_: None)
        workers.watch(os.getpid())
        has_them = bool(selector.get_map())
        workers.forget(os.getpid())
    return has_them
