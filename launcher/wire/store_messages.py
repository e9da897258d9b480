"""The messages between launcher and agents about the store, and how they lie in a frame's payload.

    agent ── Want ──► launcher ── Have ──► agent       a value to keep a copy of
    agent ── Ask ───► launcher ── Answer ► agent       anything else that a worker asks
    launcher ── Drop ──► agent ── Dropped ► launcher   before a value changes

What follows from each is in `cache` (the agent's side) and `server` (the launcher's), the frame in `agent_frames`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ProtocolError
from .worker_requests import pack, unpack


@dataclass(frozen=True)
class Want:
    """Asks for a key's value, of which the agent will keep a copy."""

    key: bytes


@dataclass(frozen=True)
class Have:
    """Answers `Want`: the key's value, once it is set."""

    key: bytes
    value: bytes


@dataclass(frozen=True)
class Drop:
    """Tells the agent to drop its copy, before the value changes."""

    key: bytes


@dataclass(frozen=True)
class Dropped:
    """Answers `Drop`: the agent's copy is gone, and no worker gets the old value any more."""

    key: bytes


@dataclass(frozen=True)
class Ask:
    """A worker's request as it came (see `worker_requests`); ``number`` is the agent's, to know the answer by."""

    number: int
    operation: int
    payload: bytes


@dataclass(frozen=True)
class Answer:
    number: int
    code: int
    payload: bytes


StoreEvent = Want | Dropped | Ask
StoreCommand = Have | Drop | Answer

_OF_KEY: dict[int, type[Want | Dropped | Drop]] = {11: Want, 12: Dropped, 21: Drop}
_KEY_KINDS = {of: kind for kind, of in _OF_KEY.items()}
_ASK_KIND, _HAVE_KIND, _ANSWER_KIND = 13, 20, 22
COMMAND_KINDS = frozenset({_KEY_KINDS[Drop], _HAVE_KIND, _ANSWER_KIND})
KINDS = frozenset({*_OF_KEY, _ASK_KIND, *COMMAND_KINDS})


def to_wire(message: StoreEvent | StoreCommand) -> tuple[int, int, bytes]:
    """Kind, number and payload of the frame that carries ``message``."""
    match message:
        case Ask():
            return _ASK_KIND, message.number, bytes([message.operation]) + message.payload
        case Answer():
            return _ANSWER_KIND, message.number, bytes([message.code]) + message.payload
        case Have():
            return _HAVE_KIND, 0, pack([message.key, message.value])
        case _:
            return _KEY_KINDS[type(message)], 0, message.key


def from_wire(kind: int, number: int, payload: bytes) -> StoreEvent | StoreCommand:
    if kind in _OF_KEY:
        return _OF_KEY[kind](payload)
    if kind == _HAVE_KIND and len(parts := unpack(payload)) == 2:
        return Have(*parts)
    if kind == _HAVE_KIND or not payload:
        raise ProtocolError("a frame of the store does not hold what it should")
    return (Ask if kind == _ASK_KIND else Answer)(number, payload[0], payload[1:])
