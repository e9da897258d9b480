"""The agent's relay for its workers' sockets, stepped by hand: no thread, no waiting."""

from __future__ import annotations

import errno
import selectors
import socket
import struct

import pytest
from hvdlite_launcher.protocol.store_messages import Answer, Ask, Have, Want
from hvdlite_launcher.store import relay
from hvdlite_launcher.store.relay import Cache, Relay
from hvdlite_wire.store_requests import DONE, HEADER, MAX_REQUEST_BYTES, StoreRequest, frame, pack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


class Host:
    """A relay, its cache, and the messages that it sent to the launcher."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sent = []
        self.selector = selectors.DefaultSelector()
        self.cache = Cache(self.sent.append, workers={0})
        self.relay = Relay(path, self.cache, self.selector)

    def step(self) -> None:
        """Handles everything that can be handled now."""
        while ready := self.selector.select(0):
            for key, _ in ready:
                key.data()

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(self.path)
        client.setblocking(False)
        self.step()
        return client

    def watched(self) -> int:
        return len(self.selector.get_map())


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # tmp_path may be longer than a socket's path may be
    host = Host("store")
    yield host
    host.relay.close()
    assert host.watched() == 0


def _ask(host, client, operation, *parts):
    client.sendall(frame(operation, pack(parts)))
    host.step()


def _answer(client):
    """Returns the bytes that were received, None if there were none, and "closed" if the connection is closed."""
    try:
        data = client.recv(1 << 20)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return "closed"
    return data or "closed"


def test_a_request_is_relayed_and_its_answer_comes_back(host):
    client = host.connect()
    _ask(host, client, StoreRequest.ADD, b"n", b"1")
    assert host.sent == [Ask(0, StoreRequest.ADD, pack([b"n", b"1"]))]
    assert _answer(client) is None
    host.cache.receive(Answer(0, DONE, pack([b"1"])))
    assert _answer(client) == frame(DONE, pack([b"1"]))


def test_a_request_may_come_byte_by_byte(host):
    client = host.connect()
    for byte in frame(StoreRequest.WAIT, pack([b"k"])):
        client.sendall(bytes([byte]))
        host.step()
    assert host.sent == [Want(b"k")]


def test_one_that_waits_holds_up_no_other(host):
    waiting, other = host.connect(), host.connect()
    _ask(host, waiting, StoreRequest.GET, b"k")
    _ask(host, other, StoreRequest.COUNT)
    host.cache.receive(Answer(0, DONE, pack([b"0"])))
    assert _answer(other) == frame(DONE, pack([b"0"]))
    assert _answer(waiting) is None
    host.cache.receive(Have(b"k", b"v"))
    assert _answer(waiting) == frame(DONE, pack([b"v"]))


def test_one_that_has_gone_while_it_waited_is_forgotten(host):
    client, before = host.connect(), host.watched()
    _ask(host, client, StoreRequest.GET, b"k")
    client.close()
    host.step()
    assert host.watched() == before - 1
    host.cache.receive(Have(b"k", b"v"))
    host.step()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">BI", 1, MAX_REQUEST_BYTES + 1), b"\0" * 5, b"\xff" * 100_000],
)
def test_garbage_closes_its_connection_and_no_other(host, garbage):
    good, bad = host.connect(), host.connect()
    bad.sendall(garbage)
    host.step()
    assert _answer(bad) == "closed"
    host.cache.receive(Have(b"k", b"v"))
    _ask(host, good, StoreRequest.GET, b"k")
    assert _answer(good) == frame(DONE, pack([b"v"]))


def test_one_that_asks_again_before_it_was_answered_is_closed(host):
    client = host.connect()
    _ask(host, client, StoreRequest.COUNT)
    _ask(host, client, StoreRequest.COUNT)
    assert _answer(client) == "closed"
    host.cache.receive(Answer(0, DONE, pack([b"0"])))
    host.step()


def test_one_that_does_not_read_gets_one_answer_and_then_the_rest_of_it(host):
    large = bytes(4 << 20)
    host.cache.receive(Have(b"k", large))
    client = host.connect()
    _ask(host, client, StoreRequest.GET, b"k")
    received = 0
    while (data := _answer(client)) is not None:
        received += len(data)
        host.step()
    assert received == HEADER.size + 4 + len(large)
    _ask(host, client, StoreRequest.WAIT, b"k")
    assert _answer(client) == frame(DONE, b"")


def test_one_that_does_not_read_and_asks_on_is_not_heard(host):
    host.cache.receive(Have(b"k", bytes(4 << 20)))
    client = host.connect()
    _ask(host, client, StoreRequest.GET, b"k")
    _ask(host, client, StoreRequest.COUNT)
    host.step()
    assert host.sent == []


def test_where_no_more_files_may_be_opened_the_next_waits_until_one_has_gone(host, monkeypatch):
    first = host.connect()
    accept = socket.socket.accept

    def refuse(_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", refuse)
    second = host.connect()  # step() returns: the relay does not try again and again
    monkeypatch.setattr(socket.socket, "accept", accept)
    first.close()
    host.step()
    _ask(host, second, StoreRequest.WAIT)
    assert _answer(second) == frame(DONE, b"")


def test_where_no_file_may_be_opened_for_a_moment_it_is_tried_again_though_none_has_gone(host, monkeypatch):
    def refuse(_):
        raise OSError(errno.ENFILE, "too many open files on the machine")

    monkeypatch.setattr(relay, "_RETRY_S", 0)
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", refuse)
        only = host.connect()
    assert host.relay.time_left_s() == 0
    host.relay.tick()
    assert host.relay.time_left_s() is None
    host.step()
    _ask(host, only, StoreRequest.WAIT)
    assert _answer(only) == frame(DONE, b"")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.lists(
        st.binary(max_size=40) | st.builds(frame, st.sampled_from(StoreRequest), st.binary(max_size=9)), max_size=5
    )
)
def test_whatever_a_worker_sends_the_others_are_served(host, pieces):
    bad, good = host.connect(), host.connect()
    try:
        for piece in pieces:
            bad.sendall(piece)
            host.step()
    except (BrokenPipeError, ConnectionResetError):
        pass
    _ask(host, good, StoreRequest.WAIT)
    assert _answer(good) == frame(DONE, b"")
    bad.close()
    good.close()
    host.step()
