"""The agent asks processes how far they are, over sockets in the job's directory, and never blocks."""

import errno
import json
import os
import selectors
import socket
import subprocess

import pytest
from hvdlite_launcher.host import collect as collecting
from hvdlite_launcher.host.status_collector import HostLoad, StatusCollector
from hvdlite_launcher.protocol.channel import Decoder, encode
from hvdlite_launcher.protocol.messages import AskStatus, StatusTold
from hvdlite_wire.codec import encode as encoded
from hvdlite_wire.worker_status import OwnStatus, Pace, Source
from hypothesis import given
from hypothesis import strategies as st
from no_files import no_files_left


class Host:
    """The asking end in a job's directory, with an event loop that runs until nothing more happens."""

    def __init__(self, directory):
        self.directory, self.told = directory, []
        self.selector = selectors.DefaultSelector()
        self.load = HostLoad(self.selector)
        self.collector = StatusCollector(self.selector, self.told.append, self.load)
        self.listeners = {}

    def listen(self, pid):
        listener = self.listeners[pid] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(self.directory, f"r{pid}"))
        listener.listen(1)

    def take(self, number, **workers):
        question = AskStatus(number, in_full=False)
        self.collector.ask(question, {int(name[1:]): pid for name, pid in workers.items()}, self.directory)

    def answer(self, pid, worker, **own):
        connection, _ = self.listeners[pid].accept()
        with connection:
            assert connection.recv(16) == b"brief"
            connection.sendall(encoded(OwnStatus(worker, **own)))
        for key, _ in self.selector.select(60):
            key.data()
        for key, _ in self.selector.select(0):
            key.data()

    def found(self):
        return {(each.worker, each.number): each.status for each in self.told}


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
    found = host.found()[0, 1]
    assert found.memory > 1 << 20
    assert found.cpu_s > 0
    assert (found.pid, found.source, found.can_answer) == (os.getpid(), Source.NONE, False)


def test_an_answer_names_its_worker_and_the_others_are_told_of_then(host):
    host.listen(os.getpid())
    host.take(4, w0=1, w7=1)
    assert host.told == []
    host.answer(os.getpid(), 7, steps={"optimizer 1": 3})
    found = host.found()
    assert found[7, 4].steps == {"optimizer 1": 3}
    assert (found[7, 4].pid, found[7, 4].source) == (os.getpid(), Source.ANSWER)
    assert found[0, 4].source is Source.NONE


def test_one_that_is_silent_is_told_of_with_the_next_question(host):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid())
    assert host.told == []
    host.take(2, w0=os.getpid())
    assert host.found()[0, 1].can_answer
    assert host.found()[0, 1].source is Source.NONE
    for number in range(3, 40):  # more than are let wait for an answer
        host.take(number, w0=os.getpid())
    assert [each.number for each in host.told] == list(range(1, len(host.told) + 1))
    # Also once so many questions wait that it takes no more: the last is told of at once.
    assert len(host.told) == 39
    assert all(found.can_answer for found in host.found().values())


def test_an_answer_that_comes_with_the_next_question_leaves_the_new_connection_open(host):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid())
    with host.listeners[os.getpid()].accept()[0] as connection:
        connection.sendall(encoded(OwnStatus(0)))
    ready = host.selector.select(60)
    host.take(2, w0=os.getpid())  # it came first in the same round
    for key, _ in ready:
        key.data()
    host.answer(os.getpid(), 0)
    assert host.found()[0, 2].source is Source.ANSWER


def test_long_names_of_optimizers_and_phases_are_cut(host):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid())
    host.answer(os.getpid(), 0, steps={"n" * 1000: 3}, paces=(Pace(0, 0.5, "p" * 1000),))
    found = host.found()[0, 1]
    assert found.steps == {"n" * 200: 3}
    assert found.paces == (Pace(0, 0.5, "p" * 200),)


def test_one_that_has_left_its_note_and_does_not_answer_is_ending(host):
    host.listen(os.getpid())
    with open("worker.0.progress", "w") as file:
        file.write("{}")
    host.take(1, w0=os.getpid(), w1=1)
    host.answer(os.getpid(), 0)
    host.take(2, w0=os.getpid(), w1=1)
    host.take(3, w0=os.getpid(), w1=1)
    told = {key: found.is_ending for key, found in host.found().items()}
    assert told == {(0, 1): False, (1, 1): False, (0, 2): True, (1, 2): False}


def test_a_worker_that_has_not_called_init_is_not_silent_because_another_one_is(host):
    host.listen(os.getpid())
    host.take(1, w0=os.getpid(), w1=1)
    host.take(2, w0=os.getpid(), w1=1)
    assert [host.found()[worker, 1].can_answer for worker in (0, 1)] == [True, False]


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
    assert [host.found()[worker, 1].can_answer for worker in (0, 1)] == [True, False]
    host.listeners[child].accept()[0].close()
    host.answer(child, 1)
    host.take(3, **workers)
    host.take(4, **workers)
    assert [host.found()[worker, 3].can_answer for worker in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    "answer", [b"", b"\xff", b"[]", b'{"worker": 0}', encoded(OwnStatus(99)), b"[" * 60_000, b"x" * 100_000]
)
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
    assert host.found()[0, 1].source is Source.NONE


def test_a_socket_that_its_process_has_left_is_no_obstacle(host):
    host.listen(4)
    host.listeners[4].close()
    host.take(1, w0=os.getpid())
    assert not host.found()[0, 1].can_answer


def test_what_a_worker_noted_at_its_end_is_told_and_removed(host, tmp_path):
    (tmp_path / "note").write_bytes(encoded(OwnStatus(0, {"optimizer 1": 8})))
    host.collector.note_end(0, 4, "note")
    assert host.found()[0, 0].steps == {"optimizer 1": 8}
    assert not (tmp_path / "note").exists()
    host.collector.note_end(1, 4, "note")
    assert len(host.told) == 1


def test_the_end_of_a_worker_is_told_with_the_bytes_over_the_network_until_then(host, tmp_path):
    host.load.follow("lo")
    (tmp_path / "note").write_bytes(encoded(OwnStatus(0)))
    host.collector.note_end(0, 4, "note")
    assert host.found()[0, 0].usage.sent is not None


def test_an_agent_that_can_open_no_more_files_asks_nobody_and_goes_on(host):
    host.listen(os.getpid())
    with no_files_left():
        host.take(1, w0=os.getpid())
    host.take(2, w0=os.getpid())
    host.answer(os.getpid(), 0, steps={"optimizer 1": 3})
    assert host.found()[0, 2].steps == {"optimizer 1": 3}


# What a rank may say instead: values of every kind, most of them in the places of the right ones.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)
RIGHT = json.loads(encoded(OwnStatus(0)))


@given(st.lists(JSON, max_size=12) | st.tuples(st.integers(0, 10), JSON))
def test_whatever_a_rank_says_the_launcher_can_read_what_its_host_tells(said):
    if isinstance(said, tuple):
        said = [*RIGHT[: said[0]], said[1], *RIGHT[said[0] + 1 :]]
    own = collecting.read_own(json.dumps(said).encode())
    told = StatusTold(0, 1, True, collecting.status_of(0, own, can_answer=True))
    assert list(Decoder().feed(encode(told))) == [told]


def fail_to_fork() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("lacks", ["files", "processes"])
def test_a_host_without_files_or_processes_for_a_report_goes_on_without_it(host, monkeypatch, lacks):
    before = os.listdir("/proc/self/fd")
    if lacks == "files":
        with no_files_left():
            host.collector.ask(AskStatus(1, in_full=True), {0: os.getpid()}, ".")
    else:
        monkeypatch.setattr(os, "fork", fail_to_fork)
        host.collector.ask(AskStatus(1, in_full=True), {0: os.getpid()}, ".")
    assert not host.selector.get_map()
    assert os.listdir("/proc/self/fd") == before


def test_a_report_comes_from_a_child_and_all_of_it_at_once(host, child):
    host.collector.ask(AskStatus(3, in_full=True), {0: child, 1: 1}, ".")
    while host.selector.get_map():
        for key, _ in host.selector.select(60):
            key.data()
    (frames,) = host.told
    told = list(Decoder().feed(frames))
    assert [(each.worker, each.number, each.in_full) for each in told] == [(0, 3, True), (1, 3, True)]
    assert [each.pid for each in told[0].status.processes] == [child]
