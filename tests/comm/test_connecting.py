"""While gloo connects, what it waits for is seen from outside, and its wait can be ended."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvdlite.comm import gloo_sockets
from hvdlite.comm.gloo import Connecting, ConnectingRanks, InitTimeout, open_proven
from hvdlite.comm.gloo_sockets import drop_packets, unanswered_by
from hvdlite.errors import CommunicationError
from hvdlite.rendezvous.host_address import refused_by
from hvdlite.signing import Signer

LONG = timedelta(seconds=600)
# Gloo connects from the greater address to the lesser one.
OWN_ADDRESS = {"connects": "127.0.0.2", "is connected to": "127.0.0.1"}
ITS_ADDRESS = {"connects": "127.0.0.1", "is connected to": "127.0.0.2"}


def gloo_at(address: str, store: dist.Store, rank: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads, options._timeout = 2, timeout
    return dist.ProcessGroupGloo(store, rank, 2, options)


def tell_address(store: dist.Store, rank: int, listener: socket.socket) -> None:
    """Has a rank tell its address, and be lost before it connects; at the address nobody answers."""
    elsewhere = dist.HashStore()
    with pytest.raises(RuntimeError):
        gloo_at(listener.getsockname()[0], elsewhere, rank, timedelta(milliseconds=50))
    told = elsewhere.get(f"0/{rank}")
    own = socket.inet_aton(listener.getsockname()[0])
    at = told.index(own)
    store.set(f"0/{rank}", told[: at - 2] + listener.getsockname()[1].to_bytes(2, "big") + told[at:])


@contextmanager
def opening(way: str):
    """Opens a group with a lost rank, in a thread: yields what gloo does, the thread, and a list for its error."""
    store, errors = dist.HashStore(), []
    ranks = ConnectingRanks(store, Signer(b"key"), 1, ("rank 0 (a)", "rank 1 (b)"), InitTimeout(LONG))

    def open_it() -> None:
        try:
            open_proven(lambda _: gloo_at(OWN_ADDRESS[way], store, 1, LONG), lambda group: group.shutdown(), ranks, "x")
        except (RuntimeError, CommunicationError) as error:
            errors.append(error)

    with socket.create_server((ITS_ADDRESS[way], 0)) as listener:
        drop_packets(listener)
        tell_address(store, 0, listener)
        thread = threading.Thread(target=open_it, daemon=True)
        thread.start()
        under_way = Connecting(2)
        until(lambda: has_begun(way))
        yield under_way, thread, errors
        under_way.close()


def has_begun(way: str) -> bool:
    seen = [listens for _, _, listens in gloo_sockets.OpeningGroups()._found()]
    return seen.count(True) == 1 and seen.count(False) == (way == "connects")


def until(is_so) -> None:
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


@pytest.mark.parametrize("way", ["connects", "is connected to"])
def test_a_wait_for_a_rank_that_was_lost_after_it_told_its_address_can_be_given_up(way):
    with opening(way) as (under_way, thread, errors):
        gives_up = threading.Thread(target=under_way.give_up)
        gives_up.start()
        thread.join()
        assert len(errors) == 1
        under_way.close()
        gives_up.join()


@pytest.mark.parametrize("way", ["connects", "is connected to"])
def test_what_has_begun_can_be_given_up_alone_and_that_ends_once_it_has_failed(way):
    with opening(way) as (under_way, thread, errors):
        under_way.give_up_begun()
        thread.join()
        assert len(errors) == 1
        under_way.give_up_begun()


def test_a_group_that_begins_while_what_had_begun_is_given_up_is_left_alone(monkeypatch):
    """As that of the next world, while a thread of the one before still gives up."""
    earlier, looks = Connecting(2), []
    with opening("is connected to") as (_, thread, errors):
        (begun,) = earlier.sockets.listeners()
        # As if it had begun before that group.
        monkeypatch.setattr(earlier.sockets, "listeners", lambda: looks.append(1) or {begun + 1})
        monkeypatch.setattr("hvdlite.comm.gloo._MOST_GIVING_UP_S", 0.2)
        earlier.give_up_begun()
        assert len(looks) > 1
        assert thread.is_alive()
        monkeypatch.undo()
        earlier.give_up_begun()
        thread.join()
        assert len(errors) == 1


@pytest.mark.parametrize("way", ["connects", "is connected to"])
def test_gloo_that_may_connect_for_some_time_at_most_fails_after_that(way):
    # By itself it would take 50 minutes.
    with opening(way) as (under_way, thread, errors):
        with under_way.for_at_most(0.01):
            thread.join()
        assert under_way.is_late
        assert len(errors) == 1


def test_gloo_that_connects_in_time_is_left_alone():
    under_way = Connecting(2)
    with under_way.for_at_most(600):
        pass
    assert not under_way.is_late


def test_who_refuses_a_connection_is_in_gloos_error():
    store = dist.HashStore()
    with socket.create_server((ITS_ADDRESS["connects"], 0)) as listener:
        tell_address(store, 0, listener)
    # Nobody listens there any more.
    with pytest.raises(RuntimeError) as raised:
        gloo_at(OWN_ADDRESS["connects"], store, 1, LONG)
    assert refused_by(raised.value) == (ITS_ADDRESS["connects"],)


def test_the_addresses_at_which_gloo_listens_are_those_of_its_interfaces(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    before = gloo_sockets._listeners()
    assert gloo_sockets.own_addresses() == ("127.0.0.1",)
    # Meanwhile those of groups that earlier tests have made may be closed.
    until(lambda: set(gloo_sockets._listeners()) <= set(before))


def test_an_address_that_does_not_answer_is_silent_from_when_it_was_first_seen():
    with opening("connects") as (under_way, thread, _):
        now_s = 100.0
        under_way.sockets._clock = lambda: now_s
        assert under_way.sockets.addresses == ("127.0.0.2",)
        assert under_way.sockets.silences() == {"127.0.0.1": 0.0}
        now_s += 7
        assert under_way.sockets.silences() == {"127.0.0.1": 7.0}
        threading.Thread(target=under_way.give_up).start()
        thread.join()


def test_a_rank_that_waits_to_be_connected_to_says_where_it_is_and_has_no_silence():
    with opening("is connected to") as (under_way, thread, _):
        assert under_way.sockets.addresses == ("127.0.0.1",)
        assert under_way.sockets.silences() == {}
        threading.Thread(target=under_way.give_up).start()
        thread.join()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_address_that_does_not_answer_is_in_the_kernels_table(family, address):
    with socket.create_server((address, 0), family=family) as listener, socket.socket(family) as own:
        drop_packets(listener)
        own.setblocking(False)
        own.connect_ex(listener.getsockname())
        assert unanswered_by({os.fstat(own.fileno()).st_ino}) == {address}
        assert unanswered_by({os.fstat(listener.fileno()).st_ino}) == set()


def test_what_is_connected_already_is_ended_too_and_nothing_is_done_after_all_is_over():
    ended = []
    under_way = Connecting(2)
    under_way.on_give_up(lambda: (ended.append("it"), under_way.close()))
    under_way.give_up()
    under_way.on_give_up(lambda: ended.append("another"))
    under_way.give_up()
    assert ended == ["it"]
    assert under_way.sockets.addresses == ()
