"""
The requests to the rendezvous store that workers send to their host's agent, and the ranks that they read there.

    worker ── request ──► agent ──► launcher's store        request: operation and byte strings
           ◄── answer ──        ◄──                         answer: outcome and byte strings

    a worker asks after generation g ── assignment_key(worker, g) ── RankAssignment or Dismissal
    a worker that has asked takes that back ── standby_key(worker) ── 1 if it can, 0 if it has been given a rank

A frame is a header (operation or outcome, length of the payload) and the payload. The payload is a sequence of byte
strings, each preceded by its length. `hvdlite.rendezvous.store_client` is the worker's end. In the agent,
`hvdlite_launcher.store.relay` answers the requests that it can, and the launcher's `server` answers the rest.
`hvdlite_launcher.elastic.rank_assignments` gives the ranks of an elastic job.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from .codec import Count, Family, MessageError

# The agent forwards a request in one frame: this leaves room for its header within the launcher's MAX_PAYLOAD_BYTES.
MAX_REQUEST_BYTES = (16 << 20) - 64
CHUNK_BYTES = 1 << 20
"""The size of one piece of a large value, which has a key of its own; the value's key holds the number of pieces."""


class StoreRequest(IntEnum):
    """A worker's request to the store. The comments give its arguments ── and its answer."""

    SET = 1  # key, value, key, value, … ── nothing
    GET = 2  # keys ── their values, once all keys are set
    WAIT = 3  # keys ── nothing, once all keys are set
    CHECK = 4  # keys ── 1 if all keys are set, else 0
    ADD = 5  # key, number ── the sum
    COMPARE_SET = 6  # key, expected, desired ── the value after the operation
    APPEND = 7  # key, value ── nothing
    DELETE = 8  # key ── 1 if it was set, else 0
    COUNT = 9  # nothing ── the number of keys
    # In an elastic job these have a second argument: the last generation that the worker was given a rank in, or 0.
    # INIT_STARTED may have a third one: whether that generation may have new workers, a `NewWorkerPolicy`.
    INIT_STARTED = 10  # number of the worker that has entered hvd.init() ── nothing
    INIT_DONE = 11  # number of the worker whose hvd.init() has succeeded ── nothing
    # With generation 0 it takes back that it has asked for a rank; it reads in `standby_key` whether it could.
    # If it could not connect to the ranks of that generation, it has a third argument: `codec.Refusals`, encoded.
    INIT_FAILED = 12  # number of the worker whose hvd.init() has raised an exception ── nothing
    # Between hosts it has a fourth argument: `codec.HostLinks`, encoded.
    ALIVE = 13  # number of the worker, of the question (`elastic.hangs`), milliseconds that it has waited ── nothing
    STALLED = 14  # number of the worker, milliseconds that it has waited for other ranks ── nothing


DONE, FAILED = 0, 1  # outcomes; the payload of FAILED is the reason, as text

HEADER = struct.Struct(">BI")
_LENGTH = struct.Struct(">I")
_OF_GENERATION = re.compile(rb"world([0-9]{1,9})/")


def pack(parts: Iterable[bytes]) -> bytes:
    return b"".join([piece for part in parts for piece in (_LENGTH.pack(len(part)), part)])


def unpack(payload: bytes) -> list[bytes]:
    """Returns the byte strings that `pack` joined; raises `MessageError` for anything else."""
    parts = []
    start = 0
    while start < len(payload):
        body = start + _LENGTH.size
        if body > len(payload):
            raise MessageError("invalid request to the store: it ends within a length")
        start = body + _LENGTH.unpack_from(payload, body - _LENGTH.size)[0]
        if start > len(payload):
            raise MessageError("invalid request to the store: it is shorter than its lengths say")
        parts.append(payload[body:start])
    return parts


def chunk_key(key: bytes, number: int) -> bytes:
    return b"%b/%d" % (key, number)


def in_chunks(key: bytes, value: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values to set, in this order, for a large value: its own key last, for which readers wait."""
    starts = range(0, len(value), CHUNK_BYTES)
    for number, start in enumerate(starts):
        yield chunk_key(key, number), value[start : start + CHUNK_BYTES]
    yield key, b"%d" % len(starts)


def is_up_to(key: bytes, generation: int) -> bool:
    """Whether the ranks of this generation or of an earlier one meet under this key, ``world<generation>/...``."""
    match = _OF_GENERATION.match(key)
    return match is not None and int(match[1]) <= generation


def frame(code: int, payload: bytes) -> bytes:
    return HEADER.pack(code, len(payload)) + payload


class RequestDecoder:
    """Decodes one worker's requests from a stream of bytes that may be split anywhere."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> tuple[StoreRequest, bytes] | None:
        """Adds received bytes and returns the request if it is complete, else None.

        Raises `MessageError` for bytes that are no request, or are more than one: a worker waits for the answer first.
        """
        self._buffer += data
        if len(self._buffer) < HEADER.size:
            return None
        code, length = HEADER.unpack_from(self._buffer)
        # Checked as soon as the header is complete: garbage must not make us wait for a payload, or store one.
        if not 1 <= code <= len(StoreRequest) or length > MAX_REQUEST_BYTES or len(self._buffer) > HEADER.size + length:
            raise MessageError("invalid request to the store")
        if len(self._buffer) < HEADER.size + length:
            return None
        payload = bytes(self._buffer[HEADER.size :])
        self._buffer.clear()
        return StoreRequest(code), payload


class NewWorkerPolicy(IntEnum):
    """Whether a worker can go on in a generation that has workers which were in none before."""

    WELCOME = 0
    IF_NEEDED = 1
    """Only if there are fewer than --min-np without them: its step is then begun again."""
    AFTERWARDS = 2
    """Not in the next generation, but in the one after. If there are fewer than --min-np ranks without the new workers,
    the job first waits for them."""
    NEVER = 3
    """Its program could not give them the state of its training."""


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A worker's rank in one generation; ``newcomers`` counts the ranks that were in none before."""

    generation: Count
    rank: Count
    size: Count
    newcomers: Count

    @property
    def prefix(self) -> str:
        """The prefix of the keys under which the ranks of this generation connect."""
        return f"world{self.generation}"


@dataclass(frozen=True, slots=True)
class Dismissal:
    """The worker has no rank in any later generation. ``why`` is for the user."""

    why: str


def assignment_key(worker: int, after: int) -> bytes:
    """Returns the key for a worker that asks for a rank in a generation later than ``after``."""
    return b"rank/%d/%d" % (worker, after)


def standby_key(worker: int) -> bytes:
    return b"standby/%d" % worker


ANSWERS: Family[RankAssignment | Dismissal] = Family({"assigned": RankAssignment, "dismissed": Dismissal})
"""The encoding of what `assignment_key` holds."""
