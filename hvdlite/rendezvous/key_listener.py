"""
`KeyListener`: a thread that reads what hvdlite-run tells the ranks of a generation, until that ends, or one worker.

    hvdlite-run ── world<generation>/hosts/<n> ── KeyListener ── on_value      (changed hosts, on rank 0)
                ├─ the keys of the generation are revoked ────── on_end        (on every rank)
                └─ ping/<worker>/<n> ─────────────────────────── on_value      (questions of `responder`)

hvdlite-run revokes a generation as soon as one of its workers has ended. Ranks that wait for that one in a collective
would often notice by themselves, but not if its host has vanished without closing its connections.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from ..log import log
from .store_client import StoreClient

_ENDS_WITHIN_S = 1.0
_PAUSE_S = 0.01


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
