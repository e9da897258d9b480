"""The addresses that this host has, as its system tells them."""

from __future__ import annotations

import ipaddress

from hvdlite.rendezvous import host_address
from hvdlite.rendezvous.host_address import LOOPBACK, address_of, interface_of


def test_the_loopback_interface_has_the_loopback_address_and_the_other_way_round():
    name = interface_of(LOOPBACK)
    assert name is not None
    assert address_of(name) == LOOPBACK


def test_an_interface_that_is_not_there_has_no_address():
    assert address_of("no-such-interface") is None


def test_an_address_that_only_its_own_link_knows_is_none_for_others(monkeypatch):
    monkeypatch.setattr(host_address, "_interfaces_v4", list)
    own = [("eth0", ipaddress.IPv6Address("fe80::1")), ("eth0", ipaddress.IPv6Address("fd00::1"))]
    monkeypatch.setattr(host_address, "_interfaces_v6", lambda: own)
    assert address_of("eth0") == "fd00::1"
    monkeypatch.setattr(host_address, "_interfaces_v6", lambda: own[:1])
    assert address_of("eth0") is None
