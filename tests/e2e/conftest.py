"""Starts hvdlite-run as a user would, and finds every process that came from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from e2e.machines import Machine, why_there_are_none
from e2e.ssh_hosts import Lan

PATIENCE_S = 60  # for what must happen sooner or later
TEARDOWN_S = 5  # what the launcher promises

# Where tests run in a script's background job, or under nohup, these are ignored, and what they start inherits that.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) == signal.SIG_IGN:
        signal.signal(_signum, _handler)


class Launch:
    """One run of hvdlite-run. All that it starts carries a mark in its environment, on whatever machine."""

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
            env={**os.environ, **machine_env, **env, name: value},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )

    def ended(self, timeout_s: float = PATIENCE_S) -> tuple[int, bytes, bytes]:
        """Its exit code and output, once it has ended."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """All that live and carry the mark: launcher, agent, workers, and what these left behind."""
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
        """The process of hvdlite-run itself; on another machine, what we started only leads there."""
        started = psutil.Process(self.process.pid)
        if self._on is None:
            return started
        wait_until(started.children)
        return started.children()[0]

    def agent(self) -> psutil.Process:
        (agent,) = self.remote_parent().children()
        return agent

    def remote_parent(self) -> psutil.Process:
        """What waits for the agent."""
        (parent,) = self.launcher().children()
        return parent

    def assert_gone(self) -> None:
        """Within the promised time from now nothing is left: no process, no directory."""
        wait_until(lambda: not self.processes() and not self.leftovers(), TEARDOWN_S, self._what_is_left)

    def leftovers(self) -> list[Path]:
        return list(self.tmp.glob("hvdlite-*"))  # torch keeps caches of its own there

    def _what_is_left(self) -> str:
        return f"left: {[str(process) for process in self.processes()]}, {self.leftovers()}"

    def kill_all(self) -> None:
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        self.process.communicate()


def wait_until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, message: Callable[[], str] = str
) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, message()
        time.sleep(0.03)


def assert_clean(lan: Lan, timeout_s: float = TEARDOWN_S) -> None:
    """Within this time from now no job has, or left, anything on any of the machines."""
    wait_until(lambda: not lan.left(), timeout_s, lambda: f"left: {lan.left()}")


def ready(job: Launch, size: int = 2) -> Launch:
    """Wait until each of ``size`` workers has said so."""
    assert job.process.stdout is not None
    seen = set()
    while len(seen) < size:
        line = job.process.stdout.readline()
        assert line, "the job ended before its workers were ready"
        if match := re.fullmatch(rb"\[(\d+)\]<stdout>:ready\n", line):
            seen.add(int(match[1]))
    return job


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """``launch("-np", "2", "true")``; a run that a failed test leaves is ended after it.

    ``on`` is the machine that hvdlite-run is started on, if not this one.
    """
    launched: list[Launch] = []

    def start(*arguments: str | bytes, env: dict[str, str] | None = None, on: Machine | None = None, **popen) -> Launch:
        tmp = tmp_path / f"tmp{len(launched)}"
        tmp.mkdir()
        launched.append(Launch(tmp, arguments, env or {}, on, **popen))
        return launched[-1]

    yield start
    for each in launched:
        each.kill_all()


@pytest.fixture
def make_lan() -> Iterator[Callable[..., Lan]]:
    """``make_lan("a", "b")``: hosts to reach over ssh, and a desk to do it from; gone after the test."""
    if reason := why_there_are_none():
        pytest.skip(f"no hosts can be made here: {reason}")
    made: list[Lan] = []

    def make(*names: str, **options) -> Lan:
        made.append(Lan(*names, **options))
        return made[-1]

    yield make
    for lan in made:
        lan.close()
