"""Encodes, decodes and validates the messages between launcher and agent: each field of a message has a check here.

A frame is a header (kind, number, length of the payload) and the payload. Output, input and values of the store are
sent as raw bytes, so large amounts of them cost no more than a copy. All other messages are small and sent as JSON. The
messages are defined in `messages` and `store_messages`. `agents.remote_agent` calls this module in the launcher,
`channel` in the agent.
"""

from __future__ import annotations

import ipaddress
import json
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from hvdlite_wire.assignments import NewWorkerPolicy
from hvdlite_wire.errors import MessageError

from ..errors import ProtocolError
from . import store_messages
from .messages import (
    Alive,
    AskProgress,
    Beat,
    Exited,
    Greet,
    Hello,
    InitDone,
    InitFailed,
    InitStarted,
    Input,
    InputWanted,
    Message,
    Output,
    OutputTaken,
    PeakMemory,
    Progressed,
    Refused,
    Reported,
    SignalWorkers,
    Stalled,
    Started,
    StartJob,
    StartWorkers,
    Stream,
    TakeReport,
)
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


# Each function below checks a value that was received and returns it, or raises one of `_WRONG`. Numbers have limits,
# since one that is too large would only fail later, in code that does not handle it.

_MOST_WORKERS, _MOST_GENERATIONS, _MOST_BYTES, _LAST_PORT, _LAST_PID = 10**6, 10**9, 1 << 40, 65535, 2**31 - 1
_MOST_QUESTIONS, _MOST_SECONDS = 10**9, 10.0**6


def _number(least: int, most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise TypeError(value)
        return value

    return check


_worker = _number(0, _MOST_WORKERS)


def _seconds(value: Any) -> float:
    if type(value) is not float or not 0 <= value < _MOST_SECONDS:
        raise TypeError(value)
    return value


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(value)
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(value)
    value.encode(errors="surrogateescape")  # fails for a lone surrogate, unless it stands for a byte that is not UTF-8
    return value


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _address(value: Any) -> str:
    return str(ipaddress.ip_address(_str(value)))


def _token(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-z-]+", _str(value)):  # it becomes part of a path
        raise ValueError(value)
    return str(value)


def _each(check: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise TypeError(value)
        return tuple(check(item) for item in value)

    return check_all


def _silences(value: Any) -> dict[str, float]:
    return {_address(other): _seconds(since_s) for other, since_s in value.items()}


def _words(value: Any) -> tuple[str, ...]:
    first, *rest = _each(_str)(value)
    return (first, *rest)


def _environment(value: Any) -> dict[str, str]:
    if any("=" in name for name in value):
        raise ValueError(value)
    return {_str(name): _str(text) for name, text in value.items()}


def _environments(value: Any) -> dict[int, dict[str, str]]:
    return {_worker(int(number)): _environment(own) for number, own in value.items()}


_OF_INIT: Mapping[str, Callable[[Any], Any]] = {"worker": _worker, "after": _or_none(_number(0, _MOST_GENERATIONS))}

_WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError)

# The messages sent as JSON: the kind of each, and a check for each of its fields.
_JSON: dict[type[Message], tuple[int, Mapping[str, Callable[[Any], Any]]]] = {
    Started: (3, {"worker": _worker, "pid": _number(1, _LAST_PID)}),
    Exited: (
        4,
        {
            "worker": _worker,
            "returncode": _number(-255, 255),
            **dict.fromkeys(("peer_lost", "left", "peer_left", "apart"), _bool),
            "peak_memory": _number(0, 1 << 60),
        },
    ),
    PeakMemory: (32, {"worker": _worker, "size": _number(0, 1 << 60)}),
    Refused: (5, {"why": _str, "exit_code": _number(1, 255), "worker": _or_none(_worker)}),
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
    InitStarted: (9, {**_OF_INIT, "newcomers": lambda value: NewWorkerPolicy(_number(0, 3)(value))}),
    InitDone: (10, _OF_INIT),
    InitFailed: (
        14,
        {**_OF_INIT, "is_unconnected": _bool, "addresses": _each(_address), "refused_by": _each(_address)},
    ),
    Alive: (
        26,
        {
            "worker": _worker,
            "number": _number(0, _MOST_QUESTIONS),
            "waited_s": _seconds,
            "addresses": _each(_address),
            "silent_s": _silences,
        },
    ),
    Stalled: (27, {"worker": _worker, "waited_s": _seconds}),
    Reported: (28, {"worker": _worker, "number": _number(0, _MOST_QUESTIONS), "facts": _str}),
    TakeReport: (29, {"number": _number(0, _MOST_QUESTIONS)}),
    Progressed: (30, {"worker": _worker, "number": _number(0, _MOST_QUESTIONS), "facts": _str}),
    AskProgress: (31, {"number": _number(0, _MOST_QUESTIONS)}),
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
            "forks": _bool,
            "slots": _number(1, _MOST_WORKERS),
            "workers": _environments,
        },
    ),
    StartWorkers: (25, {"workers": _environments}),
    SignalWorkers: (17, {"numbers": _each(_worker), "signum": _number(1, 64)}),
    OutputTaken: (23, {"count": _number(0, _MOST_BYTES)}),
    Greet: (19, {"version": _str, "beats": _bool, "count_slots": _bool, "interface": _or_none(_str)}),
}
_JSON_BY_KIND = {kind: (message, fields) for message, (kind, fields) in _JSON.items()}
_KINDS = frozenset({*_STREAMS, _INPUT_KIND, *store_messages.KINDS, *_JSON_BY_KIND})
_COMMANDS = (StartJob, StartWorkers, SignalWorkers, TakeReport, AskProgress, OutputTaken, Greet)
_OF_LAUNCHER = {_INPUT_KIND, *store_messages.COMMAND_KINDS, *(_JSON[command][0] for command in _COMMANDS)}
_BEAT_KIND = _JSON[Beat][0]

FROM_LAUNCHER = frozenset({*_OF_LAUNCHER, _BEAT_KIND})
"""The kinds of frames that the launcher may send."""
FROM_AGENT = _KINDS - _OF_LAUNCHER
"""The kinds of frames that an agent may send."""


def read_links(data: bytes) -> tuple[tuple[str, ...], dict[str, float]]:
    """Returns a worker's own addresses and its silent ones, for `Alive`, from what the worker sends.

    Raises a `MessageError` for anything else.
    """
    try:
        addresses, silent_s = json.loads(data)
        return _each(_address)(addresses), _silences(silent_s)
    except _WRONG as error:
        raise MessageError(f"what a worker says of its connections is wrong: {data[:40]!r}") from error


def read_refusals(data: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns a worker's own addresses and those that refused it, for `InitFailed`, from what the worker sends.

    Raises a `MessageError` for anything else.
    """
    try:
        addresses, refused_by = json.loads(data)
        return _each(_address)(addresses), _each(_address)(refused_by)
    except _WRONG as error:
        raise MessageError(f"what a worker says of its connections is wrong: {data[:40]!r}") from error


def encode(message: Message) -> bytes:
    """Returns the frame for ``message``; raises `ProtocolError` if it would be too large."""
    if isinstance(message, Output):
        return _HEADER.pack(_STREAM_KINDS[message.stream], message.worker, len(message.data)) + message.data
    if isinstance(message, Input):
        return _HEADER.pack(_INPUT_KIND, message.worker, len(message.data)) + message.data
    if isinstance(message, StoreEvent | StoreCommand):
        kind, number, payload = store_messages.to_wire(message)
        return _HEADER.pack(kind, number, len(payload)) + payload
    payload = json.dumps(asdict(message)).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"command and environment have {len(payload)} bytes, more than the limit of {MAX_PAYLOAD_BYTES}"
        )
    return _HEADER.pack(_JSON[type(message)][0], 0, len(payload)) + payload


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
    return _MAX_WORDS_BYTES if kind in _JSON_BY_KIND and kind not in _OF_LAUNCHER else MAX_PAYLOAD_BYTES


def _decode(kind: int, number: int, payload: bytes) -> Message:
    if kind in _STREAMS:
        return Output(number, _STREAMS[kind], payload)
    if kind == _INPUT_KIND:
        return Input(number, payload)
    if kind in store_messages.KINDS:
        try:
            return store_messages.from_wire(kind, number, payload)
        except MessageError as error:
            raise ProtocolError("invalid frame of the store") from error
    message, fields = _JSON_BY_KIND[kind]
    try:
        given = json.loads(payload)
        return message(**{name: check(given[name]) for name, check in fields.items()})
    except _WRONG as error:
        raise ProtocolError(f"invalid frame of kind {kind}: {payload[:40]!r}") from error
