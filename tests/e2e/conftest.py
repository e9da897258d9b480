"""Fixtures that start hvdlite-run as a user would, on this machine or on test machines, and track all its processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from e2e.machines import Machine, why_there_are_none
from e2e.ssh_hosts import Lan

PATIENCE_S = 240  # a generous limit for conditions that must become true
# The launcher promises to clean up within 5 s, which `test_supervisor` tests with a clock of its own. A busy machine
# may take longer; what waits for the grace period of 30 s is too late here too.
TEARDOWN_S = 25

# In a script's background job or under nohup, these signals are ignored, and child processes would inherit that.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) == signal.SIG_IGN:
        signal.signal(_signum, _handler)


class Launch:
    """One run of hvdlite-run. All its processes, on every test machine, have a mark in their environment."""

    def __init__(
        self,
        tmp: Path,
        arguments: tuple[str | bytes, ...],
        env: dict[str, str],
        on: Machine | None,
        program: tuple[str, ...] = ("-m", "hvdlite_launcher"),
        **popen,
    ) -> None:
        self._mark = f"TEST_HVDLITE_MARK={uuid.uuid4()}"
        self.tmp = tmp  # where the job makes its private directory
        name, _, value = self._mark.partition("=")
        self._on = on
        inside, machine_env = (
            (on.inside(popen.pop("cwd", None)), on.environment()) if on else ([], {"TMPDIR": str(tmp)})
        )
        self.process = subprocess.Popen(
            [*inside, sys.executable, *program, *arguments],
            env={**os.environ, "HVDLITE_START_TIMEOUT": str(PATIENCE_S), **machine_env, **env, name: value},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )

    def ended(self, timeout_s: float = PATIENCE_S) -> tuple[int, bytes, bytes]:
        """Waits until it has ended; returns its exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """Returns all living processes with the mark: launcher, agents, workers, and their orphaned children."""
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            environ = process.environ()
            return self._mark == f"TEST_HVDLITE_MARK={environ.get('TEST_HVDLITE_MARK')}" and (
                process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False

    def launcher(self) -> psutil.Process:
        """Returns the process of hvdlite-run itself. On a test machine, it is a child of the process we started."""
        started = psutil.Process(self.process.pid)
        if self._on is None:
            return started
        wait_until(started.children)
        return started.children()[0]

    def agent(self) -> psutil.Process:
        (agent,) = self.remote_parent().children()
        return agent

    def remote_parent(self) -> psutil.Process:
        """Returns the process that starts the agent and waits for it. A rank server's stands beside the launcher."""
        (child,) = self.launcher().children()
        if not is_called(child, "hvdlite_launcher.host.remote_parent"):
            called = [each for each in self.processes() if is_called(each, "hvdlite_launcher.host.remote_parent")]
            (child,) = (each for each in called if each.parent() not in called)
        return child

    def assert_gone(self) -> None:
        """Asserts that no process and no directory of the job is left within `TEARDOWN_S` from now."""
        wait_until(lambda: not self.processes() and not self.leftovers(), TEARDOWN_S, self._what_is_left)

    def leftovers(self) -> list[Path]:
        return list(self.tmp.glob("hvdlite-*"))  # torch's caches are in there too

    def _what_is_left(self) -> str:
        return f"left: {[str(process) for process in self.processes()]}, {self.leftovers()}"

    def kill_all(self) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.communicate()

    def signal_all(self, signum: int) -> None:
        """Signals all processes of `processes`, except those that have ended meanwhile."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)


def wait_until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, message: Callable[[], str] = str
) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, message()
        time.sleep(0.03)


def is_called(process: psutil.Process, *words: str) -> bool:
    """Whether the process runs, and has these words in its command line."""
    try:
        return set(words) <= set(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def assert_clean(lan: Lan, timeout_s: float = TEARDOWN_S) -> None:
    """Asserts that no process or file of any job is left on any machine within ``timeout_s`` from now."""
    wait_until(lambda: not lan.left(), timeout_s, lambda: f"left: {lan.left()}")


def ready(job: Launch, size: int = 2) -> Launch:
    """Waits until each of ``size`` workers has printed "ready"; returns the job."""
    assert job.process.stdout is not None
    seen = set()
    while len(seen) < size:
        line = job.process.stdout.readline()
        assert line, "the job ended before its workers were ready"
        if match := re.fullmatch(rb"\[(\d+)\]<stdout>:ready\n", line):
            seen.add(int(match[1]))
    return job


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Iterator[Callable[..., Launch]]:
    """Provides ``launch("-np", "2", "true")``, which starts hvdlite-run; kills what still runs after the test.

    ``on`` is the test machine that hvdlite-run is started on, if not this one. With ``copies``, the default except in
    tests that are marked ``new_processes``, ranks that use torch are forked from the rank server.
    """
    by_default = request.node.get_closest_marker("new_processes") is None
    launched: list[Launch] = []
    # A job whose directory has too long a path for its sockets makes it elsewhere: `tmp_path` may be too long.
    directory = Path(tempfile.mkdtemp(prefix="job"))

    def start(
        *arguments: str | bytes,
        env: dict[str, str] | None = None,
        on: Machine | None = None,
        copies: bool = by_default,
        **popen,
    ) -> Launch:
        tmp = directory / f"tmp{len(launched)}"
        tmp.mkdir()
        if copies and "program" not in popen and sys.platform == "linux":
            popen["program"] = request.getfixturevalue("rank_server").launcher()
        launched.append(Launch(tmp, arguments, env or {}, on, **popen))
        return launched[-1]

    yield start
    for each in launched:
        each.kill_all()
    shutil.rmtree(directory)


@pytest.fixture
def make_lan() -> Iterator[Callable[..., Lan]]:
    """Provides ``make_lan("a", "b")``: hosts with sshd, and a desk to start jobs from; removes them after the test."""
    if reason := why_there_are_none():
        pytest.skip(f"no hosts can be made here: {reason}")
    made: list[Lan] = []

    def make(*names: str, **options) -> Lan:
        made.append(Lan(*names, **options))
        return made[-1]

    yield make
    for lan in made:
        lan.close()
