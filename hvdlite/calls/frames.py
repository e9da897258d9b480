"""
Encodes messages between a rank and rank 0: JSON in frames that are signed and counted.

    message ── Sealer ── length, tag, JSON ── Opener ── message, or a FrameError

`messages` has the families of messages.

`mailbox` uses it. The tag is computed with the connection's own key (see `handshake`) from the direction, the number of
earlier frames and the JSON. So a frame that is forged, changed, dropped, replayed or sent back to its sender is
rejected. No I/O happens here.
"""

from __future__ import annotations

import hmac
import json
import struct
from typing import Generic, TypeVar

from hvdlite_wire.codec import Family

from ..signing import Signer

MAX_BYTES = 256 << 20
"""Most bytes of one message's JSON. Longer messages are refused by the sender and by the receiver."""

# hvdlite's messages nest only a few levels deep; code that recurses into a deeper one would exhaust the stack.
_MAX_DEPTH = 64

_TAG_BYTES = 16
_HEADER = struct.Struct(f">I{_TAG_BYTES}s")

# While many frames are read at once, the bytes already read are deleted in steps of this size.
_CUT_BYTES = 1 << 20


Message = TypeVar("Message")


class FrameError(ValueError):
    """A frame is not valid: its length, its tag or its message is wrong."""


class Sealer(Generic[Message]):
    """Makes the frames of one direction of a connection."""

    def __init__(self, signer: Signer, family: Family[Message]) -> None:
        """``signer`` is the one for this direction of this connection."""
        self._signer = signer
        self._family = family
        self._count = 0

    def seal(self, message: Message) -> bytes:
        """Returns the next frame. Raises a ValueError if the message is too long; the connection stays usable."""
        data = self._family.encode(message)
        if len(data) > MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is longer than the limit of {MAX_BYTES}")
        tag = self._signer.sign(self._count, data)[:_TAG_BYTES]
        self._count += 1
        return _HEADER.pack(len(data), tag) + data


class Opener(Generic[Message]):
    """Reads the frames of one direction of a connection."""

    def __init__(self, signer: Signer, family: Family[Message]) -> None:
        """``signer`` is the one for this direction of this connection."""
        self._signer = signer
        self._family = family
        self._count = 0
        self._received = bytearray()

    def open(self, data: bytes) -> list[Message]:
        """Returns the messages completed by these bytes. After a FrameError nothing more can be read."""
        received = self._received
        received += data
        messages = []
        start = 0
        while len(received) - start >= _HEADER.size:
            length, tag = _HEADER.unpack_from(received, start)
            if length > MAX_BYTES:
                raise FrameError(f"it announces a message of {length} bytes, more than the limit of {MAX_BYTES}")
            end = start + _HEADER.size + length
            if len(received) < end:
                break
            messages.append(self._open(bytes(received[start + _HEADER.size : end]), tag))
            start = end
            if start > _CUT_BYTES:
                del received[:start]
                start = 0
        del received[:start]
        return messages

    def _open(self, data: bytes, tag: bytes) -> Message:
        expected = self._signer.sign(self._count, data)[:_TAG_BYTES]
        if not hmac.compare_digest(tag, expected):
            raise FrameError("a message is not signed with the connection's key, or is out of order")
        self._count += 1
        try:
            # This quick count includes brackets in strings; only if it is too high is the real depth measured.
            is_deeper = data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _is_deeper(json.loads(data), _MAX_DEPTH)
            message = self._family.decode(data)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a message is malformed: {error}") from error
        if is_deeper:
            raise FrameError(f"a message nests deeper than {_MAX_DEPTH} levels")
        return message


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and dicts nest deeper than this many levels; recurses no deeper than that."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in value if isinstance(each, (list, dict)))
