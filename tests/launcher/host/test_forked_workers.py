"""What the agent asks of a fork server, and what it does when that answers wrongly, late or not at all."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hvdlite_launcher.host import forked_workers
from hvdlite_launcher.host.forked_workers import ForkedWorkers
from hvdlite_launcher.host.worker_processes import Worker
from hvdlite_launcher.plan.python_command import parse_python
from no_files import no_files_left

COMMON = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
OWN = {"HVDLITE_WORKER": "3", "LOCAL_RANK": "1"}


class Host:
    """A `ForkedWorkers` whose server is played by the test, with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.started: list[Worker] = []
        self.anew: list[tuple[int, list[int]]] = []
        self.killed: list[tuple[int, int]] = []
        self.commands: list[list[str]] = []
        self.selector = selectors.DefaultSelector()
        self.workers = ForkedWorkers(self.selector, self.started.append, lambda: self.now_s)
        monkeypatch.setattr(forked_workers.subprocess, "Popen", self._popen)
        monkeypatch.setattr(forked_workers.os, "kill", lambda *what: self.killed.append(what))
        command = parse_python(["python", "-u", "train.py", "--lr", "1"], {})
        assert command is not None
        self.workers.start_soon(command, "/", COMMON)

    def _popen(self, command, *, pass_fds, **_) -> SimpleNamespace:
        self.commands.append(command)
        self.server = socket.socket(fileno=os.dup(pass_fds[0]))
        self.server.settimeout(60)
        reads, writes = os.pipe()
        self.output = os.fdopen(writes, "wb", buffering=0)
        return SimpleNamespace(pid=77, returncode=None, stdout=os.fdopen(reads, "rb", buffering=0))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.workers.tick()

    def answer(self, **answer: object) -> None:
        self.server.send(json.dumps(answer).encode())
        self.react()

    def react(self) -> None:
        for key, _ in self.selector.select(60):
            key.data()

    def be_ready(self) -> None:
        self.pass_time(self.workers.time_left_s() or 0)
        self.answer(ready=True)

    def ask(self, number: int = 3, **more: str) -> bool:
        environment = {**COMMON, **OWN, **more}
        return self.workers.ask(number, environment, lambda signals: self.anew.append((number, list(signals))))

    def take_request(self) -> tuple[dict[str, object], list[int]]:
        data, fds, *_ = socket.recv_fds(self.server, 1 << 16, 3)
        return json.loads(data), fds


@pytest.fixture
def host(monkeypatch) -> Iterator[Host]:
    made = Host(monkeypatch)
    yield made
    made.selector.close()


@pytest.fixture
def child() -> Iterator[int]:
    """Provides the pid of a child of this process that has not been reaped."""
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    yield pid
    os.waitpid(pid, 0)


def test_the_server_is_started_some_time_after_it_was_planned_and_answers_once_it_is_ready(host):
    assert host.commands == []
    assert not host.ask()
    host.pass_time(host.workers.time_left_s())
    ((interpreter, option, flag, _, first_path),) = host.commands
    assert (interpreter, option, flag, first_path) == ("python", "-u", "-c", "/")
    assert not host.ask()
    host.answer(ready=True)
    assert host.ask()


def test_a_forked_worker_gets_its_own_variables_and_pipes_and_begins_after_it_is_known(host, child):
    host.be_ready()
    host.ask()
    request, (stdout, stderr, go) = host.take_request()
    assert request["environment"] == OWN
    assert (request["program"], request["arguments"]) == ("train.py", ["--lr", "1"])
    host.answer(worker=3, pid=child)
    (worker,) = host.started
    assert (worker.number, worker.process.pid) == (3, child)
    assert os.read(go, 1) != b""
    for fd, stream in ((stdout, "stdout"), (stderr, "stderr")):
        os.write(fd, stream.encode())
        assert os.read(worker.pipes[stream].fileno(), 9) == stream.encode()


def test_a_worker_with_another_environment_than_the_server_is_not_forked(host):
    host.be_ready()
    assert not host.ask(OMP_NUM_THREADS="2")
    assert not host.ask(LD_PRELOAD="x")
    assert host.ask()


def test_an_agent_that_can_open_no_more_files_has_no_server(host):
    with no_files_left():
        host.pass_time(host.workers.time_left_s())
    assert host.commands == []
    assert not host.ask()


def test_where_the_server_cannot_set_itself_up_there_is_none(host, monkeypatch):
    def fail(*_, **__):
        raise subprocess.SubprocessError("Exception occurred in preexec_fn.")

    monkeypatch.setattr(forked_workers.subprocess, "Popen", fail)
    host.pass_time(10)
    assert not host.workers.is_ready
    assert host.workers.time_left_s() is None


def test_an_agent_that_can_open_no_more_files_asks_for_no_worker_of_its_server(host):
    host.be_ready()
    before = os.listdir("/proc/self/fd")
    with no_files_left():
        assert not host.ask()
    assert os.listdir("/proc/self/fd") == before
    assert host.ask()


def test_a_worker_that_the_server_declines_is_started_anew_with_the_signals_that_came_for_it(host):
    host.be_ready()
    host.ask()
    host.workers.keep_signal(3, signal.SIGTERM)
    host.workers.keep_signal(4, signal.SIGTERM)
    host.answer(worker=3, declined="")
    assert host.anew == [(3, [signal.SIGTERM])]
    assert host.ask(5)


def test_a_server_that_does_not_answer_in_time_is_killed_and_no_worker_of_it_begins(host):
    host.be_ready()
    host.ask(3)
    host.ask(4)
    _, (*_, go) = host.take_request()
    host.pass_time(host.workers.time_left_s())
    assert host.anew == [(3, []), (4, [])]
    assert host.killed == [(77, signal.SIGKILL)]
    assert os.read(go, 1) == b""
    assert not host.ask(5)


def test_a_pid_that_is_no_child_of_the_agent_is_not_believed(host):
    host.be_ready()
    host.ask()
    host.answer(worker=3, pid=1)
    assert host.anew == [(3, [])]


@pytest.mark.parametrize("is_reaped_first", [True, False])
def test_a_server_that_was_killed_is_started_once_more(host, is_reaped_first):
    host.be_ready()
    for number in (3, 4):
        host.ask(number)
        host.server.close()
        host.output.close()
        if not is_reaped_first:
            host.react()
        host.workers.reaped(77, -9)
        assert host.anew[-1] == (number, [])
        assert not host.ask(5)
        if number == 3:
            host.be_ready()
    assert len(host.commands) == 2
    assert host.workers.time_left_s() is None


def test_a_server_that_prints_or_declines_is_not_used(host):
    host.pass_time(host.workers.time_left_s())
    host.output.write(b"a warning")
    host.react()
    host.workers.reaped(77, -9)
    assert not host.ask()
    assert host.workers.time_left_s() is None


def test_a_server_that_cannot_import_torch_is_not_started_again(host):
    host.pass_time(host.workers.time_left_s())
    host.server.close()
    host.react()
    host.workers.reaped(77, 1)
    assert not host.ask()
    assert host.workers.time_left_s() is None
