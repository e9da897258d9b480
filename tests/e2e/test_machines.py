"""The hosts that other tests make are what they say: apart from each other, reached over ssh, and gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e.conftest import assert_clean, wait_until

pytestmark = pytest.mark.slow

OPTIONS = ("BatchMode=yes", "StrictHostKeyChecking=accept-new", "ConnectTimeout=2", "LogLevel=ERROR")
SSH = ("ssh", *(f"-o{option}" for option in OPTIONS))


def ssh(machine, *words, **options):
    """What ssh said, run on ``machine``, and its exit code."""
    done = machine.run(*SSH, *words, check=False, **options)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_each_host_is_reached_by_name_and_address_from_the_desk_and_from_the_others(make_lan, ipv6):
    lan = make_lan("a", "b", "c", ipv6=ipv6)
    for machine in (lan.desk, *lan.hosts):
        for host in lan.hosts:
            if host is not machine:
                assert ssh(machine, host.name, "uname", "-n") == (0, f"{host.name}\n")
                assert ssh(machine, host.address, "echo $HOME:$TMPDIR") == (0, f"{host.home}:{host.tmp}\n")
    assert_clean(lan)


def test_hosts_differ_in_interfaces_ports_processes_and_shared_memory(make_lan):
    a, b = make_lan("a", "b", interfaces=("lan0", "ens7"), ports=(22, 2222), decoy=True).hosts
    assert "lan0" in a.run("ip", "link").stdout
    assert "ens7" in b.run("ip", "link").stdout
    for host in (a, b):
        assert "172.17.0.1/16" in host.run("ip", "address", "show", "docker0").stdout
    (a_sshd,) = a.listening_tcp().items()
    (b_sshd,) = b.listening_tcp().items()
    assert (a_sshd[0], b_sshd[0]) == (f"{a.address}:22", f"{b.address}:2222")
    assert psutil.Process(b_sshd[1]).name() == "sshd"
    a.run("touch", "/dev/shm/mine")
    a.serve("sleep", "1000")
    assert "sleep" in a.run("sh", "-c", "cat /proc/[0-9]*/comm").stdout
    assert [path.name for path in a.leftovers()] == ["mine"]
    assert b.leftovers() == []
    assert "sleep" not in b.run("sh", "-c", "cat /proc/[0-9]*/comm").stdout
    assert a.processes() == []  # it is the machine's own


def test_what_is_started_over_ssh_is_seen(make_lan):
    lan = make_lan("a")
    (a,) = lan.hosts
    with subprocess.Popen([*lan.desk.inside(), *SSH, a.name, "sleep 1000"], env=lan.desk.environment()):
        wait_until(lambda: a.runs("sleep"))
        assert lan.desk.runs("ssh")
        lan.kill_jobs()
    assert_clean(lan)


def test_a_cut_link_passes_nothing_until_it_is_restored(make_lan):
    lan = make_lan("a", "b")
    a, b = lan.hosts
    lan.cut(b)
    assert ssh(lan.desk, b.name, "true")[1].strip().endswith("Connection timed out")
    assert ssh(lan.desk, a.name, "true")[0] == 0
    lan.restore(b)
    assert ssh(lan.desk, b.name, "true")[0] == 0


def test_a_shaped_link_passes_no_more_than_was_said(make_lan):
    lan = make_lan("a")
    (a,) = lan.hosts
    lan.shape("10mbit")
    waited_ns = int(lan.desk.run("date", "+%s%N").stdout)
    assert ssh(lan.desk, a.name, "wc -c", stdin=None, input="x" * 2_000_000) == (0, "2000000\n")
    waited_ns -= int(lan.desk.run("date", "+%s%N").stdout)
    assert -waited_ns > 1.4e9  # 16 Mbit at 10 Mbit/s take 1.6 s


def test_a_host_can_refuse_keys_hold_its_tongue_and_change_its_own_key(make_lan):
    lan = make_lan("a", "b", "c")
    a, b, c = lan.hosts
    a.refuse_keys()
    assert ssh(lan.desk, a.name, "true") == (255, f"root@{a.name}: Permission denied (publickey).\n")
    a.accept_keys()
    assert ssh(lan.desk, a.name, "true")[0] == 0
    b.stop_answering()
    assert "timed out during banner exchange" in ssh(lan.desk, b.name, "true")[1]
    assert ssh(lan.desk, c.name, "true")[0] == 0
    c.change_host_key()
    assert "Host key verification failed" in ssh(lan.desk, c.name, "true")[1]


def test_a_user_s_own_ssh_configuration_is_read(make_lan):
    lan = make_lan("a", ports=(2222,))
    (a,) = lan.hosts
    (lan.desk.home / ".ssh" / "config").write_text(f"Host big-one\n  HostName {a.address}\n  Port 2222\n")
    assert ssh(lan.desk, "big-one", "uname", "-n") == (0, "a\n")


def test_one_host_can_miss_a_directory_that_the_others_have(make_lan, tmp_path):
    a, b = make_lan("a", "b").hosts
    (tmp_path / "file").touch()
    a.hide(tmp_path)
    assert a.run("ls", str(tmp_path)).stdout == ""
    assert b.run("ls", str(tmp_path)).stdout == "file\n"


MAKE_AND_WAIT = """
import os, sys
from e2e.hosts import Lan
lan = Lan("a", "b")
lan.hosts[1].stop_answering()
print(*(machine.init_pid for machine in (lan.desk, *lan.hosts)), flush=True)
sys.stdin.read() or os.kill(os.getpid(), 9)
lan.close()
"""


@pytest.mark.parametrize("end", ["close", "kill -9"])
def test_nothing_is_left_when_they_are_closed_nor_when_the_tests_are_killed(make_lan, tmp_path, end):
    namespaces = {os.readlink(path) for path in Path("/proc").glob("[0-9]*/ns/net")}
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_AND_WAIT],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as tests:
        pids = [int(word) for word in tests.stdout.readline().split()]
        inside = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(inside - namespaces) == 3
        tests.communicate(b"go on" if end == "close" else b"")
    assert tests.returncode == (0 if end == "close" else -signal.SIGKILL)
    wait_until(lambda: not [pid for pid in psutil.pids() if _network(pid) in inside])


def _network(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
