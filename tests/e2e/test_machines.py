"""The test machines of `machines` and `ssh_hosts`: separate networks, reachable over ssh, and gone at the end."""

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

OPTIONS = ("BatchMode=yes", "StrictHostKeyChecking=accept-new", "ConnectTimeout=60", "LogLevel=ERROR")
SSH = ("ssh", *(f"-o{option}" for option in OPTIONS))


def ssh(machine, *words, **options):
    """Runs ssh on ``machine``; returns its output and exit code."""
    done = machine.run(*SSH, *words, check=False, **options)
    return done.returncode, done.stdout + done.stderr


def test_what_is_started_over_ssh_is_seen(make_lan):
    lan = make_lan("a")
    (a,) = lan.hosts
    with subprocess.Popen([*lan.desk.inside(), *SSH, a.name, "sleep 1000"], env=lan.desk.environment()):
        wait_until(lambda: a.runs("sleep"))
        assert lan.desk.runs("ssh")
        lan.kill_jobs()
    assert_clean(lan)


def test_a_shaped_link_passes_no_more_than_was_said(make_lan):
    lan = make_lan("a")
    (a,) = lan.hosts
    lan.shape("10mbit")
    waited_ns = int(lan.desk.run("date", "+%s%N").stdout)
    assert ssh(lan.desk, a.name, "wc -c", stdin=None, input="x" * 2_000_000) == (0, "2000000\n")
    waited_ns -= int(lan.desk.run("date", "+%s%N").stdout)
    assert -waited_ns > 1.4e9  # 16 Mbit at 10 Mbit/s take 1.6 s


MAKE_AND_WAIT = """
import os, sys
from e2e.ssh_hosts import Lan
lan = Lan("a", "b")
lan.hosts[1].stop_answering()
print(*(machine.init_pid for machine in (lan.desk, *lan.hosts)), flush=True)
sys.stdin.read() or os.kill(os.getpid(), 9)
lan.close()
"""


@pytest.mark.night(but=1)
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
