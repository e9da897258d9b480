"""This host's addresses and interfaces, as the operating system reports them."""

from hvdlite_wire import linux
from hvdlite_wire.linux import LOOPBACK, addresses_towards, interface_with, interfaces


def test_the_interface_of_an_address_is_found_by_the_address():
    name = interface_with(LOOPBACK)
    assert LOOPBACK in interfaces()[name]
    assert interface_with("203.0.113.77") is None


def test_the_interface_of_loopback_is_found_without_psutil(monkeypatch):
    known = interfaces()
    monkeypatch.setattr(linux, "interfaces", None)
    assert LOOPBACK in known[interface_with(LOOPBACK)]


def test_an_interface_that_the_kernel_tells_no_address_of_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(linux, "_SIOCGIFADDR", 0)  # as on other systems
    assert LOOPBACK in interfaces()[interface_with(LOOPBACK)]


def test_the_route_to_this_machine_is_by_its_loopback():
    assert list(addresses_towards(LOOPBACK)) == [LOOPBACK]
    assert list(addresses_towards("no.such.host.invalid")) == []


def test_addresses_that_others_can_use_come_first():
    found = ["fe80::1%eth0", "fd00::1", "169.254.1.1", "10.0.0.1"]
    assert sorted(found, key=linux._least_useful_last)[:2] == ["10.0.0.1", "fd00::1"]
