"""This host's addresses, the routes to others, and a port that is reserved for a later listener."""

import socket

import pytest
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.system import network


def test_the_way_to_this_machine_is_by_its_loopback():
    assert network.address_on_route("127.0.0.1") == "127.0.0.1"


def test_of_several_ways_the_one_to_most_peers_counts(monkeypatch):
    ways = {"10.0.0.2": "10.0.0.1", "192.168.0.2": "192.168.0.1", "10.0.0.3": "10.0.0.1"}
    monkeypatch.setattr(network, "address_on_route", ways.get)
    assert network.address_towards(["192.168.0.2", "10.0.0.2", "10.0.0.3"]) == "10.0.0.1"


def test_a_peer_that_no_way_leads_to_is_named(monkeypatch):
    monkeypatch.setattr(network, "address_on_route", {"10.0.0.2": "10.0.0.1"}.get)
    with pytest.raises(LauncherError, match=r"no route to 10\.9\.9\.9"):
        network.address_towards(["10.0.0.2", "10.9.9.9"])


@pytest.mark.parametrize(
    ("connection", "address"),
    [("10.0.0.9 50000 10.0.0.1 22", "10.0.0.1"), ("fe80::1%eth0 50000 fe80::2%eth0 22", "fe80::2")],
)
def test_ssh_says_at_which_address_a_host_was_reached(connection, address):
    assert network.own_address({"SSH_CONNECTION": connection}) == address


def test_a_host_that_was_reached_through_pipes_has_the_address_of_its_way_out(monkeypatch):
    monkeypatch.setattr(network, "address_on_route", lambda peer: "10.0.0.7")
    assert network.own_address({"SSH_CONNECTION": "UNKNOWN 65535 UNKNOWN 65535"}) == "10.0.0.7"


def test_of_several_interfaces_the_first_that_is_there_counts(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"], "ib0": ["10.0.0.1"]})
    assert [network.first_there(names) for names in ("eth0,ib0,lo", "lo", "eth0,eth1")] == ["ib0", "lo", "eth1"]


def test_an_interface_that_is_not_there_is_told_with_those_that_are(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": []})
    with pytest.raises(LauncherError, match="no network interface 'eth9'; this host has lo, eth0"):
        network.address_of("eth9")
    with pytest.raises(LauncherError, match="'eth0' has no IP address"):
        network.address_of("eth0")


def test_loopback_and_what_our_interfaces_have_is_our_own():
    assert network.is_own_address("127.0.0.77")
    assert not network.is_own_address("203.0.113.77")
    assert not network.is_own_address("node1")


def test_a_reserved_port_is_nobody_elses_and_does_not_listen_until_who_reuses_it_does():
    with network.reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_without_a_route_an_address_that_others_may_reach_is_found(monkeypatch):
    there = {"lo": ["127.0.0.1", "::1"], "odd0": ["169.254.3.4", "fe80::1%odd0"], "eth0": ["10.0.0.7", "fd00::7"]}
    monkeypatch.setattr(network, "interfaces", lambda: there)
    assert network.some_address() == "10.0.0.7"
    del there["eth0"]
    assert network.some_address() is None
