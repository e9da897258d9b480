"""For how long nothing has come over the connections of a process group."""

from __future__ import annotations

import os
import socket
import time

import pytest

from hvdlite.comm import keepalive
from hvdlite.comm.gloo import Connections
from hvdlite.comm.keepalive import Keepalive


@pytest.fixture(autouse=True)
def probed_every_second(monkeypatch):
    monkeypatch.setattr(keepalive, "_PROBE_EVERY_S", 1)
    monkeypatch.setattr(keepalive, "_SHORTEST_S", 2)


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def pair(request):
    address = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=request.param) as server:
        one = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
    with one, other:
        yield one, other, address


def connections_of(*sockets: socket.socket) -> Connections:
    connections = Connections()
    connections.inodes = {os.fstat(each.fileno()).st_ino for each in sockets}
    return connections


def until_silent(group: Keepalive) -> dict[str, float]:
    while not (silences := group.silences()):
        time.sleep(0.1)
    return silences


def test_it_knows_its_own_addresses_and_an_idle_connection_is_not_silent_since_the_kernel_is_asked(pair):
    one, _, address = pair
    group = Keepalive(connections_of(one))
    assert group.addresses == (address,)
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        assert group.silences() == {}
        time.sleep(0.2)


def test_a_connection_over_which_nothing_comes_is_silent(pair):
    one, other, address = pair
    group = Keepalive(connections_of(one))
    # What the network would drop, this kernel does not send: no probes, and nothing comes by itself.
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    silences = until_silent(group)
    assert silences.keys() == {address}
    assert 2 <= silences[address] < 60
    give_up_at_s = time.monotonic() + 60
    while True:  # after a pause of this process it is silent again
        other.sendall(b"data")
        assert one.recv(4) == b"data"
        if not group.silences():
            break
        assert time.monotonic() < give_up_at_s


def test_connections_that_are_closed_or_a_parent_s_have_no_silence(pair):
    one, _, _ = pair
    connections = connections_of(one)
    group = Keepalive(connections)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    until_silent(group)
    pid, connections._pid = connections._pid, 1
    assert group.silences() == {}
    connections._pid = pid
    one.close()
    assert group.silences() == {}
