"""Directories of dead jobs are removed, and no others."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hvdlite_launcher.errors import LauncherError
from hvdlite_launcher.plan.worker_environment import job_dir
from hvdlite_launcher.system import job_directory


@pytest.fixture
def path(tmp_path):
    # Its own name: the processes of a dead job are known by it, on the whole machine.
    return job_dir(f"{os.urandom(8).hex()}-0", str(tmp_path))


def abandoned(path):
    os.close(job_directory.make(path))
    Path(path, "store").touch()
    return Path(path)


def test_one_that_is_held_stays_and_one_that_nobody_holds_goes(path, tmp_path):
    held = job_directory.make(path)
    job_directory.clear_abandoned(str(tmp_path))
    assert os.path.isdir(path)
    assert os.stat(path).st_mode & 0o777 == 0o700
    os.close(held)
    job_directory.clear_abandoned(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_it_is_held_until_its_process_ends_however_that_does(path, tmp_path):
    imports = "import sys; from hvdlite_launcher.system.job_directory import make"
    program = f"{imports}; make(sys.argv[1]); print('made', flush=True)"
    command = [sys.executable, "-c", f"{program}; input()", path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"made\n"
        job_directory.clear_abandoned(str(tmp_path))
        assert os.path.isdir(path)
        holder.kill()
    job_directory.clear_abandoned(str(tmp_path))
    assert not os.path.exists(path)


def test_what_is_not_known_to_be_a_job_s_of_this_machine_stays(path, tmp_path, monkeypatch):
    other_names = [tmp_path / name for name in ("hvdlite-", "hvdlite-mine", "hvdlite-0123456789abcdef-0.tar", "other")]
    for other in other_names:
        abandoned(str(other))
    without_note = abandoned(path)
    (without_note / "boot").unlink()
    of_another_boot = abandoned(job_dir("0123456789abcdef-1", str(tmp_path)))
    (of_another_boot / "boot").write_text("another")
    of_another_user = abandoned(job_dir("0123456789abcdef-2", str(tmp_path)))
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").touch()
    link = tmp_path / "hvdlite-0123456789abcdef-3"
    link.symlink_to(target)
    note_elsewhere = abandoned(job_dir("0123456789abcdef-4", str(tmp_path)))
    (note_elsewhere / "boot").rename(tmp_path / "boot")
    (note_elsewhere / "boot").symlink_to(tmp_path / "boot")
    fstat = os.fstat

    def as_another_users(fd):
        stat = fstat(fd)
        if os.path.samestat(stat, os.stat(of_another_user)):
            return os.stat_result([*stat[:4], stat.st_uid + 1, *stat[5:10]])
        return stat

    monkeypatch.setattr(os, "fstat", as_another_users)
    job_directory.clear_abandoned(str(tmp_path))
    for left in (*other_names, without_note, of_another_boot, of_another_user, link, target / "file", note_elsewhere):
        assert os.path.lexists(left), left


SLEEPS = "import sys; print('sleeps', flush=True); sys.stdin.read()"


def sleeper(job: str) -> subprocess.Popen:
    """Starts a daemon of the job with this directory, with a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPS],
        env={**os.environ, "HVDLITE_JOB_DIR": job},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout.readline() == b"sleeps\n"
    return process


def test_processes_that_a_dead_job_has_left_are_killed_and_those_of_others_go_on(path, tmp_path):
    running = job_dir("0123456789abcdef-1", str(tmp_path))
    held = job_directory.make(running)
    abandoned(path)
    left, others = sleeper(path), sleeper(running)
    job_directory.clear_abandoned(str(tmp_path))
    assert left.wait(60) == -signal.SIGKILL
    assert not os.path.exists(path)
    assert others.poll() is None
    others.communicate()
    assert others.returncode == 0
    os.close(held)


def test_a_job_that_is_started_by_a_process_of_a_dead_one_leaves_that_alone(path, tmp_path):
    # Such as a terminal that the dead job has opened: the process that clears away is of it, or a child of it.
    abandoned(path)
    clear = (
        "import sys; from hvdlite_launcher.system.job_directory import clear_abandoned; clear_abandoned(sys.argv[1])"
    )
    command = ["env", "-u", "HVDLITE_JOB_DIR", sys.executable, "-c", clear, str(tmp_path)]
    by_shell = ["sh", "-c", '"$@"; echo lives', "sh", *command]
    run = subprocess.run(by_shell, env={**os.environ, "HVDLITE_JOB_DIR": path}, check=True, capture_output=True)
    assert run.stdout == b"lives\n"
    assert os.path.isdir(path)


def test_one_that_is_empty_goes_since_its_job_never_came_further(path, tmp_path):
    os.mkdir(path, 0o700)
    job_directory.clear_abandoned(str(tmp_path))
    assert not os.path.exists(path)


def test_one_that_is_cleared_away_while_it_is_made_is_made_again(path, tmp_path, monkeypatch):
    flock, cleared = job_directory.fcntl.flock, []

    def clear_first(fd, how):
        if not cleared:  # another job looks at the directory after it was created and before it is locked
            cleared.append(fd)
            job_directory.clear_abandoned(str(tmp_path))
            assert not os.path.exists(path)
        flock(fd, how)

    monkeypatch.setattr(job_directory.fcntl, "flock", clear_first)
    held = job_directory.make(path)
    assert cleared
    assert os.path.samestat(os.fstat(held), os.stat(path))
    os.close(held)


def test_what_cannot_be_made_whole_is_not_left(path, monkeypatch):
    def no_room():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(job_directory, "boot_id", no_room)
    with pytest.raises(OSError, match="No space left"):
        job_directory.make(path)
    assert not os.path.exists(path)


def test_that_there_is_no_temporary_directory_is_told_with_the_way_out(monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(job_directory.tempfile, "gettempdir", none)
    monkeypatch.setenv("TMPDIR", "/full")
    with pytest.raises(LauncherError, match=r"no temporary directory can be written .*: /full, /tmp, .* set TMPDIR"):
        job_directory.temporary_directory()
