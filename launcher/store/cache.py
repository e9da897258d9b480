"""An agent's copy of the store: answers its workers' reads from it, and asks the launcher for the rest.

    workers' requests ──► Cache ──► Want, Ask, Dropped to the launcher
                             ◄── Have, Answer, Drop from it

However many workers wait for one key, the launcher is asked for it once. A copy is as good as the original:
the launcher changes no value before the copies are dropped (see `server`). No I/O: connections are in `relay`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import ProtocolError
from ..wire.messages import GaveUp, Joined, Joining
from ..wire.store_messages import Answer, Ask, Drop, Dropped, Have, StoreCommand, StoreEvent, Want
from ..wire.worker_requests import DONE, FAILED, MAX_REQUEST_BYTES, Operation, pack, unpack

Reply = Callable[[int, bytes], None]

_Announcement = Joining | Joined | GaveUp
_ANNOUNCED: dict[Operation, type[_Announcement]] = {
    Operation.JOINING: Joining,
    Operation.JOINED: Joined,
    Operation.GAVE_UP: GaveUp,
}


@dataclass(eq=False)
class _Reader:
    """A GET or WAIT under way: values as they were when they came, since that is when they were read."""

    keys: list[bytes]
    found: dict[bytes, bytes]
    missing: int
    with_values: bool
    reply: Reply

    def answer(self) -> None:
        values = [self.found[key] for key in self.keys] if self.with_values else []
        payload = pack(values)
        if len(payload) > MAX_REQUEST_BYTES:
            self.reply(FAILED, b"the values asked for are too large for one answer: ask for fewer keys at a time")
        else:
            self.reply(DONE, payload)


class Cache:
    def __init__(self, send: Callable[[StoreEvent | _Announcement], None], workers: Mapping[int, int]) -> None:
        """``workers`` are the numbers of those of this host, by their ranks."""
        self._send = send
        self._workers = workers
        self._values: dict[bytes, bytes] = {}
        # Keys that were asked for, and who waits for each; nobody, if all have gone meanwhile.
        self._readers: dict[bytes, dict[_Reader, None]] = {}
        self._asked: dict[int, Reply] = {}
        self._numbers = itertools.cycle(range(1 << 32))

    def request(self, operation: Operation, payload: bytes, reply: Reply) -> Callable[[], None]:
        """Call ``reply`` once, now or later. What is returned forgets the request, whose worker has gone."""
        try:
            match operation:
                case Operation.GET | Operation.WAIT:
                    return self._read(unpack(payload), operation is Operation.GET, reply)
                case Operation.CHECK if all(key in self._values for key in unpack(payload)):
                    reply(DONE, pack([b"1"]))
                case _ if operation in _ANNOUNCED:
                    self._announce(_ANNOUNCED[operation], unpack(payload))
                    reply(DONE, b"")
                case _:
                    return self._ask(operation, payload, reply)
        except ProtocolError as error:
            reply(FAILED, str(error).encode())
        return _nothing

    def receive(self, message: StoreCommand) -> None:
        match message:
            case Have():
                self._values[message.key] = message.value
                for reader in self._readers.pop(message.key, ()):
                    reader.found[message.key] = message.value
                    reader.missing -= 1
                    if not reader.missing:
                        reader.answer()
            case Drop():
                self._values.pop(message.key, None)
                self._send(Dropped(message.key))
            case Answer():
                if reply := self._asked.pop(message.number, None):
                    reply(message.code, message.payload)

    def _read(self, keys: list[bytes], with_values: bool, reply: Reply) -> Callable[[], None]:
        values = self._values
        found = {key: values[key] for key in keys if key in values}
        missing = [key for key in dict.fromkeys(keys) if key not in values]
        reader = _Reader(keys, found, len(missing), with_values, reply)
        if not missing:
            reader.answer()
            return _nothing
        for key in missing:
            if key not in self._readers:
                self._readers[key] = {}
                self._send(Want(key))
            self._readers[key][reader] = None
        return lambda: self._forget(reader, missing)

    def _forget(self, reader: _Reader, missing: list[bytes]) -> None:
        for key in missing:
            self._readers.get(key, {}).pop(reader, None)

    def _ask(self, operation: Operation, payload: bytes, reply: Reply) -> Callable[[], None]:
        number = next(self._numbers)
        self._asked[number] = reply
        self._send(Ask(number, operation, payload))
        return lambda: self._asked.update({number: _ignore}) if number in self._asked else None

    def _announce(self, what: type[_Announcement], parts: list[bytes]) -> None:
        rank = int(parts[0]) if len(parts) == 1 and parts[0].isdigit() and len(parts[0]) < 10 else -1
        if rank not in self._workers:
            raise ProtocolError("no such rank on this host")
        self._send(what(self._workers[rank]))


def _nothing() -> None:
    pass


def _ignore(code: int, payload: bytes) -> None:
    pass
