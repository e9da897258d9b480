"""The rendezvous store in the launcher: keys and values by which workers find each other. It does no I/O.

    agents' Want, Ask, Dropped ──► Store ──► Have, Answer, Drop, Revoke for agents

The thread that reads from all agents (see `connection_loop`) calls it with their messages. Agents keep copies of values
(see `relay`), and yet no worker reads an old value once a change is answered: before a value changes, all agents that
hold a copy must have dropped it. Until then, further operations on its key wait in a queue.

The ranks of an elastic job's generation meet under keys of their own (see `is_up_to`). Once a generation is
revoked, all its keys are forgotten and every request for one fails, so nobody waits for a rank that is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hvdlite_wire.codec import MessageError
from hvdlite_wire.store_requests import (
    DONE,
    FAILED,
    MAX_REQUEST_BYTES,
    StoreRequest,
    chunk_key,
    in_chunks,
    is_up_to,
    pack,
    unpack,
)

from ..protocol.store_messages import Answer, Ask, Drop, Dropped, Have, Revoke, StoreCommand, StoreEvent, Want

# Maps the old value to the new value and the answer; None means that the key is not set.
_Change = Callable[[bytes | None], tuple[bytes | None, bytes]]
_Reply = Callable[[int, bytes], None]


class Agent(Protocol):
    """An agent that may hold copies of values: `agents.remote_agent.RemoteAgent`."""

    def send(self, message: StoreCommand, /) -> None:
        """Must not block, and must keep the order of the messages."""


@dataclass
class _Dropping:
    """The state of a key while its copies are dropped: the agents that still have one, and the queued operations."""

    awaited: set[Agent]
    line: list[Callable[[], None]] = field(default_factory=list)


class Store:
    """The keys and values; may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._holders: dict[bytes, set[Agent]] = {}
        self._wanted: dict[bytes, set[Agent]] = {}  # keys that are not set, and the agents that wait for them
        self._dropping: dict[bytes, _Dropping] = {}
        self._agents: set[Agent] = set()  # those that have sent something and are not lost
        self._revoked = Revoke(0, "")
        self._watched: tuple[bytes, Callable[[bytes, bytes], None]] | None = None

    def watch(self, prefix: bytes, note: Callable[[bytes, bytes], None]) -> None:
        """Calls ``note(key, value)`` whenever a worker sets a key with this prefix, before the worker is answered.

        It is called in the thread that reads from the agents, and must not block.
        """
        self._watched = prefix, note

    def receive(self, agent: Agent, message: StoreEvent) -> None:
        with self._lock:
            self._agents.add(agent)
            match message:
                case Want():
                    self._want(agent, message.key)
                case Dropped():
                    self._dropped(agent, message.key)
                case Ask():
                    self._ask(message, lambda code, payload: agent.send(Answer(message.number, code, payload)))

    def lose(self, agent: Agent) -> None:
        """Forgets an agent whose connection has ended: it holds no copies any more."""
        with self._lock:
            self._agents.discard(agent)
            for by_key in (self._holders, self._wanted):
                for key in [key for key, agents in by_key.items() if agent in agents]:
                    by_key[key].discard(agent)
                    if not by_key[key]:
                        del by_key[key]
            for key in list(self._dropping):
                self._dropped(agent, key)

    def put(self, key: bytes, value: bytes) -> None:
        """Sets a value for the workers, from the launcher itself."""
        with self._lock:
            self._change(key, partial(_put, value), lambda *_: None)

    def delete(self, key: bytes) -> None:
        with self._lock:
            self._change(key, lambda _: (None, b""), lambda *_: None)

    def revoke(self, generation: int, why: str) -> None:
        """Forgets the keys of this generation and of all before it; every request for one fails with ``why``."""
        with self._lock:
            if generation < self._revoked.generation:
                return
            self._revoked = Revoke(generation, why)
            for by_key in (self._values, self._holders, self._wanted):
                for key in [key for key in by_key if self._is_revoked(key)]:
                    del by_key[key]
            dropping = [self._dropping.pop(key) for key in list(self._dropping) if self._is_revoked(key)]
            _send_all(self._agents, self._revoked)
            for each in dropping:
                for act in each.line:
                    act()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def put_large(self, key: bytes, value: bytes) -> None:
        """Sets a value of any size, for `hvdlite.rendezvous.store_client.StoreClient.get_large`."""
        for each in in_chunks(key, value):
            self.put(*each)

    def get_large(self, key: bytes) -> bytes | None:
        """Returns a value that a worker sets by `set_large`, or None while it is incomplete."""
        count = self.get(key)
        if count is None or not count.isdigit() or len(count) > 6:
            return None
        pieces = [self.get(chunk_key(key, number)) for number in range(int(count))]
        return None if None in pieces else b"".join(filter(None, pieces))

    def _is_revoked(self, key: bytes) -> bool:
        return is_up_to(key, self._revoked.generation)

    def _want(self, agent: Agent, key: bytes) -> None:
        if agent not in self._agents:
            return
        if self._is_revoked(key):
            agent.send(self._revoked)  # it may have connected after the others were told
            return
        if key in self._dropping:
            self._dropping[key].line.append(partial(self._want, agent, key))
        elif key in self._values:
            self._holders.setdefault(key, set()).add(agent)
            agent.send(Have(key, self._values[key]))
        else:
            self._wanted.setdefault(key, set()).add(agent)

    def _ask(self, ask: Ask, reply: _Reply) -> None:
        try:
            self._do(ask, reply)
        except MessageError as error:
            reply(FAILED, str(error).encode())

    def _do(self, ask: Ask, reply: _Reply) -> None:
        match ask.operation, unpack(ask.payload):
            case StoreRequest.SET, [_, _, *_] as parts if len(parts) % 2 == 0:
                self._set(parts, reply)
            case StoreRequest.CHECK, keys if any(map(self._is_revoked, keys)):
                reply(FAILED, self._revoked.why.encode())
            case StoreRequest.CHECK, keys:
                reply(DONE, pack([_truth(all(key in self._values for key in keys))]))
            case StoreRequest.COUNT, []:
                reply(DONE, pack([b"%d" % len(self._values)]))
            case StoreRequest.ADD, [key, amount]:
                self._change(key, partial(_add, _number(amount)), reply)
            case StoreRequest.COMPARE_SET, [key, expected, desired]:
                self._change(key, partial(_compare_set, expected, desired), reply)
            case StoreRequest.APPEND, [key, tail]:
                self._change(key, partial(_append, tail, MAX_REQUEST_BYTES - len(pack([key, b""]))), reply)
            case StoreRequest.DELETE, [key]:
                self._change(key, lambda old: (None, pack([_truth(old is not None)])), reply)
            case operation, parts:
                raise MessageError(f"the store has no operation {operation} with {len(parts)} arguments")

    def _set(self, parts: Sequence[bytes], reply: _Reply) -> None:
        """Sets several keys, and answers when all are set."""
        left, outcome = len(parts) // 2, (DONE, b"")

        def count(code: int, payload: bytes) -> None:
            nonlocal left, outcome
            left -= 1
            if code == FAILED:
                outcome = code, payload
            if left == 0:
                reply(*outcome)

        for key, value in zip(parts[::2], parts[1::2], strict=True):
            if self._watched is not None and key.startswith(self._watched[0]):
                self._watched[1](key, value)
            self._change(key, partial(_put, value), count)

    def _change(self, key: bytes, change: _Change, reply: _Reply) -> None:
        if self._is_revoked(key):
            reply(FAILED, self._revoked.why.encode())
            return
        again = partial(self._change, key, change, reply)
        if key in self._dropping:
            self._dropping[key].line.append(again)
            return
        old = self._values.get(key)
        try:
            new, answer = change(old)
        except MessageError as error:
            reply(FAILED, f"{key[:200].decode(errors='replace')!r}: {error}".encode())
            return
        if new != old:
            if holders := self._holders.pop(key, None):
                self._dropping[key] = _Dropping(set(holders), [again])
                _send_all(holders, Drop(key))
                return
            self._replace(key, new)
        reply(DONE, answer)

    def _replace(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._values.pop(key, None)
            return
        self._values[key] = value
        if wanting := self._wanted.pop(key, None):
            self._holders[key] = wanting
            _send_all(wanting, Have(key, value))

    def _dropped(self, agent: Agent, key: bytes) -> None:
        dropping = self._dropping.get(key)
        if dropping is None:
            return
        dropping.awaited.discard(agent)
        if not dropping.awaited:
            del self._dropping[key]
            # One of these may cause another drop of this key. The operations after it then wait for that one.
            for act in dropping.line:
                act()


def _send_all(agents: Collection[Agent], message: StoreCommand) -> None:
    for agent in agents:
        agent.send(message)


def _put(value: bytes, old: bytes | None) -> tuple[bytes, bytes]:
    del old
    return value, b""


def _add(amount: int, old: bytes | None) -> tuple[bytes, bytes]:
    total = b"%d" % (_number(old or b"0") + amount)
    return total, pack([total])


def _compare_set(expected: bytes, desired: bytes, old: bytes | None) -> tuple[bytes | None, bytes]:
    """As in torch's own stores, a key that is not set counts as empty, and is set if ``expected`` is empty."""
    if old is None and expected:
        return None, pack([expected])
    new = desired if old is None or old == expected else old
    return new, pack([new])


def _append(tail: bytes, limit: int, old: bytes | None) -> tuple[bytes, bytes]:
    new = (old or b"") + tail
    if len(new) > limit:
        raise MessageError(f"a value in the store has at most {limit} bytes")
    return new, b""


def _number(text: bytes) -> int:
    """Returns the number in ``text``; a `MessageError` if it is none, or may not fit in 64 bits."""
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise MessageError("only numbers can be added to")
    return int(text)


def _truth(value: bool) -> bytes:
    return b"1" if value else b"0"
