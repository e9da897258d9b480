"""This host's addresses and interfaces, as the operating system reports them."""

from __future__ import annotations

import pytest
from hvdlite_wire.linux import LOOPBACK

from hvdlite.rendezvous import host_address
from hvdlite.rendezvous.host_address import address_of, no_connection_between, refused_by


def test_an_interface_that_is_not_there_has_no_address():
    assert address_of("no-such-interface") is None


def test_an_address_that_only_its_own_link_knows_is_none_for_others(monkeypatch):
    found = {"eth0": ["fd00::1", "fe80::1%eth0"]}
    monkeypatch.setattr(host_address, "interfaces", lambda: found)
    assert address_of("eth0") == "fd00::1"
    del found["eth0"][0]
    assert address_of("eth0") is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("[socket.cc:142] rv != -1. -1 vs -1. connect: No route to host", "no route to host"),
        ("[/p/pair.cc:144] SO_ERROR: Connection refused, remote=[10.0.0.2]:40001", "connection refused"),
        ("Gloo connectFullMesh failed with [/p/pair.h:311] Connect timeout [none]", "connect timeout"),
        (TimeoutError("timed out"), "timed out"),
    ],
)
def test_a_connection_that_was_not_made_names_the_hosts_the_firewall_and_the_check(error, words):
    assert no_connection_between(["a", "b", "b", "c"], "b", error) == (
        f"b could not open a TCP connection to another host of the job (a, c): {words}. Does a firewall block TCP "
        "between these hosts, or has the rank there ended? hvdlite-run --check -H a,b,c shows which connections fail"
    )


@pytest.mark.parametrize(
    ("error", "addresses"),
    [
        ("timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:8618$1", ("10.0.0.2",)),
        ("hvd.init() failed: (SO_ERROR: No route to host, remote=[::ffff:10.0.0.2]:8618$1)", ("10.0.0.2",)),
        ("SO_ERROR: Network is unreachable, remote=[fe80::1%eth0]:86", ("fe80::1",)),
        ("rank 0 cannot be reached at ('10.0.0.2', 4444) ([Errno 111] Connection refused). Does a", ("10.0.0.2",)),
        ("rank 0 cannot be reached at ('fd00::2', 4444, 0, 0) ([Errno 113] No route to host)", ("fd00::2",)),
        ("rv != -1. -1 vs -1. connect: No route to host", ("10.0.0.4",)),
        ("SO_ERROR: Connection timed out, remote=[10.0.0.2]:8618$1", ()),
        ("Connection closed by peer [10.0.0.2]:57515", ()),
    ],
)
def test_who_refuses_a_connection_is_named_by_the_error_or_has_no_route(monkeypatch, error, addresses):
    monkeypatch.setattr(host_address, "_has_route", lambda address: address != "10.0.0.4")
    assert refused_by(error, ["10.0.0.3", "10.0.0.4"]) == addresses


def test_an_address_has_a_route_whether_or_not_somebody_listens_there():
    assert host_address._has_route(LOOPBACK)


def test_an_error_with_another_cause_or_on_one_host_says_nothing_of_a_firewall():
    assert no_connection_between(["a", "b"], "a", "wait timeout after 1800000ms, keys: /x") is None
    assert no_connection_between(["a", "a"], "a", "Connection refused") is None
