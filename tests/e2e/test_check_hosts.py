"""hvdlite-run --check on real hosts, each with an sshd, over a network that may not let everything pass."""

from __future__ import annotations

import re
import threading

import pytest
from e2e.conftest import assert_clean

pytestmark = pytest.mark.slow

NOBODY = "02:00:00:00:00:99"  # a hardware address that no host has


def checked(launch, lan, *words, **options):
    """Returns the exit code and the output, once nothing is left on any host."""
    hosts = ",".join(host.spec for host in lan.hosts)
    job = launch("--check", "-H", hosts, *words, on=lan.desk, **options).process
    # --check waits for hosts that do not answer, and gloo tries five times.
    out, err = job.communicate(timeout=300)
    assert_clean(lan)
    assert "Traceback" not in err.decode()
    return job.returncode, out.decode()


def row(out, host):
    (first, *_) = [line for line in out.splitlines() if line.startswith(host.address)]
    return first


def todo(out):
    return out.partition("what to do\n\n")[2].splitlines()


def test_two_hosts_that_are_well(launch, make_lan):
    lan = make_lan("a", "b", interfaces=("lan0", "ens7"), decoy=True)
    over, seen = threading.Event(), set()
    before = [(machine.name, address) for machine in lan.machines for address in machine.listening_tcp()]

    def watch():
        while not over.is_set():
            seen.update((machine.name, address) for machine in lan.machines for address in machine.listening_tcp())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        code, out = checked(launch, lan)
    finally:
        over.set()
        watcher.join()
    assert (code, todo(out)) == (0, [])
    assert "✗" not in out
    assert ["lan0" in row(out, lan.hosts[0]), "ens7" in row(out, lan.hosts[1])] == [True, True]
    assert len(re.findall(r"\d (µs|ms)", out)) == 2
    # Each rank listens on its own address only, which the other host must reach.
    own = {host.name: host.address for host in lan.hosts}
    assert all(address.rpartition(":")[0] == own.get(name) for name, address in seen.difference(before)), seen


@pytest.mark.night
def test_hosts_with_ipv6_alone(launch, make_lan):
    code, out = checked(launch, make_lan("a", "b", ipv6=True))
    assert (code, todo(out)) == (0, [])
    assert len(re.findall(r"\d (µs|ms)", out)) == 2


@pytest.mark.night
def test_a_host_that_does_not_answer_and_one_without_the_directory(launch, make_lan, tmp_path):
    lan = make_lan("a", "b", "c")
    here = tmp_path / "parent" / "here"
    here.mkdir(parents=True)
    lan.hosts[1].hide(here.parent)
    lan.hosts[2].stop_answering()
    code, out = checked(launch, lan, "--start-timeout", "60", cwd=here)
    assert code == 1
    absent, silent = todo(out)
    assert f"{lan.hosts[1].address}: the working directory {here} does not exist" in absent
    assert f"{lan.hosts[2].address}: " in silent
    assert len(re.findall(r"\d (µs|ms)", out)) == 2


@pytest.mark.night
def test_two_hosts_that_do_not_reach_each_other_break_no_other_pair(launch, make_lan):
    lan = make_lan("a", "b", "c", interfaces=("lan0", "ens7", "enp3"))
    a, b, _ = lan.hosts
    # Packets are lost on the way: no error is sent back.
    a.run("ip", "neighbour", "replace", b.address, "lladdr", NOBODY, "dev", "lan0", "nud", "permanent")
    code, out = checked(launch, lan)
    assert code == 1
    assert len(re.findall(r"\d (µs|ms)", out)) == 4
    step = "(a firewall? Allow TCP there, usually on ports 32768-60999, or choose a network with --network-interface)"
    assert todo(out) == [
        f"  ✗ {one.address} cannot connect to {other.address}: connection timed out {step}"
        for one, other in ((a, b), (b, a))
    ]


def test_a_firewall_in_one_direction_is_named_although_gloo_connects_in_the_other(launch, make_lan):
    lan = make_lan("a", "b")
    a, b = lan.hosts
    # Of two hosts, gloo connects from the one with the higher address.
    a.drop_connections_to(b.address)
    code, out = checked(launch, lan)
    assert code == 1
    (blocked,) = todo(out)
    assert blocked.startswith(f"  ✗ {a.address} cannot connect to {b.address}: connection timed out (a firewall? ")


@pytest.mark.night
def test_an_interface_that_is_not_there_is_told(launch, make_lan):
    lan = make_lan("a", "b", interfaces=("lan0", "ens7"))
    code, out = checked(launch, lan, "--network-interface", "lan0")
    assert code == 1
    assert re.search(rf"✗ {lan.hosts[1].address}: .*'lan0'; this host has .*ens7", todo(out)[0])
