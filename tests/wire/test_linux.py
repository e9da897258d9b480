"""What the operating system says of this host's addresses, interfaces and processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hvdlite_wire import linux
from hvdlite_wire.linux import LOOPBACK, addresses_towards, exit_statuses, interface_with, interfaces, stat_of


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


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

_PARENT = 4


def test_a_name_with_spaces_and_brackets_moves_no_field(tmp_path):
    program = tmp_path / "a ) R 7 (b"
    program.symlink_to(subprocess.run(["which", "sleep"], capture_output=True, text=True, check=True).stdout.strip())
    with subprocess.Popen([program, "1000"]) as process:
        assert stat_of(process.pid)[_PARENT] == os.getpid()
        assert not stat_of(process.pid).has_ended
        assert exit_statuses(process.pid) == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert stat_of(process.pid).has_ended
        assert exit_statuses(process.pid) == [9]
    assert stat_of(process.pid) is None
    assert exit_statuses(process.pid) == []
