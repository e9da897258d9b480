"""`ConnectionLoop`: one thread for the connections to all agents, whose number makes no difference.

    descriptors that are ready ─┐
    calls of other threads ─────┼──► the functions of `remote_agent`, one after the other
    times that have come ───────┘

`agent_group` has one. None of these functions may block, as the start of ssh does: there are `Connectors` for that.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

MOST_CONNECTORS = 32  # each may wait for an ssh that reads the user's configuration
_CLOSE_S = 2.0  # how long the end waits for a call that does not return


class ConnectionLoop:
    """The thread, and what it waits for. The data of each registration in ``selector`` is a function to be called."""

    def __init__(self, on_failure: Callable[[Exception], object]) -> None:
        """``on_failure`` is called at the end of the thread, if what that calls raises an error, or it cannot wait."""
        self._on_failure = on_failure
        self.selector = selectors.DefaultSelector()
        """Only for functions that the thread calls."""
        self._calls: deque[Callable[[], object]] = deque()
        self._alarms: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._is_awake = True
        self._is_closed = False
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self.selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        self._thread = threading.Thread(target=self._run, daemon=True, name="agents")
        self._thread.start()

    def call(self, work: Callable[[], object]) -> None:
        """Has the thread call this, after what it was given before. May be called from any thread; does not block."""
        self._calls.append(work)
        if not self._is_awake:
            with contextlib.suppress(OSError):  # it is woken already, or closed
                self._wakes.send(b"w")

    def later(self, delay_s: float, work: Callable[[], object]) -> None:
        """Has the thread call this when so many seconds are over. Only for functions that the thread calls."""
        heapq.heappush(self._alarms, (time.monotonic() + delay_s, next(self._numbers), work))

    def close(self) -> bool:
        """Ends the thread once it has done what it was given, and forgets what is left to do.

        Goes on without it if that takes too long, and returns whether it has ended.
        """
        self.call(self._close)
        self._thread.join(_CLOSE_S)
        for each in (self._woken, self._wakes):
            each.close()
        if has_ended := not self._thread.is_alive():
            self._calls.clear()
            self._alarms.clear()
        return has_ended

    def _close(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._take_turn()
        except Exception as error:  # noqa: BLE001  # nothing else would tell that no agent is heard any more
            self._on_failure(error)
        self.selector.close()

    def _take_turn(self) -> None:
        # Before `select`: at an alarm all is read that came before its time, also if this process was stopped.
        now_s = time.monotonic()
        self._is_awake = False
        wait_s = None if not self._alarms else max(0.0, self._alarms[0][0] - now_s)
        self._wait_for_descriptors(0 if self._calls else wait_s)
        while self._calls:
            self._calls.popleft()()
        while self._alarms and self._alarms[0][0] <= now_s:
            heapq.heappop(self._alarms)[2]()

    def _wait_for_descriptors(self, wait_s: float | None) -> None:
        ready = self.selector.select(wait_s)
        self._is_awake = True
        for key, _ in ready:
            # What was called before in this round may have unregistered it.
            if self.selector.get_map().get(key.fd) is key:
                key.data()


class Connectors:
    """A few threads that start ssh, and end when nothing is left to do. May be used from any thread."""

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
