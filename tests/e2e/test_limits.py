"""What a machine lacks or does not allow: one line names it, its cause and the way out, and nothing is left behind."""

import contextlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import hvdlite_launcher
import psutil
import pytest
from e2e.conftest import wait_until

pytestmark = pytest.mark.slow

RUN = [sys.executable, "-m", "hvdlite_launcher"]
NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root becomes another user and mounts what is full"
)


def ended(command, tmp, **options):
    """Returns the exit code and stderr of a command that has ended; asserts that it left nothing behind."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **{"env": {**os.environ, "TMPDIR": str(tmp)}, **options},
    )
    assert list(tmp.glob("hvdlite-*")) == []
    return done.returncode, done.stderr


def assert_well_or_one_line(code, said, words):
    """Asserts that a failure is explained in one line by the launcher; one more line may come from the agent."""
    assert "Traceback" not in said, said
    if code == 0:
        assert said == ""
        return
    lines = said.splitlines()
    assert 1 <= len(lines) <= 2, said
    assert all(line.startswith("hvdlite-run: ") for line in lines), said
    assert any(word in said for word in words), said


@pytest.mark.night(but=3)
@pytest.mark.parametrize("few", range(5, 40, 2))
def test_few_open_files_are_enough_or_told_in_one_line(few, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    code, said = ended([*RUN, "-np", "2", "true"], tmp_path, preexec_fn=limit)
    assert_well_or_one_line(code, said, ["ulimit -n"])
    assert code == 0 or few < 39


# In the place of ssh: each host is this machine. Notes the limit that it has.
REACH = """#!/bin/sh
ulimit -S -n >>"$0.limits"
for command; do :; done
exec sh -c "$command"
"""


@pytest.mark.parametrize(("count", "hard"), [(2, 400), (8, 40)], ids=["few", "many"])
def test_open_files_for_all_hosts_are_allowed_or_told_before_anything_starts(count, hard, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))

    reach, printed, tmp = (tmp_path / name for name in ("reach", "printed", "tmp"))
    tmp.mkdir()
    reach.write_text(REACH)
    reach.chmod(0o700)
    hosts = ",".join(f"host{number}:1" for number in range(count))
    job = [*RUN, "-H", hosts, "--ssh-program", str(reach), "sh", "-c", f"ulimit -S -n >>{printed}"]
    code, said = ended(job, tmp, preexec_fn=limit)
    limits = Path(f"{reach}.limits")
    if count == 2:
        assert code == 0, said
        assert limits.read_text() == printed.read_text() == "40\n" * 2
    else:
        assert code == 1
        assert said.startswith("hvdlite-run: connections to 8 hosts need ")
        assert "the limit is 40: raise it" in said
        assert said.count("\n") == 1
        assert not limits.exists()


def _outermost_closed(path):
    closed = [parent for parent in path.parents if not parent.stat().st_mode & 0o001]
    return closed[-1] if closed else None


class User:
    """Another user, with no processes or files; in mounts of its own it can use the Python of these tests."""

    def __init__(self, tmp):
        self.uid = 60_000 + os.getpid() % 5_000
        self._mounts = ""
        # These may be in directories that other users cannot enter, such as root's home or a temporary directory.
        needed = {sys.base_prefix, sys.prefix, str(Path(hvdlite_launcher.__file__).parents[1])}
        closed = {path: outermost for path in sorted(needed) if (outermost := _outermost_closed(Path(path)))}
        for number, path in enumerate(closed):
            (tmp / f"needed{number}").mkdir()
            self._mounts += f"mount --bind {path} {tmp}/needed{number}; "
        for directory in dict.fromkeys(closed.values()):
            self._mounts += f"mount -t tmpfs -o mode=755 none {directory}; "
        for number, path in enumerate(closed):
            self._mounts += f"mkdir -p {path}; mount --bind {tmp}/needed{number} {path}; "

    def runs(self, *words, mounts="", limits=()):
        """Returns a command that runs ``words`` as this user, with these mounts and limits."""
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        return ["unshare", "--mount", "sh", "-ec", f'{self._mounts}{mounts}\nexec "$@"', "sh", *become, *limits, *words]

    def processes(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):  # other processes may end meanwhile
                if process.uids().real == self.uid:
                    found.append(process)
        return found


@pytest.fixture
def user(tmp_path):
    for directory in (tmp_path, *tmp_path.parents):
        if directory.is_relative_to(tmp_path.parents[-3]):
            directory.chmod(directory.stat().st_mode | 0o111)
    user = User(tmp_path)
    wait_until(lambda: user.processes() == [])
    itself = "import subprocess, sys, hvdlite_launcher; subprocess.run([sys.executable, '-c', ''], check=True)"
    tried = subprocess.run(
        user.runs(sys.executable, "-c", itself), cwd="/", capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"another user cannot run the Python of these tests: {tried.stderr}")
    yield user
    wait_until(lambda: user.processes() == [])


@pytest.mark.night
@NEEDS_ROOT
def test_few_processes_and_threads_are_enough_or_told_in_one_line(user, tmp_path):
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    os.chown(tmp, user.uid, user.uid)
    codes = {}
    for few in range(1, 14):
        job = user.runs(*RUN, "-np", "2", "true", limits=("prlimit", f"--nproc={few}"))
        codes[few], said = ended(job, tmp, cwd="/")
        # Those that are about to end count too.
        wait_until(lambda: user.processes() == [])
        assert_well_or_one_line(codes[few], said, ["ulimit -u"])
    assert codes[1] == 1
    assert codes[13] == 0


# A /tmp that is full or read-only, in a mount namespace of its own; no other directory can be written.
MOUNTS = {
    "without inodes": "mount -t tmpfs -o size=1m,nr_inodes=2,mode=1777 none /tmp; touch /tmp/last",
    "without room": "mount -t tmpfs -o size=4k,mode=1777 none /tmp; head -c 4096 /dev/zero >/tmp/full",
    "read-only": "mount -t tmpfs -o ro none /tmp",
}


@pytest.mark.night(but=1)
@NEEDS_ROOT
@pytest.mark.parametrize("mount", MOUNTS.values(), ids=MOUNTS)
@pytest.mark.parametrize("words", [["-np", "2", "true"], ["-np", "2", "--dry-run"]], ids=" ".join)
def test_a_temporary_directory_that_takes_nothing_is_told_in_one_line(mount, words, user, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    mounts = "; ".join(mount.replace("/tmp", str(place)) for place in (full, "/var/tmp"))
    # /tmp itself remains, because the tests' own files are in it, but nothing can be written in it.
    mounts += "; mount --rbind /tmp /tmp; mount -o remount,bind,ro /tmp"
    code, said = ended(user.runs(*RUN, *words, mounts=mounts), full, cwd="/", env={**os.environ, "TMPDIR": str(full)})
    assert code == 1, said
    assert_well_or_one_line(code, said, ["TMPDIR"])
