"""What launcher and agent say to each other, and how it lies on the wire.

    launcher ── StartJob, SignalRanks, Input ──► agent's stdin   (at its end: kill everything)
    launcher ◄── Started, InputWanted, Output, Exited, Refused ── agent's stdout

A frame is a header (kind, rank, length of the payload) and the payload. Output and input travel as the bytes that
they are, so that a flood costs no more than copying it; all else is small, and JSON. `Lost`, `Interrupted`,
`InputRead` and the screen's events arise in the launcher and never travel. Who reads and writes the pipes
is not said here: see `remote` (the launcher's end) and `agent`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .errors import ProtocolError

MAX_PAYLOAD_BYTES = 16 << 20

Stream = Literal["stdout", "stderr"]


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Output:
    """Bytes that a worker wrote, cut anywhere."""

    rank: int
    stream: Stream
    data: bytes


@dataclass(frozen=True)
class Started:
    rank: int
    pid: int


@dataclass(frozen=True)
class InputWanted:
    """A worker's standard input has taken all that was sent, and has room for one more `Input`."""

    rank: int


@dataclass(frozen=True)
class Exited:
    """A worker has ended, and all it wrote came before this.

    ``returncode`` is -n for signal n. ``peer_lost``: it said itself that it ends only because another did;
    ``left``: that it was leaving the others, before they could notice.
    """

    rank: int
    returncode: int
    peer_lost: bool = False
    left: bool = False


@dataclass(frozen=True)
class Refused:
    """The agent could not start the command; ``exit_code`` is what a shell would give (127: not found)."""

    why: str
    exit_code: int


@dataclass(frozen=True)
class Lost:
    """No more will come from this host's agent."""

    host: str
    why: str


@dataclass(frozen=True)
class Interrupted:
    """The launcher itself received a signal."""

    signum: int


@dataclass(frozen=True)
class InputRead:
    """What came on the launcher's standard input; nothing, at its end."""

    data: bytes


@dataclass(frozen=True)
class ScreenFailed:
    """Nothing can be written there any more: to a stream of the launcher's, or to a worker's file."""

    where: str
    error: OSError


@dataclass(frozen=True)
class ScreenDone:
    """All output has been written."""


AgentEvent = Output | Started | InputWanted | Exited | Refused
Event = AgentEvent | Lost | Interrupted | InputRead | ScreenFailed | ScreenDone


# -------------------------------------------------------------- commands


@dataclass(frozen=True)
class StartJob:
    """Start this host's workers: one command, in one environment but for each rank's own variables."""

    token: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    workers: Mapping[int, Mapping[str, str]]


@dataclass(frozen=True)
class SignalRanks:
    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Input:
    """For a worker's standard input, once it was wanted; nothing means its end."""

    rank: int
    data: bytes


Command = StartJob | SignalRanks | Input
Message = AgentEvent | Command


# --------------------------------------------------------------- framing

_HEADER = struct.Struct(">BII")  # kind, rank (of output and input; else 0), payload's length
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}
_STREAM_KINDS: dict[Stream, int] = {stream: kind for kind, stream in _STREAMS.items()}
_INPUT_KIND = 18
_JSON_KINDS: dict[type[Message], int] = {
    Started: 3,
    Exited: 4,
    Refused: 5,
    InputWanted: 6,
    StartJob: 16,
    SignalRanks: 17,
}
_KINDS = {*_STREAMS, _INPUT_KIND, *_JSON_KINDS.values()}


def encode(message: Message) -> bytes:
    """The one frame that carries ``message``."""
    if isinstance(message, Output):
        return _HEADER.pack(_STREAM_KINDS[message.stream], message.rank, len(message.data)) + message.data
    if isinstance(message, Input):
        return _HEADER.pack(_INPUT_KIND, message.rank, len(message.data)) + message.data
    payload = json.dumps(asdict(message)).encode()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"command and environment are {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(_JSON_KINDS[type(message)], 0, len(payload)) + payload


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
    try:
        return _from_fields(kind, json.loads(payload))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a frame of kind {kind} does not hold what it should: {payload[:40]!r}") from error


def _from_fields(kind: int, fields: Any) -> Message:  # Any: it is JSON from outside, each field is checked below
    if kind == _JSON_KINDS[Started]:
        return Started(_int(fields["rank"]), _int(fields["pid"]))
    if kind == _JSON_KINDS[InputWanted]:
        return InputWanted(_int(fields["rank"]))
    if kind == _JSON_KINDS[Exited]:
        return Exited(
            _int(fields["rank"]), _int(fields["returncode"]), fields["peer_lost"] is True, fields["left"] is True
        )
    if kind == _JSON_KINDS[Refused]:
        return Refused(_str(fields["why"]), _int(fields["exit_code"]))
    if kind == _JSON_KINDS[SignalRanks]:
        return SignalRanks(tuple(_int(rank) for rank in fields["ranks"]), _int(fields["signum"]))
    program, *arguments = fields["command"]
    return StartJob(
        _str(fields["token"]),
        (_str(program), *map(_str, arguments)),
        _str(fields["cwd"]),
        _environment(fields["environment"]),
        {int(rank): _environment(own) for rank, own in fields["workers"].items()},
    )


def _int(value: object) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value


def _str(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(value)
    return value


def _environment(value: Any) -> dict[str, str]:  # Any: JSON from outside, checked name by name
    return {_str(name): _str(text) for name, text in value.items()}
