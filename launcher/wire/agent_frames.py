"""Encodes the messages between launcher and agent as frames of bytes, and decodes them.

A frame is a header (kind, number, length of the payload) and the payload. Output, input and what is in the store
travel as the bytes that they are, so that a flood costs no more than copying it; all else is small, and JSON.
What the messages mean is in `messages`; who reads and writes the pipes is not said here: see `remote_agent` (the
launcher's end) and `channel`.
"""

from __future__ import annotations

import ipaddress
import json
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..errors import ProtocolError
from . import store_messages
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
    SignalWorkers,
    Started,
    StartJob,
    Stream,
)
from .store_messages import StoreCommand, StoreEvent

MAX_PAYLOAD_BYTES = 16 << 20
# Of what an agent says in JSON: a small text can become large values.
_MAX_WORDS_BYTES = 1 << 20

WINDOW_BYTES = 4 << 20
"""How much output of an agent may be on its way to the screen; it is told of what was shown a quarter at a time."""

MARK = b"\0hvdlite agent\0"
"""Written before the first frame of an agent: a login shell's start files may have printed something before."""

_HEADER = struct.Struct(">BII")  # kind, number of the worker or of a question to the store, length
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
_STREAM_KINDS: dict[Stream, int] = {stream: kind for kind, stream in _STREAMS.items()}
_INPUT_KIND = 18


# Each takes a value from outside and gives it back as it should be, or raises one of `_WRONG`. A number that is too
# large for what it counts would fail later, where nobody expects it.

_MOST_WORKERS, _MOST_BYTES, _LAST_PORT, _LAST_PID = 10**6, 1 << 40, 65535, 2**31 - 1


def _number(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise TypeError(value)
        return value

    return check


_worker = _number(0, _MOST_WORKERS)


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(value)
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(value)
    value.encode(errors="surrogateescape")  # half a character is none, and a byte that is no text is one
    return value


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _address(value: Any) -> str:
    return str(ipaddress.ip_address(_str(value)))


def _token(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-z-]+", _str(value)):  # it becomes a part of a path
        raise ValueError(value)
    return str(value)


def _each(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(value)
        return tuple(check(item) for item in value)

    return check_all


def _words(value: Any) -> tuple[str, ...]:
    first, *rest = _each(_str)(value)
    return (first, *rest)


def _environment(value: Any) -> dict[str, str]:
    if any("=" in name for name in value):
        raise ValueError(value)
    return {_str(name): _str(text) for name, text in value.items()}


def _environments(value: Any) -> dict[int, dict[str, str]]:
    return {_worker(int(number)): _environment(own) for number, own in value.items()}


_WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError)

# What is JSON: its kind, and what each of its fields must be.
_JSON: dict[type[Message], tuple[int, Mapping[str, Callable[[Any], Any]]]] = {
    Started: (3, {"worker": _worker, "pid": _number(1, _LAST_PID)}),
    Exited: (4, {"worker": _worker, "returncode": _number(-255, 255), "peer_lost": _bool, "left": _bool}),
    Refused: (5, {"why": _str, "exit_code": _number(1, 255)}),
    InputWanted: (6, {"worker": _worker}),
    Hello: (
        7,
        {
            "version": _str,
            "slots": _or_none(_number(1, _MOST_WORKERS)),
            "address": _or_none(_address),
            "port": _number(1, _LAST_PORT),
            "machine": _or_none(_str),
        },
    ),
    Beat: (8, {}),
    Joining: (9, {"worker": _worker}),
    Joined: (10, {"worker": _worker}),
    GaveUp: (14, {"worker": _worker}),
    StartJob: (
        16,
        {
            "token": _token,
            "command": _words,
            "cwd": _str,
            "environment": _environment,
            "inherits": _bool,
            "peers": _each(_address),
            "in_python": _bool,
            "as_horovod": _bool,
            "workers": _environments,
        },
    ),
    SignalWorkers: (17, {"numbers": _each(_worker), "signum": _number(1, 64)}),
    OutputTaken: (23, {"count": _number(0, _MOST_BYTES)}),
    Greet: (19, {"version": _str, "beats": _bool, "count_slots": _bool, "interface": _or_none(_str)}),
}
_JSON_BY_KIND = {kind: (message, fields) for message, (kind, fields) in _JSON.items()}
_KINDS = frozenset({*_STREAMS, _INPUT_KIND, *store_messages.KINDS, *_JSON_BY_KIND})
_COMMANDS = (StartJob, SignalWorkers, OutputTaken, Greet)
_OF_LAUNCHER = {_INPUT_KIND, *store_messages.COMMAND_KINDS, *(_JSON[command][0] for command in _COMMANDS)}
_BEAT_KIND = _JSON[Beat][0]

FROM_LAUNCHER = frozenset({*_OF_LAUNCHER, _BEAT_KIND})
"""The kinds of frames that an agent may read."""
FROM_AGENT = _KINDS - _OF_LAUNCHER
"""Those that the launcher may."""


def encode(message: Message) -> bytes:
    """The one frame that carries ``message``."""
    if isinstance(message, Output):
        return _HEADER.pack(_STREAM_KINDS[message.stream], message.worker, len(message.data)) + message.data
    if isinstance(message, Input):
        return _HEADER.pack(_INPUT_KIND, message.worker, len(message.data)) + message.data
    if isinstance(message, StoreEvent | StoreCommand):
        kind, number, payload = store_messages.to_wire(message)
        return _HEADER.pack(kind, number, len(payload)) + payload
    payload = json.dumps(asdict(message)).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"command and environment are {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(_JSON[type(message)][0], 0, len(payload)) + payload


class Decoder:
    """Turns bytes, cut anywhere, back into messages. What is no frame of ours raises `ProtocolError`."""

    def __init__(self, kinds: Collection[int] = _KINDS) -> None:
        """``kinds`` are those that the other end may send; others are not even looked into."""
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                kind, number, length = _HEADER.unpack_from(self._buffer, start)
                # Judged by the header alone: garbage must neither be waited for nor be stored.
                if kind not in self._kinds or length > _limit(kind):
                    raise ProtocolError(f"not a frame of hvdlite's: {bytes(self._buffer[start : start + 40])!r}")
                body = start + _HEADER.size
                if len(self._buffer) < body + length:
                    break
                start = body + length
                yield _decode(kind, number, bytes(self._buffer[body:start]))
        finally:
            del self._buffer[:start]


def _limit(kind: int) -> int:
    return _MAX_WORDS_BYTES if kind in _JSON_BY_KIND and kind not in _OF_LAUNCHER else MAX_PAYLOAD_BYTES


def _decode(kind: int, number: int, payload: bytes) -> Message:
    if kind in _STREAMS:
        return Output(number, _STREAMS[kind], payload)
    if kind == _INPUT_KIND:
        return Input(number, payload)
    if kind in store_messages.KINDS:
        return store_messages.from_wire(kind, number, payload)
    message, fields = _JSON_BY_KIND[kind]
    try:
        given = json.loads(payload)
        return message(**{name: check(given[name]) for name, check in fields.items()})
    except _WRONG as error:
        raise ProtocolError(f"a frame of kind {kind} does not hold what it should: {payload[:40]!r}") from error
