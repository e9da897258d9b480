"""
`respond` starts the thread that shows hvdlite-run that a worker of an elastic job is alive.

    hvdlite-run ── ping/<worker>/<n> ── respond ── ALIVE(worker, n, how long it waits, silent hosts) ── hvdlite-run

The thread lives as long as the process, in all worlds and between them. While the process is stopped, or a C extension
holds the interpreter's lock, it cannot answer, and hvdlite-run ends a worker that others wait for (``--hang-timeout``).
Workers on several hosts say, too, over which connections to other hosts nothing comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from hvdlite_wire.codec import encode
from hvdlite_wire.field_types import HostLinks
from hvdlite_wire.store_requests import StoreRequest

from .key_listener import KeyListener
from .launchers import ElasticWorker
from .store_client import StoreClient


class Keepalive(Protocol):
    """For how long nothing has come from other hosts: `comm.gloo.Connections`."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    def silences(self) -> Mapping[str, float]: ...


_MOST_MS = 10**9 - 1


def respond(
    worker: ElasticWorker, waited_s: Callable[[], float], keepalive: Callable[[], Keepalive | None]
) -> KeyListener:
    """Starts the thread. ``waited_s`` returns for how long this process has waited for other ranks, 0 if it does not.

    ``keepalive`` returns that of the connections to other hosts, None if there are none. Both are called on that
    thread.
    """
    client = StoreClient.from_url(worker.store_url)

    def answer(number: bytes) -> None:
        waited_ms = min(int(1000 * waited_s()), _MOST_MS)
        parts = [b"%d" % worker.number, number, b"%d" % waited_ms]
        # Where this process can open no more files, nothing is known of its links; it answers all the same.
        with contextlib.suppress(OSError):
            if (now := keepalive()) is not None:
                parts.append(encode(HostLinks(now.addresses, now.silences())))
        # Without an agent this process is ended, too.
        with contextlib.suppress(OSError):
            client.request(StoreRequest.ALIVE, parts)

    return KeyListener(client, f"ping/{worker.number}", answer, lambda _: None)
