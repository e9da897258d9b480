"""
`StoreClient`: the client of hvdlite-run's store, over the Unix socket of this host's agent.

    calling thread ── StoreClient.request ── an idle connection, or a new one ── agent ── launcher

`launcher_store` makes a `torch.distributed.Store` of it; `worker.functions` and `runtime.connect_ranks` call it too. It
does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from hvdlite_wire.store_requests import (
    HEADER,
    MAX_REQUEST_BYTES,
    StoreRequest,
    chunk_key,
    frame,
    in_chunks,
    pack,
    unpack,
)

from .. import forks
from ..errors import LaunchEnvironmentError

_READ_BYTES = 1 << 16


class StoreClient:
    """Sends requests to one agent. Threads may use it concurrently: each waiting request has its own connection."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_StoreConnection] = []
        self._busy: set[_StoreConnection] = set()
        forks.when_forked(self)

    @classmethod
    def from_url(cls, url: str) -> StoreClient:
        """Makes a client from HVDLITE_STORE. It connects to the agent's socket at the first request."""
        scheme, separator, path = url.partition("://")
        if scheme != "unix" or not separator or not path.startswith("/"):
            raise LaunchEnvironmentError(
                f"HVDLITE_STORE={url!r} is not the URL of a store, such as unix:///path: "
                "hvdlite-run and the hvdlite that the workers import must be the same version"
            )
        return cls(path)

    def request(
        self, operation: StoreRequest, parts: Iterable[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        """Sends a request, blocks until the answer has arrived, and returns it.

        Raises TimeoutError if there is no answer in time, ConnectionError if the agent has ended, and ValueError if the
        agent or the store refuses the request.
        """
        payload = pack(parts)
        if len(payload) > MAX_REQUEST_BYTES:
            raise ValueError(
                f"{len(payload)} bytes are more than the limit of a request to the store, {MAX_REQUEST_BYTES}: "
                "use set_large() and get_large()"
            )
        failed, answer = self._ask(frame(operation, payload), timeout_s)
        if failed:
            raise ValueError(answer.decode(errors="replace"))
        return unpack(answer)

    def set(self, values: Mapping[bytes, bytes]) -> None:
        self.request(StoreRequest.SET, [part for item in values.items() for part in item])

    def get(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bytes]:
        """Returns the values of the keys; blocks until all are set."""
        return self.request(StoreRequest.GET, keys, timeout_s)

    def set_large(self, key: bytes, value: bytes) -> None:
        """Sets a value of any size, for `get_large`."""
        for name, chunk in in_chunks(key, value):
            self.set({name: chunk})

    def get_large(self, key: bytes, timeout_s: float | None = None) -> bytes:
        (count,) = self.get([key], timeout_s)
        return b"".join([self.get([chunk_key(key, number)], timeout_s)[0] for number in range(int(count))])

    def close(self) -> None:
        """Closes the idle connections; the next request opens a new one."""
        while connection := self._take_idle():
            connection.close()

    def hang_up(self) -> None:
        """Makes requests in progress in other threads raise a ConnectionError, unless they are just connecting."""
        for connection in list(self._busy):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        # Dropping copies of its connections does not close them; hanging up would.
        self._idle, self._busy = [], set()

    def _ask(self, frame: bytes, timeout_s: float | None) -> tuple[bool, bytes]:
        connection = None
        try:
            connection = self._take_idle() or _StoreConnection(socket.AF_UNIX, socket.SOCK_STREAM)
            self._busy.add(connection)
            connection.be_patient_for(timeout_s)
            if not connection.is_open:
                connection.open(self._path)
            connection.sendall(frame)
            outcome, answer = _read_frame(connection)
        except BaseException as error:
            # Close it: its answer may still arrive, and must not be read as the answer to another request.
            if connection is not None:
                connection.close()
            if isinstance(error, BlockingIOError):
                raise TimeoutError("no answer in time") from None
            directory = os.path.dirname(self._path)
            if isinstance(error, FileNotFoundError) and not os.path.exists(directory):
                # Without the words by which an error says that another rank was lost.
                raise ConnectionError(
                    f"the job's directory {directory} has been removed, and with it the way to hvdlite-run's agent: "
                    "let nothing clean it up while the job runs, or set TMPDIR to another place"
                ) from error
            if isinstance(error, OSError):
                raise ConnectionError(
                    f"hvdlite-run's agent on this host has ended, and with it the job's store (socket closed: {error})"
                ) from error
            raise
        finally:
            self._busy.discard(connection)
        self._idle.append(connection)
        return bool(outcome), answer

    def _take_idle(self) -> _StoreConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


class _StoreConnection(socket.socket):
    """A Unix socket with the kernel's timeouts: with Python's, each read or write takes three system calls, not one."""

    is_open = False
    _timeout_s: float | None = None

    def open(self, path: str) -> None:
        self.connect(path)
        self.is_open = True

    def be_patient_for(self, timeout_s: float | None) -> None:
        """Sets the timeout: reads and writes that block for longer raise BlockingIOError. None: no timeout."""
        if timeout_s == self._timeout_s:
            return
        microseconds = 0 if timeout_s is None else max(1, int(timeout_s * 1e6))
        value = struct.pack("ll", *divmod(microseconds, 1_000_000))
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = timeout_s


def _read_frame(connection: _StoreConnection) -> tuple[int, bytes]:
    received = bytearray()
    end = HEADER.size
    outcome = None
    while outcome is None or len(received) < end:
        data = connection.recv(max(_READ_BYTES, end - len(received)))
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
        if outcome is None and len(received) >= HEADER.size:
            outcome, length = HEADER.unpack_from(received)
            end += length
    return outcome, bytes(received[HEADER.size :])
