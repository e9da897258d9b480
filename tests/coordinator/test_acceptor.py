"""Connections that are from no rank cost little, and hold up no rank."""

from __future__ import annotations

import errno
import logging
import secrets
import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable

import pytest

from hvdlite.calls.mailbox import CHALLENGE_BYTES, HELLO_BYTES, HandshakeClient
from hvdlite.coordinator import acceptor
from hvdlite.coordinator.acceptor import Acceptor
from hvdlite.signing import Signer

KEY = Signer(b"the job's key")
STRANGERS_KEY = Signer(b"another key")


class Entrance:
    """An acceptor on loopback whose selector the test handles."""

    def __init__(self, size: int = 3) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = self.listener.getsockname()
        self.selector = selectors.DefaultSelector()
        self.admitted: list[int] = []
        self.sessions: list[Signer] = []
        self.handled: Counter[tuple[str, int] | None] = Counter()
        """The number of events: by the visitor's address; those of the listening socket under None."""
        self.door = Acceptor(self.listener, KEY, size, self.selector, self._admit, self._is_expected)
        self._size = size

    def _admit(self, rank: int, connection: socket.socket, session: Signer) -> None:
        self.admitted.append(rank)
        self.sessions.append(session)
        connection.close()

    def _is_expected(self, rank: int) -> bool:
        return 0 < rank < self._size and rank not in self.admitted

    def serve(self, until: Callable[[], object]) -> None:
        """Handles events until the condition holds."""
        give_up_at_s = time.monotonic() + 60
        while not until():
            assert time.monotonic() < give_up_at_s
            for key, _ in self.selector.select(0.01):
                self.handled[_other_end(key.fileobj)] += 1
                key.data()
            self.door.look()

    def come(self) -> socket.socket:
        before = self.handled[None]
        visitor = socket.create_connection(self.address, 60)
        self.serve(until=lambda: self.handled[None] > before)
        return visitor

    def is_closed(self, visitor: socket.socket) -> bool:
        """Whether it is closed, once there is anything to read for the visitor."""
        self.serve(until=lambda: select.select([visitor], [], [], 0)[0])
        try:
            return visitor.recv(100) == b""
        except ConnectionError:
            return True

    def enter(self, rank: int, *, piece: int = 1000) -> None:
        visitor, caller = self.come(), HandshakeClient(KEY, rank)
        self.send(visitor, caller.hello, piece)
        challenge = visitor.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        proof, session = caller.prove(challenge)
        self.send(visitor, proof, piece)
        assert self.admitted[-1] == rank
        assert self.sessions[-1].sign("x") == session.sign("x")

    def send(self, visitor: socket.socket, data: bytes, piece: int) -> None:
        for start in range(0, len(data), piece):
            before = self.handled[visitor.getsockname()]
            visitor.sendall(data[start : start + piece])
            self.serve(until=lambda before=before: self.handled[visitor.getsockname()] > before)


def _other_end(connection: socket.socket) -> tuple[str, int] | None:
    try:
        return connection.getpeername()
    except OSError:  # it is the socket that listens
        return None


@pytest.fixture
def entrance(monkeypatch):
    # Time passes only where a test says so.
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 600.0)
    monkeypatch.setattr(acceptor, "_BACK_OFF_S", 600.0)
    made = Entrance()
    yield made
    made.door.close()
    made.selector.close()


def test_a_hello_that_comes_in_pieces_is_one(entrance):
    entrance.enter(1, piece=1)
    assert entrance.admitted == [1]


def test_who_is_silent_or_talks_nonsense_holds_up_nobody(entrance, caplog):
    silent, slow = entrance.come(), entrance.come()
    slow.sendall(b"hv")
    nonsense = entrance.come()
    nonsense.sendall(secrets.token_bytes(100_000)[: HELLO_BYTES * 50])
    assert entrance.is_closed(nonsense)
    nobody = entrance.come()
    nobody.sendall(HandshakeClient(KEY, 77).hello)
    assert entrance.is_closed(nobody)
    entrance.enter(2)
    assert "does not use hvdlite's protocol" in caplog.text
    assert "rank 77, which does not exist" in caplog.text
    assert silent.fileno() != -1


def test_a_rank_cannot_be_stolen_by_who_does_not_know_the_key_nor_taken_twice(entrance):
    thief = entrance.come()
    entrance.send(thief, HandshakeClient(STRANGERS_KEY, 1).hello, 1000)
    thief.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    thief.sendall(bytes(32))
    assert entrance.is_closed(thief)
    assert entrance.admitted == []
    entrance.enter(1)
    second = entrance.come()
    second.sendall(HandshakeClient(KEY, 1).hello)
    assert entrance.is_closed(second)
    assert entrance.admitted == [1]


def test_who_proves_nothing_in_time_is_sent_away_and_others_are_not(entrance, monkeypatch, caplog):
    silent = entrance.come()
    assert 0 < entrance.door.patience_s <= acceptor.HANDSHAKE_S
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.0)
    entrance.door.look()
    assert entrance.is_closed(silent)
    assert "it did not authenticate within 0 s" in caplog.text
    assert entrance.door.patience_s is None


def test_the_oldest_goes_when_too_many_have_come_and_few_lines_tell_of_it(entrance, caplog):
    visitors = [entrance.come() for _ in range(64 + 20)]
    assert all(entrance.is_closed(visitor) for visitor in visitors[:20])
    entrance.enter(1)
    assert len([record for record in caplog.records if "that is not from a rank" in record.message]) == 5
    entrance.door.close()
    # The newest connection replaced the oldest.
    assert "rank 0 refused 21 connections in all that were not from ranks of this job" in caplog.text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_an_error_of_accept_ends_nothing_and_does_not_spin(entrance, number, monkeypatch):
    class Broken:
        def __init__(self, listener: socket.socket) -> None:
            self.calls, self._listener = 0, listener

        def accept(self) -> None:
            self.calls += 1
            # A connection of an intruder, which was dropped.
            self._listener.accept()[0].close()
            raise OSError(number, "an error of the test's")

        def fileno(self) -> int:
            return self._listener.fileno()

        def close(self) -> None:
            self._listener.close()

    listener = entrance.door._listener
    entrance.door._listener = broken = Broken(listener)
    socket.create_connection(entrance.address).close()
    entrance.serve(until=lambda: broken.calls)
    assert broken.calls == 1
    entrance.door._listener = listener
    entrance.door.look()
    if number == errno.EMFILE:
        assert 0 < entrance.door.patience_s <= 600.0
        after_s = time.monotonic() + 601
        monkeypatch.setattr(acceptor.time, "monotonic", lambda: after_s)
        entrance.door.look()
        monkeypatch.undo()
    entrance.enter(1)


@pytest.fixture(autouse=True)
def _log_is_seen(caplog):
    with caplog.at_level(logging.WARNING, "hvdlite"):
        yield
