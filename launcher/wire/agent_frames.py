"""Encodes and decodes the messages between launcher and agent.

A frame is a header (kind, number, length of the payload) and the payload. Output, input and values of the store are
sent as raw bytes, so large amounts of them cost no more than a copy. All other messages are small and sent as JSON,
which `hvdlite_wire.codec` checks. The messages are defined in `messages` and `store_messages`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import get_args

from hvdlite_wire import codec

from ..errors import ProtocolError
from . import messages, store_messages
from .messages import Input, Message, Output, Stream
from .store_messages import StoreCommand, StoreEvent

MAX_PAYLOAD_BYTES = 16 << 20
# The limit for JSON from an agent: lower, since a small JSON text can decode to large objects.
_MAX_WORDS_BYTES = 1 << 20

WINDOW_BYTES = 4 << 20
"""The most output of one agent that the launcher may not have shown yet. Each quarter of it is one `OutputTaken`."""

MARK = b"\0hvdlite agent\0"
"""Precedes the first frame of an agent, because the start files of a login shell may print something before it."""

_HEADER = struct.Struct(">BII")  # kind, number of the worker or of the request to the store, length
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
_STREAM_KINDS: dict[Stream, int] = {stream: kind for kind, stream in _STREAMS.items()}
_INPUT_KIND = 18


# The messages sent as JSON, and the kind of each.
_KINDS_OF_JSON: Mapping[type[Message], int] = {
    messages.Started: 3,
    messages.Exited: 4,
    messages.Refused: 5,
    messages.InputWanted: 6,
    messages.Hello: 7,
    messages.Beat: 8,
    messages.InitStarted: 9,
    messages.InitDone: 10,
    messages.InitFailed: 14,
    messages.StartJob: 16,
    messages.SignalWorkers: 17,
    messages.Greet: 19,
    messages.OutputTaken: 23,
    messages.StartWorkers: 25,
    messages.Alive: 26,
    messages.Stalled: 27,
    messages.StatusTold: 28,
    messages.AskStatus: 29,
    messages.PeakMemory: 32,
}
# In another version they may have more fields. They are read all the same, since they tell which version it is.
_GREETINGS = (_KINDS_OF_JSON[messages.Hello], _KINDS_OF_JSON[messages.Greet])
_OF_KIND = {kind: message for message, kind in _KINDS_OF_JSON.items()}
_KINDS = frozenset({*_STREAMS, _INPUT_KIND, *store_messages.KINDS, *_OF_KIND})
_COMMANDS = [kind for of, kind in _KINDS_OF_JSON.items() if of in get_args(messages.Command)]

FROM_LAUNCHER = frozenset({_INPUT_KIND, *store_messages.COMMAND_KINDS, *_COMMANDS})
"""The kinds of frames that the launcher may send."""
FROM_AGENT = _KINDS - FROM_LAUNCHER | {_KINDS_OF_JSON[messages.Beat]}
"""The kinds of frames that an agent may send."""


def encode(message: Message) -> bytes:
    """Returns the frame for ``message``; raises `ProtocolError` if it would be too large."""
    if isinstance(message, Output):
        return _HEADER.pack(_STREAM_KINDS[message.stream], message.worker, len(message.data)) + message.data
    if isinstance(message, Input):
        return _HEADER.pack(_INPUT_KIND, message.worker, len(message.data)) + message.data
    if isinstance(message, StoreEvent | StoreCommand):
        kind, number, payload = store_messages.to_wire(message)
        return _HEADER.pack(kind, number, len(payload)) + payload
    payload = codec.encode(message)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"command and environment have {len(payload)} bytes, more than the limit of {MAX_PAYLOAD_BYTES}"
        )
    return _HEADER.pack(_KINDS_OF_JSON[type(message)], 0, len(payload)) + payload


class Decoder:
    """Decodes messages from a stream of bytes that may be split anywhere."""

    def __init__(self, kinds: Collection[int] = _KINDS) -> None:
        """``kinds`` are the kinds of frames that the other end may send: `FROM_LAUNCHER` or `FROM_AGENT`."""
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Adds received bytes and yields the messages that are complete.

        Raises `ProtocolError` for bytes that are no frame.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                kind, number, length = _HEADER.unpack_from(self._buffer, start)
                # Checked as soon as the header is complete: garbage must not make us wait for a payload, or store one.
                if kind not in self._kinds or length > _limit(kind):
                    raise ProtocolError(f"invalid frame: {bytes(self._buffer[start : start + 40])!r}")
                body = start + _HEADER.size
                if len(self._buffer) < body + length:
                    break
                start = body + length
                yield _decode(kind, number, bytes(self._buffer[body:start]))
        finally:
            del self._buffer[:start]


def _limit(kind: int) -> int:
    return _MAX_WORDS_BYTES if kind in _OF_KIND and kind in FROM_AGENT else MAX_PAYLOAD_BYTES


def _decode(kind: int, number: int, payload: bytes) -> Message:
    if kind in _STREAMS:
        return Output(number, _STREAMS[kind], payload)
    if kind == _INPUT_KIND:
        return Input(number, payload)
    try:
        if kind in store_messages.KINDS:
            return store_messages.from_wire(kind, number, payload)
        if kind in _GREETINGS:
            payload = codec.encode(json.loads(payload)[: len(fields(_OF_KIND[kind]))])
        return codec.decode(_OF_KIND[kind], payload)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"invalid frame of kind {kind}: {payload[:40]!r}") from error
