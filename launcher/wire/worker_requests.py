"""The requests about the store that workers send to their agent, and how they are encoded.

    worker ── request ──► agent ──► launcher's store        request: operation and byte strings
           ◄── answer ──        ◄──                         answer: whether it went well, and byte strings

A frame is a header (operation or outcome, payload's length) and the payload: byte strings, each after its length.
The library has the worker's end of this in `hvdlite.rendezvous.store_client`; operations and codes are a contract
between both. The agent's `cache` answers what it knows, the launcher's `server` the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

from ..errors import ProtocolError

# A little below what a frame between agent and launcher may hold, as it goes on in one of those.
MAX_REQUEST_BYTES = (16 << 20) - 64
CHUNK_BYTES = 1 << 20
"""Of a value of any size, which is set in pieces: under its own key is how many there are."""


class Operation(IntEnum):
    """What a worker may ask of the store; beside each its arguments ── and its answer."""

    SET = 1  # key, value, key, value, … ── nothing
    GET = 2  # keys ── their values, once all are there
    WAIT = 3  # keys ── nothing, once all are there
    CHECK = 4  # keys ── 1 if all are there, else 0
    ADD = 5  # key, number ── the sum
    COMPARE_SET = 6  # key, expected, desired ── the value that is there now
    APPEND = 7  # key, value ── nothing
    DELETE = 8  # key ── 1 if it was there, else 0
    COUNT = 9  # nothing ── the number of keys
    JOINING = 10  # rank, which begins hvd.init() ── nothing
    JOINED = 11  # rank, which has completed it ── nothing
    GAVE_UP = 12  # rank, in which it raised an exception ── nothing


DONE, FAILED = 0, 1  # outcomes; a failure's payload is why, as text

HEADER = struct.Struct(">BI")
_LENGTH = struct.Struct(">I")


def pack(parts: Iterable[bytes]) -> bytes:
    """Several byte strings as one."""
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


def unpack(payload: bytes) -> list[bytes]:
    """The byte strings that ``payload`` was packed from."""
    parts = []
    start = 0
    while start < len(payload):
        body = start + _LENGTH.size
        if body > len(payload):
            raise ProtocolError("a request to the store ends within a length")
        start = body + _LENGTH.unpack_from(payload, body - _LENGTH.size)[0]
        if start > len(payload):
            raise ProtocolError("a request to the store holds less than it says")
        parts.append(payload[body:start])
    return parts


def chunk_key(key: bytes, number: int) -> bytes:
    """Where one piece of a large value is."""
    return b"%b/%d" % (key, number)


def frame(code: int, payload: bytes) -> bytes:
    return HEADER.pack(code, len(payload)) + payload


class RequestDecoder:
    """Turns a worker's bytes, cut anywhere, back into requests. What is none raises `ProtocolError`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> tuple[Operation, bytes] | None:
        """The request that ``data`` completes, if it does: a worker sends one, and the next after its answer."""
        self._buffer += data
        if len(self._buffer) < HEADER.size:
            return None
        code, length = HEADER.unpack_from(self._buffer)
        # Judged by the header alone: garbage must neither be waited for nor be stored.
        if not 1 <= code <= len(Operation) or length > MAX_REQUEST_BYTES or len(self._buffer) > HEADER.size + length:
            raise ProtocolError("not a request to the store")
        if len(self._buffer) < HEADER.size + length:
            return None
        payload = bytes(self._buffer[HEADER.size :])
        self._buffer.clear()
        return Operation(code), payload
