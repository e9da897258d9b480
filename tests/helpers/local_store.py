"""hvdlite-run's store without processes: each agent runs in a thread and calls the store directly."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hvdlite_launcher.protocol.messages import InitDone, InitFailed, InitStarted
from hvdlite_launcher.store.relay import Cache, Relay
from hvdlite_launcher.store.server import Store


class LocalAgent:
    """One host's agent, as a thread: passes messages between its workers and the store."""

    def __init__(self, path: str, store: Store) -> None:
        self.path = path
        self.sent: list[object] = []  # all messages that it has sent to the launcher
        self.store = store
        self._wake, self._woken = os.pipe()
        self._inbox: deque = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._receive)
        self.cache = Cache(self._tell, workers=range(4))
        self.relay = Relay(path, self.cache, self._selector)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message) -> None:
        self._inbox.append(message)
        os.write(self._woken, b"!")

    def close(self) -> None:
        if not self._over:
            self._over = True
            os.write(self._woken, b"!")
            self._thread.join()
            # Closed here and not by the thread, which may see `_over` and end before the byte is written.
            os.close(self._wake)
            os.close(self._woken)

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select():
                key.data()
        self.relay.close()
        self._selector.close()

    def _receive(self) -> None:
        os.read(self._wake, 1)
        if self._inbox:
            self.cache.receive(self._inbox.popleft())

    def _tell(self, message) -> None:
        self.sent.append(message)
        if not isinstance(message, InitStarted | InitDone | InitFailed):
            self.store.receive(self, message)


@contextlib.contextmanager
def local_agents(directory: Path, count: int = 1) -> Iterator[list[LocalAgent]]:
    store = Store()
    agents = [LocalAgent(str(directory / f"store{number}"), store) for number in range(count)]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.close()
