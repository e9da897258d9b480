"""The messages between agents and launcher about the rendezvous store, and their encoding as payloads of frames.

    agent ── Want ──► launcher ── Have ──► agent       fetches a value, of which the agent keeps a copy
    agent ── Ask ───► launcher ── Answer ► agent       forwards any other request of a worker
    launcher ── Drop ──► agent ── Dropped ► launcher   removes the agents' copies before a value changes
    launcher ── Revoke ► agent                         ends the requests for the keys of older generations

`store.relay` sends and handles them in the agent, `store.server` in the launcher. `channel` adds the header.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite_wire.codec import MessageError
from hvdlite_wire.store_requests import pack, unpack


@dataclass(frozen=True)
class _OfKey:
    key: bytes


class Want(_OfKey):
    """Asks the launcher for the value of a key. The agent will keep a copy of it."""


class Drop(_OfKey):
    """Asks an agent to drop its copy of a value, before the value changes."""


class Dropped(_OfKey):
    """The answer to `Drop`: the agent has no copy any more and gives no worker the old value."""


@dataclass(frozen=True)
class Have(_OfKey):
    """The answer to `Want`, sent once the key is set."""

    value: bytes


@dataclass(frozen=True)
class Ask:
    """A worker's request, forwarded unchanged (see `hvdlite_wire.store_requests`).

    ``number`` is chosen by the agent and repeated in the `Answer`.
    """

    number: int
    operation: int
    payload: bytes


@dataclass(frozen=True)
class Answer:
    number: int
    code: int
    payload: bytes


@dataclass(frozen=True)
class Revoke:
    """The keys of this generation and of all before it are forgotten: each request for one of them fails.

    ``why`` is the reason that a worker gets which waits for such a key, now or later.
    """

    generation: int
    why: str


StoreEvent = Want | Dropped | Ask
StoreCommand = Have | Drop | Answer | Revoke

_OF_KEY: dict[int, type[Want | Dropped | Drop]] = {11: Want, 12: Dropped, 21: Drop}
_KEY_KINDS = {of: kind for kind, of in _OF_KEY.items()}
_ASK_KIND, _HAVE_KIND, _ANSWER_KIND, _REVOKE_KIND = 13, 20, 22, 24
COMMAND_KINDS = frozenset({_KEY_KINDS[Drop], _HAVE_KIND, _ANSWER_KIND, _REVOKE_KIND})
KINDS = frozenset({*_OF_KEY, _ASK_KIND, *COMMAND_KINDS})


def to_wire(message: StoreEvent | StoreCommand) -> tuple[int, int, bytes]:
    """Returns the kind, the number and the payload of the frame for ``message``."""
    match message:
        case Ask():
            return _ASK_KIND, message.number, bytes([message.operation]) + message.payload
        case Answer():
            return _ANSWER_KIND, message.number, bytes([message.code]) + message.payload
        case Have():
            return _HAVE_KIND, 0, pack([message.key, message.value])
        case Revoke():
            return _REVOKE_KIND, message.generation, message.why.encode()
        case _:
            return _KEY_KINDS[type(message)], 0, message.key


def from_wire(kind: int, number: int, payload: bytes) -> StoreEvent | StoreCommand:
    if kind in _OF_KEY:
        return _OF_KEY[kind](payload)
    if kind == _HAVE_KIND and len(parts := unpack(payload)) == 2:
        return Have(*parts)
    if kind == _REVOKE_KIND:
        return Revoke(number, payload.decode(errors="replace"))
    if kind == _HAVE_KIND or not payload:
        raise MessageError("invalid frame of the store")
    return (Ask if kind == _ASK_KIND else Answer)(number, payload[0], payload[1:])
