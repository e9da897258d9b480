"""How messages lie on the wire between launcher and agent: frames of bytes, and back.

A frame is a header (kind, rank, length of the payload) and the payload. Output, input and what is in the store
travel as the bytes that they are, so that a flood costs no more than copying it; all else is small, and JSON.
What the messages mean is in `messages`; who reads and writes the pipes is not said here: see `remote` (the
launcher's end) and `channel`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from . import exchange
from .errors import ProtocolError
from .exchange import StoreCommand, StoreEvent
from .messages import (
    Beat,
    Exited,
    GaveUp,
    Greet,
    Hello,
    Input,
    InputWanted,
    Joined,
    Joining,
    Message,
    Output,
    OutputTaken,
    Refused,
    SignalRanks,
    Started,
    StartJob,
    Stream,
)

MAX_PAYLOAD_BYTES = 16 << 20

WINDOW_BYTES = 4 << 20
"""How much output of an agent may be on its way to the screen; it is told of what was shown a quarter at a time."""

MARK = b"\0hvdlite agent\0"
"""Written before the first frame of an agent: a login shell's start files may have printed something before."""

_HEADER = struct.Struct(">BII")  # kind, rank (of output and input) or number (of questions to the store), length
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
_STREAM_KINDS: dict[Stream, int] = {stream: kind for kind, stream in _STREAMS.items()}
_INPUT_KIND = 18


# Each takes a value from outside and gives it back as it should be, or raises one of `_WRONG`.


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(value)
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(value)
    return value


def _int_or_none(value: Any) -> int | None:
    return None if value is None else _int(value)


def _str_or_none(value: Any) -> str | None:
    return None if value is None else _str(value)


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(_int(item) for item in value)


def _strs(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(value)
    return tuple(_str(item) for item in value)


def _words(value: Any) -> tuple[str, ...]:
    first, *rest = _strs(value)
    return (first, *rest)


def _environment(value: Any) -> dict[str, str]:
    return {_str(name): _str(text) for name, text in value.items()}


def _environments(value: Any) -> dict[int, dict[str, str]]:
    return {int(rank): _environment(own) for rank, own in value.items()}


_WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError)

# What is JSON: its kind, and what each of its fields must be.
_JSON: dict[type[Message], tuple[int, Mapping[str, Callable[[Any], Any]]]] = {
    Started: (3, {"rank": _int, "pid": _int}),
    Exited: (4, {"rank": _int, "returncode": _int, "peer_lost": _bool, "left": _bool}),
    Refused: (5, {"why": _str, "exit_code": _int}),
    InputWanted: (6, {"rank": _int}),
    Hello: (
        7,
        {"version": _str, "slots": _int_or_none, "address": _str_or_none, "port": _int, "machine": _str_or_none},
    ),
    Beat: (8, {}),
    Joining: (9, {"rank": _int}),
    Joined: (10, {"rank": _int}),
    GaveUp: (14, {"rank": _int}),
    StartJob: (
        16,
        {
            "token": _str,
            "command": _words,
            "cwd": _str,
            "environment": _environment,
            "inherits": _bool,
            "peers": _strs,
            "in_python": _bool,
            "as_horovod": _bool,
            "workers": _environments,
        },
    ),
    SignalRanks: (17, {"ranks": _ints, "signum": _int}),
    OutputTaken: (23, {"count": _int}),
    Greet: (19, {"version": _str, "beats": _bool, "count_slots": _bool, "interface": _str_or_none}),
}
_JSON_BY_KIND = {kind: (message, fields) for message, (kind, fields) in _JSON.items()}
_KINDS = {*_STREAMS, _INPUT_KIND, *exchange.KINDS, *_JSON_BY_KIND}


def encode(message: Message) -> bytes:
    """The one frame that carries ``message``."""
    if isinstance(message, Output):
        return _HEADER.pack(_STREAM_KINDS[message.stream], message.rank, len(message.data)) + message.data
    if isinstance(message, Input):
        return _HEADER.pack(_INPUT_KIND, message.rank, len(message.data)) + message.data
    if isinstance(message, StoreEvent | StoreCommand):
        kind, number, payload = exchange.to_wire(message)
        return _HEADER.pack(kind, number, len(payload)) + payload
    payload = json.dumps(asdict(message)).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"command and environment are {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(_JSON[type(message)][0], 0, len(payload)) + payload


class Decoder:
    """Turns bytes, cut anywhere, back into messages. What is no frame of ours raises `ProtocolError`."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                kind, rank, length = _HEADER.unpack_from(self._buffer, start)
                # Judged by the header alone: garbage must neither be waited for nor be stored.
                if kind not in _KINDS or length > MAX_PAYLOAD_BYTES:
                    raise ProtocolError(f"not a frame of hvdlite's: {bytes(self._buffer[start : start + 40])!r}")
                body = start + _HEADER.size
                if len(self._buffer) < body + length:
                    break
                start = body + length
                yield _decode(kind, rank, bytes(self._buffer[body:start]))
        finally:
            del self._buffer[:start]


def _decode(kind: int, rank: int, payload: bytes) -> Message:
    if kind in _STREAMS:
        return Output(rank, _STREAMS[kind], payload)
    if kind == _INPUT_KIND:
        return Input(rank, payload)
    if kind in exchange.KINDS:
        return exchange.from_wire(kind, rank, payload)
    message, fields = _JSON_BY_KIND[kind]
    try:
        given = json.loads(payload)
        return message(**{name: check(given[name]) for name, check in fields.items()})
    except _WRONG as error:
        raise ProtocolError(f"a frame of kind {kind} does not hold what it should: {payload[:40]!r}") from error
