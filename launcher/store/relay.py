"""Accepts the workers' connections to the store on a Unix socket in the job's directory, and answers their requests.

    workers ══ Unix socket ══ Relay ── requests ──► Cache (which answers)

It runs in the agent's event loop and never blocks. Each connection has at most one request in progress: the next is
read after the answer is written, which limits the memory for it. Bytes that are no request close their connection and
have no other effect.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdlite_wire.codec import MessageError
from hvdlite_wire.store_requests import RequestDecoder, frame

from .cache import Cache

_READ_BYTES = 1 << 16
_RETRY_S = 0.2


class Relay:
    """Listens until `close`, which closes all connections too."""

    def __init__(self, path: str, cache: Cache, selector: selectors.BaseSelector) -> None:
        self._cache = cache
        self._selector = selector
        self._connections: set[_Connection] = set()
        self._listens, self._is_closed = True, False
        self._retry_at = 0.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(4096)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        self._is_closed = True
        self._listen(False)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # too many open files, here or on the machine: new workers wait for a moment
            self._retry_at = time.monotonic() + _RETRY_S
            self._listen(False)
            return
        connected.setblocking(False)
        self._connections.add(_Connection(connected, self._cache, self._selector, self._closed))

    def _closed(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._listen(not self._is_closed)

    def time_left_s(self) -> float | None:
        """Returns the seconds until `tick` must be called, or None."""
        return None if self._listens else max(0.0, self._retry_at - time.monotonic())

    def tick(self) -> None:
        """Accepts connections again, if that has failed a while ago."""
        if not self._listens and self._retry_at <= time.monotonic():
            self._listen(True)

    def _listen(self, listen: bool) -> None:
        if listen and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listens and not listen:
            self._selector.unregister(self._listener)
        self._listens = listen


@dataclass(eq=False)
class _Connection:
    _socket: socket.socket
    _cache: Cache
    _selector: selectors.BaseSelector
    _closed: Callable[[_Connection], None]
    _decoder: RequestDecoder = field(default_factory=RequestDecoder)
    _forget: Callable[[], object] | None = None  # drops the request in progress
    _rest: bytes | memoryview = b""  # the unsent rest of the answer

    def __post_init__(self) -> None:
        self._selector.register(self._socket, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._selector.unregister(self._socket)
        self._socket.close()
        if self._forget is not None:
            self._forget()
        self._closed(self)

    def _read(self) -> None:
        if self._socket.fileno() < 0:  # the selector may still report a socket that was closed in the same round
            return
        try:
            data = self._socket.recv(_READ_BYTES)
            if not data or self._forget is not None:  # it disconnected, or did not wait for its answer
                self.close()
            elif request := self._decoder.feed(data):
                self._forget = _nothing
                forget = self._cache.request(*request, self._reply)
                if self._forget is not None:  # not answered yet
                    self._forget = forget
        except BlockingIOError:
            pass
        except (OSError, MessageError):
            self.close()

    def _reply(self, code: int, payload: bytes) -> None:
        self._forget = None
        if self._socket.fileno() < 0:
            return
        self._rest = memoryview(frame(code, payload))
        self._write()
        if self._rest:
            self._selector.modify(self._socket, selectors.EVENT_WRITE, self._write_on)

    def _write_on(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._write()
        if not self._rest and self._socket.fileno() >= 0:
            self._selector.modify(self._socket, selectors.EVENT_READ, self._read)

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[self._socket.send(self._rest) :]
        except BlockingIOError:
            pass
        except OSError:
            self._rest = b""
            self.close()


def _nothing() -> None:
    pass
