"""hvdlite-run --check on this machine, and on "other hosts" that a program in place of ssh makes of this machine."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# It is called with options, a host's name and a command, like ssh.
OTHER_HOSTS = """\
#!/bin/sh
case $1 in
    refuses) echo "me@refuses: Permission denied (publickey)." >&2; exit 255 ;;
    bare) export PYTHONPATH={broken} ;;
esac
exec sh -c "$2"
"""


@pytest.fixture
def ssh_program(tmp_path: Path) -> str:
    """Provides a program in place of ssh: each host is this machine; "bare" has no torch, "refuses" fails."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')")
    program = tmp_path / "other-hosts"
    program.write_text(OTHER_HOSTS.format(broken=broken))
    program.chmod(0o755)
    return str(program)


def ended(job):
    code, out, err = job.ended()
    job.assert_gone()
    return code, out.decode(), err.decode()


def rows(out):
    """Returns the rows of the first table, by host."""
    lines = out.partition("\n\n")[0].splitlines()
    return {line.split()[0]: line for line in lines[1:]}


def test_this_machine_is_well(launch):
    code, out, err = ended(launch("--check"))
    (row,) = rows(out).values()
    assert re.match(rf"localhost +✓ {re.escape(sys.version.split()[0])} +✓ 2\.\d+", row)
    assert (code, err) == (0, "")
    assert "✗" not in out


@pytest.mark.night
def test_each_host_is_looked_at_whatever_the_others_have(launch, ssh_program, tmp_path):
    words = ["--no-env", "-H", "localhost,bare,refuses,d", "--ssh-program", ssh_program]
    code, out, _ = ended(launch("--check", *words, cwd=tmp_path))
    assert code == 1
    assert {host: "✗" in row for host, row in rows(out).items()} == {
        "localhost": False,
        "bare": True,
        "refuses": True,
        "d": False,
    }
    todo = out.partition("what to do\n\n")[2].splitlines()
    assert len(todo) == 2
    assert "bare: torch cannot be imported (ImportError: libgomp.so.1: cannot open shared object file)" in todo[0]
    assert "refuses: me@refuses: Permission denied (publickey). (the host does not accept your key" in todo[1]
    # The two hosts that can train are measured.
    assert re.search(r"^d +\d+.* +–$", out, re.MULTILINE)


def test_hosts_of_which_one_alone_could_train_are_not_measured(launch, ssh_program):
    code, out, _ = ended(launch("--check", "--no-env", "-H", "localhost,bare", "--ssh-program", ssh_program))
    assert code == 1
    assert "not measured" in out


@pytest.mark.night(but=1)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(launch, ssh_program, signum):
    job = launch("--check", "-H", "a,b", "--ssh-program", ssh_program, "--verbose")
    err = b""
    while b"pid " not in err:
        line = job.process.stderr.readline()
        assert line
        err += line
    job.process.send_signal(signum)
    code, _, err = ended(job)
    assert code == 128 + signum
    assert err.endswith(f"hvdlite-run: {signum.name} before the check was done\n")


def test_what_takes_too_long_is_a_finding(launch):
    code, out, _ = ended(launch("--check", "--start-timeout", "0.001"))
    assert code == 1
    assert "✗" in out
    assert "--start-timeout" in out
