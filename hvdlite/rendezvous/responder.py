"""
`respond` starts the thread that shows hvdlite-run that a worker of an elastic job is alive.

    hvdlite-run ── ping/<worker>/<n> ── respond ── ALIVE(worker, n, for how long it has waited) ── hvdlite-run

The thread lives as long as the process, in all worlds and between them. While the process is stopped, or a C extension
holds the interpreter's lock, it cannot answer, and hvdlite-run ends a worker that others wait for (``--hang-timeout``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .key_listener import KeyListener
from .launchers import ElasticWorker
from .store_client import StoreClient, StoreRequest

_MOST_MS = 10**9 - 1


def respond(worker: ElasticWorker, waited_s: Callable[[], float]) -> KeyListener:
    """Starts the thread. ``waited_s`` returns for how long this process has waited for other ranks, 0 if it does not.

    It is called on that thread.
    """
    client = StoreClient.from_url(worker.store_url)

    def answer(number: bytes) -> None:
        waited_ms = min(int(1000 * waited_s()), _MOST_MS)
        # Without an agent this process is ended, too.
        with contextlib.suppress(OSError):
            client.request(StoreRequest.ALIVE, [b"%d" % worker.number, number, b"%d" % waited_ms])

    return KeyListener(client, f"ping/{worker.number}", answer, lambda _: None)
