"""
An agent's part of the rendezvous store: answers its workers' reads from copies, and forwards their other requests.

    workers ══ Unix socket ══ Relay ── requests ──► Cache ──► Want, Ask, Dropped to the launcher
                                                          ◄── Have, Answer, Drop, Revoke from the launcher

`host.agent` owns both and passes the launcher's messages. The cache asks the launcher for a key once, whatever the
number of workers that wait for it. A copy is never outdated: the launcher changes no value before the copies are
dropped (see `server`). The relay runs in the agent's event loop and never blocks. Bytes that are no request close their
connection and have no other effect.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from hvdlite_wire.codec import HostLinks, MessageError, Refusals, decode
from hvdlite_wire.store_requests import (
    DONE,
    FAILED,
    MAX_REQUEST_BYTES,
    NewWorkerPolicy,
    RequestDecoder,
    StoreRequest,
    frame,
    is_up_to,
    pack,
    unpack,
)

from ..protocol.messages import Alive, InitDone, InitEvent, InitFailed, InitStarted, Stalled
from ..protocol.store_messages import Answer, Ask, Drop, Dropped, Have, Revoke, StoreCommand, StoreEvent, Want

Reply = Callable[[int, bytes], None]

_READ_BYTES = 1 << 16
_RETRY_S = 0.2
_NUMBERS = 1 << 32  # a request's number has 32 bits

_ANNOUNCED: dict[StoreRequest, type[InitEvent]] = {
    StoreRequest.INIT_STARTED: InitStarted,
    StoreRequest.INIT_DONE: InitDone,
    StoreRequest.INIT_FAILED: InitFailed,
}


@dataclass(eq=False)
class _PendingRead:
    """A GET or WAIT in progress. Keeps each value as it was when it arrived, even if it changes before the answer."""

    keys: list[bytes]
    found: dict[bytes, bytes]
    missing: int
    with_values: bool
    reply: Reply

    def answer(self) -> None:
        payload = pack([self.found[key] for key in self.keys] if self.with_values else [])
        if len(payload) > MAX_REQUEST_BYTES:
            self.reply(FAILED, b"the requested values are too large for one answer: request fewer keys at a time")
        else:
            self.reply(DONE, payload)


class Cache:
    """The copies on one host, and the requests of its workers that are not answered yet."""

    def __init__(
        self, send: Callable[[StoreEvent | InitEvent | Alive | Stalled], None], workers: Collection[int]
    ) -> None:
        """``workers`` are the numbers of the workers on this host: more of them may be added."""
        self._send = send
        self._workers = workers
        self._values: dict[bytes, bytes] = {}
        # The keys that the launcher was asked for, and the readers that wait for each: none if all have disconnected.
        self._readers: dict[bytes, dict[_PendingRead, None]] = {}
        self._asked: dict[int, Reply] = {}
        self._next_number = 0  # of a request to the launcher
        self._revoked = Revoke(0, "")

    def request(self, operation: StoreRequest, payload: bytes, reply: Reply) -> Callable[[], object]:
        """Calls ``reply(outcome, payload)`` once, now or later. Returns what a disconnection calls."""
        try:
            match operation:
                case StoreRequest.GET | StoreRequest.WAIT:
                    return self._read(unpack(payload), operation is StoreRequest.GET, reply)
                case StoreRequest.CHECK if all(key in self._values for key in unpack(payload)):
                    reply(DONE, pack([b"1"]))
                case _ if operation in _ANNOUNCED:
                    self._announce(_ANNOUNCED[operation], unpack(payload))
                    reply(DONE, b"")
                case StoreRequest.ALIVE:
                    self._say_alive(unpack(payload))
                    reply(DONE, b"")
                case StoreRequest.STALLED:
                    worker, waited_ms = self._numbers(unpack(payload), least=2, most=2)
                    self._send(Stalled(worker, waited_ms / 1000))
                    reply(DONE, b"")
                case _:
                    return self._ask(operation, payload, reply)
        except MessageError as error:
            reply(FAILED, str(error).encode())
        return _nothing

    def receive(self, message: StoreCommand) -> None:
        match message:
            case Have():
                self._values[message.key] = message.value
                for reader in self._readers.pop(message.key, ()):
                    reader.found[message.key] = message.value
                    reader.missing -= 1
                    if not reader.missing:
                        reader.answer()
            case Drop():
                self._values.pop(message.key, None)
                self._send(Dropped(message.key))
            case Answer():
                if reply := self._asked.pop(message.number, None):
                    reply(message.code, message.payload)
            case Revoke():
                self._revoke(message)

    def _read(self, keys: list[bytes], with_values: bool, reply: Reply) -> Callable[[], object]:
        values = self._values
        if any(map(self._is_revoked, keys)):
            reply(FAILED, self._revoked.why.encode())
            return _nothing
        found = {key: values[key] for key in keys if key in values}
        missing = [key for key in dict.fromkeys(keys) if key not in values]
        reader = _PendingRead(keys, found, len(missing), with_values, reply)
        if not missing:
            reader.answer()
            return _nothing
        for key in missing:
            if key not in self._readers:
                self._readers[key] = {}
                self._send(Want(key))
            self._readers[key][reader] = None
        return lambda: self._forget(reader, missing)

    def _forget(self, reader: _PendingRead, missing: list[bytes]) -> None:
        for key in missing:
            self._readers.get(key, {}).pop(reader, None)

    def _is_revoked(self, key: bytes) -> bool:
        return is_up_to(key, self._revoked.generation)

    def _revoke(self, revoked: Revoke) -> None:
        self._revoked = revoked
        for key in [key for key in self._values if self._is_revoked(key)]:
            del self._values[key]
        failed: dict[_PendingRead, None] = {}
        for key in [key for key in self._readers if self._is_revoked(key)]:
            failed |= self._readers.pop(key)
        for reader in failed:
            self._forget(reader, reader.keys)
            reader.reply(FAILED, revoked.why.encode())

    def _ask(self, operation: StoreRequest, payload: bytes, reply: Reply) -> Callable[[], object]:
        number = self._next_number
        self._next_number = (number + 1) % _NUMBERS
        self._asked[number] = reply
        self._send(Ask(number, operation, payload))
        return lambda: self._asked.pop(number, None)

    def _announce(self, what: type[InitEvent], parts: list[bytes]) -> None:
        if what is InitFailed and len(parts) == 3:
            worker, after = self._numbers(parts[:2], least=2, most=2)
            refusals = decode(Refusals, parts[2])
            self._send(InitFailed(worker, after, True, refusals.addresses, refusals.refused_by))
            return
        match self._numbers(parts, least=1, most=3 if what is InitStarted else 2):
            case [worker]:
                self._send(what(worker))
            case [worker, after]:
                self._send(what(worker, after))
            case [worker, after, newcomers] if newcomers in list(NewWorkerPolicy):
                self._send(InitStarted(worker, after, NewWorkerPolicy(newcomers)))
            case _:
                raise MessageError("what a worker says of newcomers is 0, 1, 2 or 3")

    def _say_alive(self, parts: list[bytes]) -> None:
        worker, number, waited_ms = self._numbers(parts[:3], least=3, most=3)
        if len(parts) > 4:
            raise MessageError("an answer has at most four parts")
        links = decode(HostLinks, parts[3]) if len(parts) == 4 else HostLinks()
        self._send(Alive(worker, number, waited_ms / 1000, links.addresses, links.silent_s))

    def _numbers(self, parts: list[bytes], *, least: int, most: int) -> list[int]:
        """Returns the numbers that a worker has sent; the first is its own."""
        if not least <= len(parts) <= most or not all(part.isdigit() and len(part) < 10 for part in parts):
            raise MessageError("a worker's number is expected, and further numbers")
        numbers = [int(part) for part in parts]
        if numbers[0] not in self._workers:
            raise MessageError("no such worker on this host")
        return numbers


def _nothing() -> None:
    pass


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
    # At most one request is in progress: the next is read after the answer is written, which limits the memory for it.
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
