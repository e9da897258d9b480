"""
`ControlBlock`: one rank's shared counters, state and operation headers, which all ranks of an engine read.

    posted | reduced | done     what it has shown, summed and read: counters that only grow
    state                       whether it is open, has left, has failed, or was revoked; why it was
    awaited                     what it sleeps for, if it does
    headers                     of its latest operations: what it asks for, and where its data lie
    board                       what it is about to call, for the control; see `board`
    payloads                    of the same, where they are small

A control block is written by its own rank alone, and read by all, so that nothing has to be locked. A counter holds the
number of an operation in its upper bits, and of the chunks of it in its lower ones.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .segment import Piece

# Each counter has a cache line of its own. In 64-bit words:
POSTED, REDUCED, DONE, _STATE, _AWAITED, _BELL, _TOKEN = range(0, 7 * 8, 8)
OPEN, LEFT, FAILED, REVOKED = 0, 1, 2, 3

WINDOW = 16  # operations that may have been posted and not done; a power of two
PAYLOAD_BYTES = 4096
_HEADER_BYTES = 128
# Why the engine was revoked: when (of the host's monotonic clock), bytes, and the words.
_REASON = struct.Struct("=QQ")
_REASON_START = 512
_HEADERS_START = 1024
_BOARD_START = _HEADERS_START + WINDOW * _HEADER_BYTES
_PAYLOADS_START = 4096
CONTROL_BLOCK_BYTES = _PAYLOADS_START + WINDOW * PAYLOAD_BYTES

# Of an operation: its number; kind, op, dtype, root; elements; a digest of the rest of what must be equal.
SIGNATURE = struct.Struct("=QHHHHQQ")
# Where its data lie: how, then offset and bytes of the piece, and how far into it.
_PLACE = struct.Struct("=QQQQ")

NOWHERE, INLINE, RESIDENT, STAGED = range(4)


@dataclass(frozen=True, slots=True)
class DataLocation:
    """Where a rank's data of an operation lie: ``how`` is one of NOWHERE, INLINE, RESIDENT and STAGED."""

    how: int
    offset: int = 0
    nbytes: int = 0
    within: int = 0


class ControlBlock:
    """One rank's control block, as it is seen from here."""

    def __init__(self, piece: Piece) -> None:
        data = memoryview(piece.memory).cast("B")
        self.words = data[:_HEADERS_START].cast("Q")
        self._reason = data[_REASON_START:_HEADERS_START]
        self._half_words = data[:_HEADERS_START].cast("I")
        self._headers = [
            data[start : start + _HEADER_BYTES]
            for start in range(_HEADERS_START, _HEADERS_START + WINDOW * _HEADER_BYTES, _HEADER_BYTES)
        ]
        self._signatures = [header[: SIGNATURE.size] for header in self._headers]
        self.payloads = [
            piece.tensor[start : start + PAYLOAD_BYTES]
            for start in range(_PAYLOADS_START, CONTROL_BLOCK_BYTES, PAYLOAD_BYTES)
        ]
        self.board_bytes = data[_BOARD_START:_PAYLOADS_START]
        self.board = self.board_bytes.cast("Q")
        self.board_address = piece.tensor.data_ptr() + _BOARD_START
        self.bell_address = piece.tensor.data_ptr() + _BELL * 8

    # -- written by its own rank

    def write_header(self, number: int, signature: bytes, place: DataLocation) -> None:
        """What the operation is; visible to others once it is posted."""
        header = self._headers[number % WINDOW]
        header[: SIGNATURE.size] = signature
        _PLACE.pack_into(header, SIGNATURE.size, place.how, place.offset, place.nbytes, place.within)

    def leave(self, state: int) -> None:
        """Say that this rank takes part no more."""
        self.words[_STATE] = state

    def write_reason(self, since_ns: int, reason: str) -> None:
        """Why this rank revokes the engine, for `REVOKED`; as much of it as there is room for."""
        words = reason.encode()[: len(self._reason) - _REASON.size].decode(errors="ignore").encode()
        _REASON.pack_into(self._reason, 0, since_ns, len(words))
        self._reason[_REASON.size : _REASON.size + len(words)] = words

    @property
    def token(self) -> int:
        return self.words[_TOKEN]

    @token.setter
    def token(self, token: int) -> None:
        self.words[_TOKEN] = token

    def sleep(self, counter: int, value: int) -> None:
        """Say that this rank sleeps until a counter has come to ``value`` on all control blocks."""
        self.words[_AWAITED] = value
        self.words[_AWAITED + 1] = counter + 1

    def awake(self) -> None:
        """Say that this rank sleeps no more."""
        self.words[_AWAITED + 1] = 0

    # -- read by all

    @property
    def state(self) -> int:
        return self.words[_STATE]

    def reason(self) -> tuple[int, str]:
        """When this rank has revoked the engine, and why; once its state says so."""
        since_ns, length = _REASON.unpack_from(self._reason)
        return since_ns, bytes(self._reason[_REASON.size : _REASON.size + length]).decode()

    def awaits(self, counter: int) -> int | None:
        """What this rank waits for, asleep, that the counter comes to."""
        words = self.words
        return words[_AWAITED] if words[_AWAITED + 1] == counter + 1 else None

    def signature(self, number: int) -> memoryview:
        """The signature of an operation that has been posted and is not done everywhere."""
        return self._signatures[number % WINDOW]

    def place(self, number: int) -> DataLocation:
        """Where the data of such an operation lie."""
        return DataLocation(*_PLACE.unpack_from(self._headers[number % WINDOW], SIGNATURE.size))

    # -- the bell: one word that all of an engine's ranks sleep at; rank 0's

    @property
    def bell(self) -> int:
        return self._half_words[_BELL * 2]

    def ring(self) -> None:
        """Change the word. Two ranks may do so at once and count as one: both have written their counters before."""
        self._half_words[_BELL * 2] = (self._half_words[_BELL * 2] + 1) % 2**32
