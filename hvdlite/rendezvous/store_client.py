"""
Client of hvdlite-run's store, over the Unix socket of this host's agent.

    any thread ── request ── a connection that is idle, or a new one ── agent ── launcher

No torch here: what `torch.distributed` makes of it is in `launcher_store`. The operations and their frames are a
contract with the launcher, whose end of it is `hvdlite_launcher.wire.worker_requests`.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from ..errors import LaunchEnvironmentError

MAX_REQUEST_BYTES = (16 << 20) - 64
_CHUNK_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_HEADER = struct.Struct(">BI")  # operation or outcome, payload's length
_LENGTH = struct.Struct(">I")


class StoreCommand(IntEnum):
    """Requests to the store; `hvdlite_launcher.wire.worker_requests.Operation` lists their arguments and answers."""

    SET = 1
    GET = 2
    WAIT = 3
    CHECK = 4
    ADD = 5
    COMPARE_SET = 6
    APPEND = 7
    DELETE = 8
    COUNT = 9
    JOINING = 10
    JOINED = 11
    GAVE_UP = 12


class StoreClient:
    """Asks one agent. Any thread may, at any time: who waits for an answer holds up nobody else."""

    def __init__(self, path: str) -> None:
        """Nothing is opened before the first question. ``path`` is the socket's."""
        self._path = path
        self._idle: list[_Connection] = []
        self._pid = os.getpid()

    @classmethod
    def from_url(cls, url: str) -> StoreClient:
        """``url`` is what hvdlite-run leaves in HVDLITE_STORE."""
        scheme, separator, path = url.partition("://")
        if scheme != "unix" or not separator or not path.startswith("/"):
            raise LaunchEnvironmentError(
                f"HVDLITE_STORE={url!r} is not a store that this hvdlite knows (unix:///path): "
                "hvdlite-run and the hvdlite that the workers import must be the same version"
            )
        return cls(path)

    def request(
        self, operation: StoreCommand, parts: Iterable[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        """The answer.

        Raises TimeoutError if none came in time, ConnectionError if the agent is gone, ValueError if it, or the
        store, cannot do what was asked.
        """
        payload = _pack(parts)
        if len(payload) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"{len(payload)} bytes are more than the store takes at once, {MAX_REQUEST_BYTES}: "
                "use set_large() and get_large()"
            )
        failed, answer = self._ask(_HEADER.pack(operation, len(payload)) + payload, timeout_s)
        if failed:
            raise ValueError(answer.decode(errors="replace"))
        return _unpack(answer)

    def set(self, values: Mapping[bytes, bytes]) -> None:
        self.request(StoreCommand.SET, [part for item in values.items() for part in item])

    def get(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bytes]:
        """The keys' values, as soon as all are there."""
        return self.request(StoreCommand.GET, keys, timeout_s)

    def set_large(self, key: bytes, value: bytes) -> None:
        """Set a value of any size, for `get_large`."""
        starts = range(0, len(value), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self.set({_chunk(key, number): value[start : start + _CHUNK_BYTES]})
        # Last, as it is what readers wait for.
        self.set({key: b"%d" % len(starts)})

    def get_large(self, key: bytes, timeout_s: float | None = None) -> bytes:
        """The value, as soon as `set_large` has set all of it."""
        (count,) = self.get([key], timeout_s)
        return b"".join([self.get([_chunk(key, number)], timeout_s)[0] for number in range(int(count))])

    def close(self) -> None:
        """Close what is idle; the next question connects anew."""
        while connection := self._take_idle():
            connection.close()

    def _ask(self, frame: bytes, timeout_s: float | None) -> tuple[bool, bytes]:
        connection = None
        try:
            connection = self._take_idle() or _Connection(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.be_patient_for(timeout_s)
            if not connection.is_open:
                connection.open(self._path)
            connection.sendall(frame)
            outcome, answer = _read_frame(connection)
        except BaseException as error:
            # Its answer may still come: nobody else must take it for his own.
            if connection is not None:
                connection.close()
            if isinstance(error, BlockingIOError):
                raise TimeoutError("no answer in time") from None
            if isinstance(error, OSError):
                raise ConnectionError(
                    f"the agent of hvdlite-run on this host is gone, with the store (socket closed: {error})"
                ) from error
            raise
        self._idle.append(connection)
        return bool(outcome), answer

    def _take_idle(self) -> _Connection | None:
        if self._pid != os.getpid():
            # Forked: these are the parent's connections. Closing our copies does not close them.
            self._idle, self._pid = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None


class _Connection(socket.socket):
    """Its timeouts are the kernel's: with Python's own, each read and write takes three calls instead of one."""

    is_open = False
    _timeout_s: float | None = None

    def open(self, path: str) -> None:
        self.connect(path)
        self.is_open = True

    def be_patient_for(self, timeout_s: float | None) -> None:
        """From now on, raise BlockingIOError where nothing can be read or written for this long."""
        if timeout_s == self._timeout_s:
            return
        microseconds = 0 if timeout_s is None else max(1, int(timeout_s * 1e6))
        value = struct.pack("ll", *divmod(microseconds, 1_000_000))
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = timeout_s


def _read_frame(connection: _Connection) -> tuple[int, bytes]:
    received = bytearray()
    end = _HEADER.size
    outcome = None
    while outcome is None or len(received) < end:
        data = connection.recv(max(_READ_BYTES, end - len(received)))
        if not data:
            raise ConnectionResetError("it hung up")
        received += data
        if outcome is None and len(received) >= _HEADER.size:
            outcome, length = _HEADER.unpack_from(received)
            end += length
    return outcome, bytes(received[_HEADER.size :])


def _pack(parts: Iterable[bytes]) -> bytes:
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


def _unpack(payload: bytes) -> list[bytes]:
    parts = []
    start = 0
    while start < len(payload):
        body = start + _LENGTH.size
        start = body + _LENGTH.unpack_from(payload, start)[0]
        parts.append(payload[body:start])
    return parts


def _chunk(key: bytes, number: int) -> bytes:
    return b"%b/%d" % (key, number)
