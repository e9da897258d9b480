"""The agent asks processes how far they are, over sockets in the job's directory, and never blocks."""

import json
import os
import selectors
import socket
import subprocess

import pytest
from hvdlite_launcher.host.ask_progress import Progress
from hvdlite_launcher.host.host_load import HostLoad
from no_files import no_files_left


class Host:
    """The asking end in a job's directory, with an event loop that runs until nothing more happens."""

    def __init__(self, directory):
        self.directory, self.told = directory, []
        self.selector = selectors.DefaultSelector()
        self.load = HostLoad(self.selector)
        self.progress = Progress(self.selector, self.told.append, self.load)
        self.listeners = {}

    def listen(self, pid):
        listener = self.listeners[pid] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(self.directory, f"r{pid}"))
        listener.listen(1)

    def take(self, number, **workers):
        self.progress.take(number, {int(name[1:]): pid for name, pid in workers.items()}, self.directory)

    def answer(self, pid, data):
        connection, _ = self.listeners[pid].accept()
        with connection:
            assert connection.recv(16) == b"brief"
            connection.sendall(data)
        for key, _ in self.selector.select(60):
            key.data()
        for key, _ in self.selector.select(0):
            key.data()

    def facts(self):
        return {(each.worker, each.number): json.loads(each.facts) for each in self.told}


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    host = Host(".")
    yield host
    host.selector.close()
    for listener in host.listeners.values():
        listener.close()


def test_workers_that_cannot_answer_are_told_of_at_once(host):
    host.take(1, w0=os.getpid())
    facts = host.facts()[0, 1]
    assert facts["memory"] > 1 << 20
    assert facts["cpu_s"] > 0
    assert (facts["pid"], facts["answer"], facts["can_answer"]) == (os.getpid(), None, False)


def test_an_answer_names_its_worker_and_the_others_are_told_of_then(host):
    host.listen(os.getpid())
    host.take(4, w0=1, w7=1)
    assert host.told == []
    host.answer(os.getpid(), b'{"worker": 7, "steps": {"optimizer 1": 3}}')
    facts = host.facts()
    assert facts[7, 4]["answer"]["steps"] == {"optimizer 1": 3}
    assert facts[7, 4]["pid"] == os.getpid()
    assert facts[0, 4]["answer"] is None


def test_one_that_is_silent_is_told_of_with_the_next_question(host):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid())
    assert host.told == []
    host.take(2, w0=os.getpid())
    assert host.facts()[0, 1]["can_answer"] is True
    assert host.facts()[0, 1]["answer"] is None
    for number in range(3, 40):  # more than are let wait for an answer
        host.take(number, w0=os.getpid())
    assert [each.number for each in host.told] == list(range(1, len(host.told) + 1))
    # Also once so many questions wait that it takes no more: the last is told of at once.
    assert len(host.told) == 39
    assert all(facts["can_answer"] for facts in host.facts().values())


def test_one_that_has_left_its_note_and_does_not_answer_is_ending(host):
    host.listen(os.getpid())
    with open("worker.0.progress", "w") as file:
        file.write("{}")
    host.take(1, w0=os.getpid(), w1=1)
    host.answer(os.getpid(), b'{"worker": 0}')
    host.take(2, w0=os.getpid(), w1=1)
    host.take(3, w0=os.getpid(), w1=1)
    told = {key: facts["is_ending"] for key, facts in host.facts().items()}
    assert told == {(0, 1): False, (1, 1): False, (0, 2): True, (1, 2): False}


def test_a_worker_that_has_not_called_init_is_not_silent_because_another_one_is(host):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid(), w1=1)
    host.take(2, w0=os.getpid(), w1=1)
    assert [host.facts()[worker, 1]["can_answer"] for worker in (0, 1)] == [True, False]


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    process.kill()
    process.wait()


def test_a_silent_process_is_its_workers_as_it_has_said_or_else_by_descent(host, child):
    workers = {"w0": os.getpid(), "w1": 1}
    host.listen(child)
    host.take(1, **workers)
    host.take(2, **workers)
    assert [host.facts()[worker, 1]["can_answer"] for worker in (0, 1)] == [True, False]
    host.listeners[child].accept()[0].close()
    host.answer(child, b'{"worker": 1}')
    host.take(3, **workers)
    host.take(4, **workers)
    assert [host.facts()[worker, 3]["can_answer"] for worker in (0, 1)] == [False, True]


@pytest.mark.parametrize("answer", [b"", b"\xff", b"[]", b'{"worker": []}', b'{"worker": 99}', b"x" * 100_000])
def test_nonsense_is_no_answer(host, answer):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid())
    connection, _ = host.listeners[os.getpid()].accept()
    with connection:
        connection.setblocking(False)
        connection.send(answer)
    while host.selector.get_map():
        for key, _ in host.selector.select(60):
            key.data()
    assert host.facts()[0, 1]["answer"] is None


def test_a_socket_that_its_process_has_left_is_no_obstacle(host):
    host.listen(4)
    host.listeners[4].close()
    host.take(1, w0=os.getpid())
    assert host.facts()[0, 1]["can_answer"] is False


def test_what_a_worker_noted_at_its_end_is_told_and_removed(host, tmp_path):
    (tmp_path / "note").write_text('{"worker": 0, "steps": {"optimizer 1": 8}}')
    host.progress.note_end(0, 4, "note")
    assert host.facts()[0, 0]["answer"]["steps"] == {"optimizer 1": 8}
    assert not (tmp_path / "note").exists()
    host.progress.note_end(1, 4, "note")
    assert len(host.told) == 1


def test_the_end_of_a_worker_is_told_with_the_bytes_over_the_network_until_then(host, tmp_path):
    host.load.follow("lo")
    (tmp_path / "note").write_text('{"worker": 0}')
    host.progress.note_end(0, 4, "note")
    assert host.facts()[0, 0]["host"].keys() == {"sent", "received"}


def test_an_agent_that_can_open_no_more_files_asks_nobody_and_goes_on(host):
    host.listen(os.getpid())
    with no_files_left():
        host.take(1, w0=os.getpid())
    host.take(2, w0=os.getpid())
    host.answer(os.getpid(), b'{"worker": 0, "steps": {"optimizer 1": 3}}')
    assert host.facts()[0, 2]["answer"]["steps"] == {"optimizer 1": 3}
