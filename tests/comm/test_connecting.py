"""While gloo connects, and once it has, it is seen from outside; and the wait for it can be ended."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from hvdlite.comm import gloo
from hvdlite.comm.connecting import ConnectingRanks, InitTimeout
from hvdlite.comm.gloo import Connections, open_proven
from hvdlite.errors import CommunicationError
from hvdlite.rendezvous.host_address import no_connection_between, refused_by
from hvdlite.signing import Signer

LONG = timedelta(seconds=600)
# Gloo connects from the greater address to the lesser one.
OWN_ADDRESS = {"connects": "127.0.0.2", "is connected to": "127.0.0.1"}
ITS_ADDRESS = {"connects": "127.0.0.1", "is connected to": "127.0.0.2"}


def gloo_at(address: str, store: dist.Store, rank: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)]
    options._threads, options._timeout = 2, timeout
    return dist.ProcessGroupGloo(store, rank, 2, options)


def tell_address(store: dist.Store, rank: int, listener: socket.socket) -> None:
    """Has a rank tell its address, and be lost before it connects; at the address nobody answers."""
    elsewhere = dist.HashStore()
    gloo_at(listener.getsockname()[0], elsewhere, rank, LONG)
    told = elsewhere.get(f"0/{rank}")
    own = socket.inet_aton(listener.getsockname()[0])
    at = told.index(own)
    store.set(f"0/{rank}", told[: at - 2] + listener.getsockname()[1].to_bytes(2, "big") + told[at:])


class Opening:
    """Opens a group with a lost rank, in a thread that ends with `error`."""

    def __init__(self, way: str, timeout: timedelta = LONG) -> None:
        self.connections = Connections()
        store = dist.HashStore()
        self.ranks = ConnectingRanks(store, Signer(b"key"), 1, ("rank 0 (a)", "rank 1 (b)"), InitTimeout(timeout))
        self.error: BaseException | None = None

        def make(connections: Connections) -> dist.ProcessGroupGloo:
            with connections.made_within():
                return gloo_at(OWN_ADDRESS[way], store, 1, LONG)

        def run() -> None:
            try:
                open_proven(make, lambda group: group.shutdown(), self.ranks, "x", self.connections)
            except (RuntimeError, CommunicationError) as error:
                self.error = error

        self._listener = socket.create_server((ITS_ADDRESS[way], 0))
        gloo._drop_all(self._listener)
        tell_address(store, 0, self._listener)
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        # They are noted after the sockets are found.
        until(lambda: self.connections.addresses)
        if way == "connects":
            until(lambda: len(list(self.connections._sockets(gloo._SYN_SENT))) == 1)

    def join(self) -> None:
        self.thread.join()
        self._listener.close()


def until(is_so) -> None:
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


@pytest.mark.parametrize("way", ["connects", "is connected to"])
def test_a_wait_for_a_rank_that_was_lost_after_it_told_its_address_can_be_given_up(way):
    opening = Opening(way)
    opening.ranks.ends.give_up("the generation is over")
    opening.join()
    assert isinstance(opening.error, CommunicationError)
    assert str(opening.error) == "rank 1 (b) could not connect to the other ranks: the generation is over"


@pytest.mark.parametrize("way", ["connects", "is connected to"])
def test_gloo_that_may_connect_for_some_time_at_most_fails_after_that(way):
    opening = Opening(way, timedelta(seconds=0.01))
    opening.join()
    assert not isinstance(opening.error, CommunicationError)
    assert "b could not open a TCP connection" in str(no_connection_between(["a", "b"], "b", opening.error))


def test_a_connection_that_the_system_refuses_at_once_is_no_stranger():
    said = "[enforce fail at /p/gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs -1. connect: No route to host"
    group = Mock(alltoall_base=Mock(return_value=Mock(wait=Mock(side_effect=RuntimeError(said)))))
    ranks = ConnectingRanks(dist.HashStore(), Signer(b"key"), 0, ("rank 0 (a)", "rank 1 (b)"), InitTimeout(LONG))
    with pytest.raises(RuntimeError) as raised:
        open_proven(lambda _: group, lambda group: None, ranks, "x")
    assert not isinstance(raised.value, CommunicationError)
    assert "b could not open a TCP connection" in str(no_connection_between(["a", "b"], "b", raised.value))


def test_who_refuses_a_connection_is_in_gloos_error():
    store = dist.HashStore()
    with socket.create_server((ITS_ADDRESS["connects"], 0)) as listener:
        tell_address(store, 0, listener)
    ranks = ConnectingRanks(store, Signer(b"key"), 1, ("rank 0 (a)", "rank 1 (b)"), InitTimeout(LONG))
    # Nobody listens there any more.
    with pytest.raises(RuntimeError) as raised:
        open_proven(lambda _: gloo_at(OWN_ADDRESS["connects"], store, 1, LONG), lambda group: None, ranks, "x")
    assert not isinstance(raised.value, CommunicationError)
    assert refused_by(raised.value) == (ITS_ADDRESS["connects"],)


def test_the_addresses_at_which_gloo_listens_are_those_of_its_interfaces(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    before = gloo._listeners()
    assert gloo.own_addresses() == ("127.0.0.1",)
    # Meanwhile those of groups that earlier tests have made may be closed.
    until(lambda: set(gloo._listeners()) <= set(before))


def test_an_address_that_does_not_answer_is_silent_from_when_it_was_first_seen(monkeypatch):
    opening = Opening("connects")
    now_s = 100.0
    monkeypatch.setattr(gloo.time, "monotonic", lambda: now_s)
    assert opening.connections.addresses == ("127.0.0.2",)
    assert opening.connections.silences() == {}
    now_s += 7
    assert opening.connections.silences() == {"127.0.0.1": 7.0}
    monkeypatch.undo()
    opening.ranks.ends.give_up("over")
    opening.join()


def test_a_rank_that_waits_to_be_connected_to_says_where_it_is_and_has_no_silence():
    opening = Opening("is connected to")
    assert opening.connections.addresses == ("127.0.0.1",)
    assert opening.connections.silences() == {}
    opening.ranks.ends.give_up("over")
    opening.join()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_address_that_does_not_answer_is_in_the_kernels_table(family, address):
    with socket.create_server((address, 0), family=family) as listener, socket.socket(family) as own:
        gloo._drop_all(listener)
        own.setblocking(False)
        own.connect_ex(listener.getsockname())
        assert gloo._others({os.fstat(own.fileno()).st_ino}) == {address}
        assert gloo._others({os.fstat(listener.fileno()).st_ino}) == set()


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def pair(request, monkeypatch):
    """Two sockets that are connected to each other, the connections of which gloo has the first, and its address."""
    monkeypatch.setattr(gloo, "_PROBE_EVERY_S", 1)
    monkeypatch.setattr(gloo, "_SHORTEST_S", 2)
    address = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    with socket.create_server((address, 0), family=request.param) as server, select.epoll() as loop:
        one = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
        for each in (server, one):
            loop.register(each)
        connections = Connections()
        connections._add({loop.fileno(): os.fstat(server.fileno()).st_ino})
        connections.probe()
        with one, other:
            yield one, other, connections, address


def until_silent(group: Connections) -> dict[str, float]:
    while not (silences := group.silences()):
        time.sleep(0.1)
    return silences


def test_it_knows_its_own_addresses_and_an_idle_connection_is_not_silent_since_the_kernel_is_asked(pair):
    _, _, connections, address = pair
    assert connections.addresses == (address,)
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        assert connections.silences() == {}
        time.sleep(0.2)


@contextmanager
def no_probes(one: socket.socket) -> Iterator[None]:
    """What the network would drop, this kernel does not send: no probes, and nothing comes by itself."""
    with pytest.MonkeyPatch.context() as patch:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30_000)
        patch.setattr(gloo, "_probe", lambda _: None)
        yield


def test_a_connection_over_which_nothing_comes_is_silent(pair):
    one, other, connections, address = pair
    with no_probes(one):
        silences = until_silent(connections)
        assert silences.keys() == {address}
        assert 2 <= silences[address] < 60
        give_up_at_s = time.monotonic() + 60
        while True:  # after a pause of this process it is silent again
            other.sendall(b"data")
            assert one.recv(4) == b"data"
            if not connections.silences():
                break
            assert time.monotonic() < give_up_at_s


def test_connections_that_are_closed_or_a_parent_s_have_no_silence(pair):
    one, _, connections, _ = pair
    with no_probes(one):
        until_silent(connections)
        pid, connections._pid = connections._pid, 1
        assert connections.silences() == {}
        connections._pid = pid
        one.close()
        assert connections.silences() == {}
