"""`Connectors`: a few threads that start ssh, which may take long: nothing in a `connection_loop` may block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

MOST_CONNECTORS = 32  # each may wait for an ssh that reads the user's configuration


class Connectors:
    """Threads that end when nothing is left to do. May be used from any thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], object], Callable[[Exception], object]]] = deque()
        self._threads = 0
        self._lock = threading.Lock()

    def call(self, work: Callable[[], object], on_error: Callable[[Exception], object]) -> None:
        """Has one of the threads call ``work``, and ``on_error`` if that raises an error; does not block.

        Raises RuntimeError if there cannot be a thread.
        """
        with self._lock:
            if self._threads < MOST_CONNECTORS:
                threading.Thread(target=self._run, daemon=True, name="connect").start()
                self._threads += 1
            self._waiting.append((work, on_error))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                work, on_error = self._waiting.popleft()
            try:
                work()
            except Exception as error:  # noqa: BLE001  # whatever it is, the thread is needed for other hosts
                on_error(error)
