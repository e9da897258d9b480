"""The rendezvous store in the launcher: keys and values by which workers find each other. No I/O, no thread of its own.

    agents' Want, Ask, Dropped ──► Store ──► Have, Answer, Drop for agents

Agents keep copies of what they were sent (see `cache`), and still every reader sees each change once it is
answered: a value that agents hold changes only after all of them have dropped it, and whatever concerns
its key meanwhile waits in line. Who reads what agents say hands it over, each in its own thread (see `remote_agent`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..errors import ProtocolError
from ..wire.store_messages import Answer, Ask, Drop, Dropped, Have, StoreCommand, StoreEvent, Want
from ..wire.worker_requests import CHUNK_BYTES, DONE, FAILED, MAX_REQUEST_BYTES, Operation, chunk_key, pack, unpack

# From the old value to the new one and what is answered; None is no value.
_Change = Callable[[bytes | None], tuple[bytes | None, bytes]]
_Reply = Callable[[int, bytes], None]


class Agent(Protocol):
    """Who holds copies; `agents.remote_agent.RemoteAgent`."""

    def send(self, message: StoreCommand, /) -> None:
        """Must not wait for anything, nor change the order of what it is given."""


@dataclass
class _Dropping:
    """A key whose holders are being told to drop it, and what happens to it after that, in order."""

    awaited: set[Agent]
    line: list[Callable[[], None]] = field(default_factory=list)


class Store:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._holders: dict[bytes, set[Agent]] = {}
        self._wanted: dict[bytes, set[Agent]] = {}  # keys that are not there, and who waits for them
        self._dropping: dict[bytes, _Dropping] = {}
        self._lost: set[Agent] = set()

    def receive(self, agent: Agent, message: StoreEvent) -> None:
        with self._lock:
            match message:
                case Want():
                    self._want(agent, message.key)
                case Dropped():
                    self._dropped(agent, message.key)
                case Ask():
                    self._ask(message, lambda code, payload: agent.send(Answer(message.number, code, payload)))

    def lose(self, agent: Agent) -> None:
        """Nothing more comes from there, and nothing is held there."""
        with self._lock:
            self._lost.add(agent)
            for agents in (*self._holders.values(), *self._wanted.values()):
                agents.discard(agent)
            for key in list(self._dropping):
                self._dropped(agent, key)

    def put(self, key: bytes, value: bytes) -> None:
        """A value of the launcher's own, for the workers."""
        with self._lock:
            self._change(key, partial(_put, value), _ignore)

    def look(self, key: bytes) -> bytes | None:
        """What the workers have set, if they have."""
        with self._lock:
            return self._values.get(key)

    def put_large(self, key: bytes, value: bytes) -> None:
        """The same of any size, in pieces, for `hvdlite.rendezvous.store_client.StoreClient.get_large`."""
        starts = range(0, len(value), CHUNK_BYTES)
        for number, start in enumerate(starts):
            self.put(chunk_key(key, number), value[start : start + CHUNK_BYTES])
        # Last, as it is what readers wait for.
        self.put(key, b"%d" % len(starts))

    def look_large(self, key: bytes) -> bytes | None:
        """What a worker has set by `set_large`, if it has set all of it."""
        count = self.look(key)
        if count is None or not count.isdigit() or len(count) > 6:
            return None
        pieces = [self.look(chunk_key(key, number)) for number in range(int(count))]
        return None if None in pieces else b"".join(filter(None, pieces))

    # ------------------------------------------------------------------ reads

    def _want(self, agent: Agent, key: bytes) -> None:
        if agent in self._lost:
            return
        if key in self._dropping:
            self._dropping[key].line.append(partial(self._want, agent, key))
        elif key in self._values:
            self._holders.setdefault(key, set()).add(agent)
            agent.send(Have(key, self._values[key]))
        else:
            self._wanted.setdefault(key, set()).add(agent)

    # ---------------------------------------------------------------- changes

    def _ask(self, ask: Ask, reply: _Reply) -> None:
        try:
            self._do(ask, reply)
        except ProtocolError as error:
            reply(FAILED, str(error).encode())

    def _do(self, ask: Ask, reply: _Reply) -> None:
        match ask.operation, unpack(ask.payload):
            case Operation.SET, [_, _, *_] as parts if len(parts) % 2 == 0:
                self._set(parts, reply)
            case Operation.CHECK, keys:
                reply(DONE, pack([_truth(all(key in self._values for key in keys))]))
            case Operation.COUNT, []:
                reply(DONE, pack([b"%d" % len(self._values)]))
            case Operation.ADD, [key, amount]:
                self._change(key, partial(_add, _number(amount)), reply)
            case Operation.COMPARE_SET, [key, expected, desired]:
                self._change(key, partial(_compare_set, expected, desired), reply)
            case Operation.APPEND, [key, tail]:
                self._change(key, partial(_append, tail, MAX_REQUEST_BYTES - len(pack([key, b""]))), reply)
            case Operation.DELETE, [key]:
                self._change(key, lambda old: (None, pack([_truth(old is not None)])), reply)
            case operation, parts:
                raise ProtocolError(f"the store has no operation {operation} of {len(parts)} parts")

    def _set(self, parts: Sequence[bytes], reply: _Reply) -> None:
        """Answered when all are set."""
        left = len(parts) // 2

        def count(code: int, payload: bytes) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                reply(code, payload)

        for key, value in zip(parts[::2], parts[1::2], strict=True):
            self._change(key, partial(_put, value), count)

    def _change(self, key: bytes, change: _Change, reply: _Reply) -> None:
        again = partial(self._change, key, change, reply)
        if key in self._dropping:
            self._dropping[key].line.append(again)
            return
        old = self._values.get(key)
        try:
            new, answer = change(old)
        except ProtocolError as error:
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
            del self._values[key]
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
            # A change in this line may begin another one: what comes after it then goes there.
            for act in dropping.line:
                act()


def _send_all(agents: Collection[Agent], message: StoreCommand) -> None:
    for agent in agents:
        agent.send(message)


def _ignore(code: int, payload: bytes) -> None:
    pass


def _put(value: bytes, old: bytes | None) -> tuple[bytes, bytes]:
    del old
    return value, b""


def _add(amount: int, old: bytes | None) -> tuple[bytes, bytes]:
    total = b"%d" % (_number(old or b"0") + amount)
    return total, pack([total])


def _compare_set(expected: bytes, desired: bytes, old: bytes | None) -> tuple[bytes | None, bytes]:
    """As torch's own stores have it: a key that is not there counts as empty, and stays so if that is not expected."""
    if old is None and expected:
        return None, pack([expected])
    new = desired if old is None or old == expected else old
    return new, pack([new])


def _append(tail: bytes, limit: int, old: bytes | None) -> tuple[bytes, bytes]:
    new = (old or b"") + tail
    if len(new) > limit:
        raise ProtocolError(f"a value in the store has at most {limit} bytes")
    return new, b""


def _number(text: bytes) -> int:
    """64 bits, as everywhere in torch; never so many digits that reading them takes long."""
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise ProtocolError("only numbers can be added to")
    return int(text)


def _truth(value: bool) -> bytes:
    return b"1" if value else b"0"
