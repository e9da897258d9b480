"""
Messages as they travel between a rank and rank 0: JSON in frames that are signed, and counted.

    message ── Sealer ── length, tag, JSON ── Opener ── message, or a FrameError

The tag is of the connection's own key (see `handshake`), of which way it goes and of how many went before: a frame that
is forged, changed, left out, sent twice or sent back to whoever made it does not open. Pure.
"""

from __future__ import annotations

import hmac
import json
import struct
from typing import Any

from ..signing import Signer

MAX_BYTES = 256 << 20
"""The JSON of one message at most. Longer ones are refused by who would send them, and by who is sent them."""

# No message that hvdlite sends nests deeper than a few levels; who walks through one that does runs out of stack.
_MAX_DEPTH = 64

_TAG_BYTES = 16
_HEADER = struct.Struct(f">I{_TAG_BYTES}s")

# Between frames of a long queue, what has been read is cut off now and then.
_CUT_BYTES = 1 << 20


class FrameError(ValueError):
    """A frame is not valid: its length, its tag or its JSON is wrong."""


class Sealer:
    """Makes the frames of one direction of a connection."""

    def __init__(self, signer: Signer) -> None:
        """``signer``: this connection's, for this direction alone."""
        self._signer = signer
        self._count = 0

    def seal(self, message: list[Any]) -> bytes:
        """The next frame. A ValueError if the message is too long, which leaves the connection as it was."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is more than the {MAX_BYTES} that ranks may send at once")
        tag = self._signer.sign(self._count, data)[:_TAG_BYTES]
        self._count += 1
        return _HEADER.pack(len(data), tag) + data


class Opener:
    """Reads the frames of one direction of a connection."""

    def __init__(self, signer: Signer) -> None:
        """``signer``: this connection's, for this direction alone."""
        self._signer = signer
        self._count = 0
        self._received = bytearray()

    def open(self, data: bytes) -> list[list[Any]]:
        """The messages that have come whole with these bytes; a FrameError ends what can be read for good."""
        received = self._received
        received += data
        messages = []
        start = 0
        while len(received) - start >= _HEADER.size:
            length, tag = _HEADER.unpack_from(received, start)
            if length > MAX_BYTES:
                raise FrameError(f"it announces a message of {length} bytes, more than the {MAX_BYTES} that are taken")
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

    def _open(self, data: bytes, tag: bytes) -> list[Any]:
        expected = self._signer.sign(self._count, data)[:_TAG_BYTES]
        if not hmac.compare_digest(tag, expected):
            raise FrameError("a message is not signed with the connection's key, or is not the next one")
        self._count += 1
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a message is not JSON ({type(error).__name__}: {error})") from error
        # Brackets within strings count here too, and are told apart only where there are as many.
        if data.count(b"[") + data.count(b"{") > _MAX_DEPTH and _is_deeper(message, _MAX_DEPTH):
            raise FrameError(f"a message nests deeper than {_MAX_DEPTH} levels")
        if not isinstance(message, list) or not message:
            raise FrameError("a message is no list that begins with what it is")
        return message


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and dicts nest deeper than so many levels; goes no further down than that."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in value if isinstance(each, (list, dict)))
