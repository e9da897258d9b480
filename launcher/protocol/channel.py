"""
The connection between launcher and agent: messages as bytes, and one end of it, which detects a silent other end.

A frame is a header (kind, number, length of the payload) and the payload. Output, input and values of the store are
sent as raw bytes, so large amounts of them cost no more than a copy. All other messages are small and sent as JSON,
which `hvdlite_wire.codec` checks.

The agent (`host.agent`) and the launcher (`agents.remote_agent`) own a `Channel` each and handle the messages. No call
blocks: bytes that the other end does not read yet are kept in memory.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from typing import get_args

from hvdlite_wire import codec

from ..errors import ProtocolError
from . import messages, store_messages
from .messages import Beat, Input, Message, Output, Stream
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
        """``kinds`` of frames are those that the other end may send: `FROM_LAUNCHER` or `FROM_AGENT`."""
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Adds received bytes, yields the messages that are complete; a `ProtocolError` for bytes that are no frame."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                kind, number, length = _HEADER.unpack_from(self._buffer, start)
                # Checked as soon as the header is complete: garbage must not make us wait for a payload, or store one.
                is_json_of_agent = kind in _OF_KIND and kind in FROM_AGENT
                if kind not in self._kinds or length > (_MAX_WORDS_BYTES if is_json_of_agent else MAX_PAYLOAD_BYTES):
                    raise ProtocolError(f"invalid frame: {bytes(self._buffer[start : start + 40])!r}")
                body = start + _HEADER.size
                if len(self._buffer) < body + length:
                    break
                start = body + length
                yield _decode(kind, number, bytes(self._buffer[body:start]))
        finally:
            del self._buffer[:start]


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


# Where both ends agreed to send beats (`Greet.beats`), each sends one every BEAT_S and treats the other as dead after
# SILENCE_S without any bytes. With the time to end the workers, a job has ended at most 20 s after a link was cut.
BEAT_S = 2.0
SILENCE_S = 10.0

_READ_BYTES = 1 << 18
_OUTGOING_BYTES = 1 << 18


class Channel:
    """Sends and receives messages over two file descriptors, from the event loop that owns ``selector``."""

    def __init__(
        self,
        incoming: int,
        outgoing: int,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
        kinds: Collection[int] = FROM_LAUNCHER,
    ) -> None:
        """Reads from one descriptor, and writes to the other. ``kinds`` of frames are those that may come.

        ``selector``: the data of each registration is a function without arguments, which the event loop calls.
        """
        self._in = incoming
        self._out = outgoing
        self._selector = selector
        self._clock = clock
        self._decoder = Decoder(kinds)
        self._outgoing = bytearray()
        self._beats_at: float | None = None
        self._heard_at = clock()
        self._close: Callable[[], object] = lambda: None
        self._is_registered = self._is_closed = False  # what is written to
        self.is_finished = False
        """Whether nothing more may be sent."""
        self.closed = self.silent = False
        """Whether the other end has closed the connection or was silent for too long, and whether it was the latter."""
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    @property
    def full(self) -> bool:
        """Whether the unsent bytes exceed a limit, so that the agent should read no more output from its workers."""
        return len(self._outgoing) > _OUTGOING_BYTES

    def receive(self) -> Iterator[Message]:
        """Reads once and yields the messages that are complete. Call it when there is something to read."""
        return self.decode(self.read())

    def read(self) -> bytes:
        """Reads once, for `decode`; returns b"" at the end. Call it when there is something to read."""
        data = os.read(self._in, _READ_BYTES)
        self.hear()
        if not data:
            self.closed = True
        return data

    def hear(self) -> None:
        self._heard_at = self._clock()

    def decode(self, data: bytes) -> Iterator[Message]:
        """Yields the messages that are complete with what was read last."""
        return self._decoder.feed(data)

    def send(self, message: Message | bytes) -> None:
        """Queues a message for the next `flush`; bytes are one that is encoded already."""
        self._outgoing += message if isinstance(message, bytes) else encode(message)

    def flush(self) -> None:
        """Writes as much as the other end accepts now, and has the event loop call this again for the rest."""
        if self._is_closed:  # another file may have the descriptor's number by now
            return
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._out, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the other end no longer reads
            self.closed = True
            self._outgoing.clear()
        if self._outgoing and not self._is_registered:
            self._selector.register(self._out, selectors.EVENT_WRITE, self.flush)
            self._is_registered = True
        elif self._is_registered and not self._outgoing:
            self._selector.unregister(self._out)
            self._is_registered = False
        if self.is_finished and not self._outgoing:
            self._is_closed = True
            self._close()

    def finish(self, close: Callable[[], object], *, drops_rest: bool = False) -> None:
        """Calls ``close`` once all is written, and nothing may be sent. May be called again: to drop the rest."""
        self.is_finished, self._close = True, close
        if drops_rest:
            self._outgoing.clear()
        self.flush()

    def beat(self) -> None:
        self._heard_at = self._beats_at = self._clock()

    def time_left_s(self) -> float | None:
        """Returns the seconds until `tick` must be called, or None if no beats are sent."""
        return None if self._beats_at is None else max(0.0, self._beats_at - self._clock())

    def tick(self) -> None:
        """Sends a beat if one is due, and sets `closed` and `silent` if the other end was silent for too long."""
        if self._beats_at is None or (now := self._clock()) < self._beats_at:
            return
        self._beats_at = now + BEAT_S
        if not self._outgoing:  # unsent bytes serve as a beat too
            self.send(Beat())
        # This process may have been too busy to read.
        if now - self._heard_at > SILENCE_S and not self._has_unread():
            self.closed = self.silent = True

    def _has_unread(self) -> bool:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        return bool(poll.poll(0))
