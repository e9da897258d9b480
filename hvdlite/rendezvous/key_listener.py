"""
`KeyListener`: a thread that reads what hvdlite-run tells the ranks of a generation, until that ends, or one worker.

    hvdlite-run ── world<generation>/hosts/<n> ── KeyListener ── on_value      (changed hosts, on rank 0)
                ├─ the keys of the generation are revoked ────── on_end        (on every rank)
                └─ ping/<worker>/<n> ─────────────────────────── on_value      (questions, see `respond`)

`respond` starts one that lives as long as the process, in all worlds and between them: by it hvdlite-run sees that a
worker of an elastic job is alive. While the process is stopped, or a C extension holds the interpreter's lock, it
cannot answer, and hvdlite-run ends a worker that others wait for (``--hang-timeout``). Workers on several hosts say,
too, over which connections to other hosts nothing comes.

hvdlite-run revokes a generation as soon as one of its workers has ended. Ranks that wait for that one in a collective
would often notice by themselves, but not if its host has vanished without closing its connections.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from hvdlite_wire.codec import encode
from hvdlite_wire.field_types import HostLinks
from hvdlite_wire.store_requests import StoreRequest

from ..log import log
from .launchers import ElasticWorker
from .store_client import StoreClient

_ENDS_WITHIN_S = 1.0
_PAUSE_S = 0.01

_MOST_MS = 10**9 - 1


class KeyListener:
    """Reads the keys ``<key>/0``, ``<key>/1``, ... of the store in a thread, each as soon as hvdlite-run sets it."""

    def __init__(
        self, client: StoreClient, key: str, on_value: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        """``on_end`` is called with the reason when the keys are revoked."""
        self._client = client
        self._key = key
        self._on_value = on_value
        self._on_end = on_end
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-elastic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, whatever it waits for."""
        self._is_closing = True
        for _ in range(int(_ENDS_WITHIN_S / _PAUSE_S)):
            # More than once, because the thread may just be connecting.
            self._client.hang_up()
            self._thread.join(_PAUSE_S)
            if not self._thread.is_alive():
                break
        self._client.close()

    def _run(self) -> None:
        for number in itertools.count():
            if self._is_closing:
                return
            try:
                (value,) = self._client.get([f"{self._key}/{number}".encode()])
            except OSError:
                # It is closing, or the agent of hvdlite-run is gone, which ends this process too.
                return
            except ValueError as error:
                if not self._is_closing:
                    log.info("elastic: this generation has ended: %s", error)
                    self._on_end(str(error))
                return
            self._on_value(value)


class Keepalive(Protocol):
    """For how long nothing has come from other hosts: `Connections` and `OpeningGroups` of `comm.gloo_sockets`."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    def silences(self) -> Mapping[str, float]: ...


def respond(
    worker: ElasticWorker, waited_s: Callable[[], float], keepalive: Callable[[], Keepalive | None]
) -> KeyListener:
    """Starts the thread that shows hvdlite-run that this worker is alive.

    ``waited_s`` returns for how long this process has waited for other ranks, 0 if it does not.

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
