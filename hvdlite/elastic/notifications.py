"""
The thread that hears from hvdlite-run, during a training function, of changed hosts and of the generation's end.

    hvdlite-run ── world<generation>/hosts/<n> ── listening thread ── State.on_hosts_updated   (on rank 0)
                └─ the keys of the generation are revoked ─────────── the world's waits fail   (on every rank)

hvdlite-run revokes a generation as soon as one of its workers has ended. Ranks that wait for that one in a collective
would often notice by themselves, but not if its host has vanished without closing its connections. `run` starts the
thread after each init and ends it before the next shutdown.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator

from ..environment import launcher_variable
from ..log import log
from ..rendezvous.store_client import StoreClient
from ..runtime.world import current_world, revoke
from .state import HostUpdates, State

_ENDS_WITHIN_S = 1.0
_PAUSE_S = 0.01


@contextlib.contextmanager
def listening(state: State) -> Iterator[None]:
    """A context in which ``state`` is told of changed hosts, and the world's waits fail once its generation has ended.

    Does nothing unless this process is a worker of an elastic job.
    """
    world = current_world()
    if world.seat is None:
        yield
        return
    listener = _Listener(
        StoreClient.from_url(launcher_variable("STORE", os.environ)),
        # The other ranks wait for a key that is never set, until it is revoked.
        f"{world.seat.prefix}/{'hosts' if world.topology.rank == 0 else 'end'}",
        state.on_hosts_updated,
        revoke,
    )
    try:
        yield
    finally:
        listener.close()


class _Listener:
    """Reads keys of the store in a thread, one after the other: hvdlite-run sets the next one when hosts change."""

    def __init__(
        self, client: StoreClient, key: str, on_updated: Callable[[float, int], None], on_end: Callable[[str], None]
    ) -> None:
        """``key`` is the prefix of these keys; ``on_end`` is called with the reason when they are revoked."""
        self._client = client
        self._key = key
        self._on_updated = on_updated
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
                (told,) = self._client.get([f"{self._key}/{number}".encode()])
            except OSError:
                # It is closing, or the agent of hvdlite-run is gone, which ends this process too.
                return
            except ValueError as error:
                if not self._is_closing:
                    log.info("elastic: this generation has ended: %s", error)
                    self._on_end(str(error))
                return
            news = json.loads(told)
            updates = HostUpdates.ADDED if news["added"] else HostUpdates.NONE
            updates |= HostUpdates.REMOVED if news["removed"] else HostUpdates.NONE
            self._on_updated(news["timestamp"], int(updates))
