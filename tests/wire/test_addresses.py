"""This host's addresses and interfaces, as the operating system reports them."""

from hvdlite_wire import addresses
from hvdlite_wire.addresses import LOOPBACK, addresses_towards, interface_with, interfaces


def test_the_interface_of_an_address_is_found_by_the_address():
    name = interface_with(LOOPBACK)
    assert LOOPBACK in interfaces()[name]
    assert interface_with("203.0.113.77") is None


def test_the_route_to_this_machine_is_by_its_loopback():
    assert list(addresses_towards(LOOPBACK)) == [LOOPBACK]
    assert list(addresses_towards("no.such.host.invalid")) == []


def test_addresses_that_others_can_use_come_first():
    found = ["fe80::1%eth0", "fd00::1", "169.254.1.1", "10.0.0.1"]
    assert sorted(found, key=addresses._least_useful_last)[:2] == ["10.0.0.1", "fd00::1"]
