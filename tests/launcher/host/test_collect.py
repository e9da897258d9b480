"""What is found out about many workers of a host: real processes, whose answers the test gives."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hvdlite_launcher.host import collect as collecting
from hvdlite_launcher.host.collect import collect, read_stacks, status_of
from hvdlite_launcher.protocol.channel import FROM_AGENT, Decoder
from hvdlite_launcher.protocol.channel import encode as frame_of
from hvdlite_launcher.protocol.messages import StatusTold
from hvdlite_wire.codec import encode
from hvdlite_wire.worker_status import Frame, OwnStatus, Source, Thread

RANKS = 64


class Ranks:
    """Processes with a child each, in whose place a thread answers with ``answer``; it counts who asks.

    Without ``answer`` it closes the connection as the end of a process does that has not read the question.
    """

    def __init__(self, directory: Path, count: int, answer: bytes | None) -> None:
        self.asked: list[bytes] = []
        self.processes = [
            subprocess.Popen(
                ["sh", "-c", "sleep 1000 & echo; exec cat"],
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(count)
        ]
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.readline()  # its child is there
        self._answer = answer
        self._selector = selectors.DefaultSelector()
        for process in self.processes:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(directory / f"r{process.pid}"))
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ)
        self._ends, self._end = socket.socketpair()
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ends:
                    return
                assert isinstance(key.fileobj, socket.socket)
                connection, _ = key.fileobj.accept()
                with connection:
                    if self._answer is None:
                        connection.recv(16, socket.MSG_PEEK)
                        continue
                    self.asked.append(connection.recv(16))
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._end.send(b"x")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._end.close()
        for process in self.processes:
            os.killpg(process.pid, 9)
            process.communicate()


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    # Both waits end as soon as all is there, which takes a busy machine longer than a report may take.
    monkeypatch.setattr(collecting, "_ANSWERS_WITHIN_S", 60.0)
    monkeypatch.setattr(collecting, "_STACKS_WITHIN_S", 60.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # a short one, since it is part of sockets' addresses
        yield Path(path)


def test_many_ranks_are_each_asked_once_and_the_systems_processes_are_read_once(directory, monkeypatch):
    frames = tuple(Frame("/usr/lib/python3/library.py", line, "function") for line in range(200))
    threads = (Thread("t", True, frames),) * 10
    ranks = Ranks(directory, RANKS, encode(OwnStatus(threads=threads)))
    read = []
    every = psutil.pids
    monkeypatch.setattr(psutil, "pids", lambda: read.append(1) or every())
    monkeypatch.setattr(psutil.Process, "children", None)  # which reads all of them for each process
    try:
        facts = collect({worker: process.pid for worker, process in enumerate(ranks.processes)}, str(directory))
    finally:
        ranks.close()
    assert len(read) == 1
    assert ranks.asked == [b"report"] * RANKS
    assert [each.threads for each in facts.values()] == [threads] * RANKS
    for worker, process in enumerate(ranks.processes):
        own, child = facts[worker].processes
        assert (facts[worker].worker, facts[worker].pid, own.pid) == (worker, process.pid, process.pid)
        assert own.pid != child.pid


def test_a_worker_that_has_ended_leaves_the_others_facts_as_they_are(directory):
    ranks = Ranks(directory, 1, encode(OwnStatus()))
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        facts = collect({0: gone.pid, 1: ranks.processes[0].pid}, str(directory))
    finally:
        ranks.close()
    assert (facts[0].processes, facts[0].can_answer, facts[0].source) == ((), False, Source.NONE)
    assert len(facts[1].processes) == 2
    assert facts[1].source is Source.ANSWER


def test_a_process_that_ends_while_it_is_asked_leaves_the_others_facts_as_they_are(directory):
    ending, staying = Ranks(directory, 1, None), Ranks(directory, 1, encode(OwnStatus()))
    try:
        facts = collect({0: ending.processes[0].pid, 1: staying.processes[0].pid}, str(directory))
    finally:
        ending.close()
        staying.close()
    assert (facts[0].can_answer, facts[0].source) == (True, Source.NONE)
    assert facts[1].source is Source.ANSWER


def test_a_worker_that_has_ended_and_is_not_reaped_is_described_as_a_zombie(directory):
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    try:
        (described,) = collect({0: ended.pid}, str(directory))[0].processes
    finally:
        ended.wait()
    assert (described.pid, described.state, described.command) == (ended.pid, "zombie", "")


# Reaches its line, which says so, and stays there, in the part of a process that a signal does not end.
STANDS = """
import os, sys
from hvdlite_launcher.host.worker_hooks import register
register()
if sys.argv[1] == "becomes another":
    os.execvp("sh", ["sh", "-c", "echo; read x"])
def load():
    print(flush=True); sys.stdin.readline()
load()
"""


def standing(how: str, directory: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "HVDLITE_JOB_DIR": str(directory), "HVDLITE_WORKER": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", STANDS, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_program_that_has_not_called_init_has_its_stacks_written_by_what_torch_has_registered(directory):
    process = standing("stays", directory)
    try:
        facts = collect({0: process.pid}, str(directory))[0]
        assert (facts.pid, facts.can_answer, facts.source) == (process.pid, False, Source.SIGNAL)
        assert facts.libraries
        assert Frame("<string>", 8, "load") in facts.threads[-1].frames
    finally:
        process.communicate()
    assert process.returncode == 0


def test_stacks_that_are_removed_while_they_are_written_leave_the_others_as_they_are(directory, monkeypatch):
    ending, staying = standing("stays", directory), standing("stays", directory)
    handles = collecting.handles

    def remove_first(pid: int, signum: int) -> bool:
        if pid == ending.pid:
            (directory / f"r{pid}.stacks").unlink()
        return handles(pid, signum)

    monkeypatch.setattr(collecting, "handles", remove_first)
    try:
        facts = collect({0: ending.pid, 1: staying.pid}, str(directory))
    finally:
        ending.communicate()
        staying.communicate()
    assert facts[0].source is Source.NONE
    assert Frame("<string>", 8, "load") in facts[1].threads[-1].frames


def test_a_process_that_has_become_another_program_is_not_ended_by_the_signal(directory):
    process = standing("becomes another", directory)
    try:
        assert (directory / f"r{process.pid}.stacks").exists()
        assert collect({0: process.pid}, str(directory))[0].source is Source.NONE
    finally:
        process.communicate()
    assert process.returncode == 1  # the end of its input ends `read`


def test_stacks_that_were_written_on_a_signal_are_read_with_the_main_thread_last():
    written = (
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/lib/threading.py", line 10 in wait\n'
        '  File "t.py", line 3 in work\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/lib/re.py", line 166 in match\n'
        '  File "t.py", line ??? in load\n'
        '  File "t.py", line 13 in <module>\n'
        "\nExtension modules: numpy.core (total: 1)\n"
    )
    stacks = read_stacks('{"libraries": ["/lib/"]}\n', written)
    assert stacks["source"] is Source.SIGNAL
    assert stacks["libraries"] == ("/lib/",)
    work = Thread("thread 0x00007f01", False, (Frame("t.py", 3, "work"), Frame("/lib/threading.py", 10, "wait")))
    main = (Frame("t.py", 13, "<module>"), Frame("t.py", 0, "load"), Frame("/lib/re.py", 166, "match"))
    assert stacks["threads"] == (work, Thread("thread 0x00007f02", True, main))


def test_of_very_many_threads_those_are_read_that_are_written_last(directory):
    thread = "Thread 0x1 (most recent call first):\n" + '  File "/lib/threading.py", line 10 in wait\n' * 100
    main = 'Thread 0x2 (most recent call first):\n  File "t.py", line 13 in <module>\n'
    (directory / "r1.stacks").write_text('{"libraries": ["/lib/"]}\n' + thread * 100 + main)
    found = collecting._stacks(str(directory / "r1.stacks"), 0)
    assert found["threads"][-1] == Thread("thread 0x2", True, (Frame("t.py", 13, "<module>"),))
    assert found["libraries"] == ("/lib/",)


@pytest.mark.parametrize("letter", [b"\xff", "é".encode(), b"\\"])
def test_whatever_is_in_a_file_of_stacks_the_launcher_can_read_what_is_told(directory, letter):
    line = b'  File "%s", line 1 in f\n' % (letter * 100)
    thread = b"Thread 0x1 (most recent call first):\n" + line * 1000
    (directory / "r1.stacks").write_bytes(b'{"libraries": []}\n' + thread * 10)
    found = collecting._stacks(str(directory / "r1.stacks"), 0)
    (told,) = Decoder(FROM_AGENT).feed(frame_of(StatusTold(0, 1, True, status_of(0, None, **found))))
    assert len(told.status.threads[-1].frames) == 1000


@pytest.mark.parametrize("first", ["", "{", "[]", "7", '{"libraries": 7}', '{"libraries": [7, ""]}', "[" * 100_000])
def test_of_stacks_that_are_nonsense_nothing_is_read(first):
    written = 'Thread 0x1 (most recent call first):\n  File "x", line 99999999999999999999 in f\nFile\n'
    assert read_stacks(first, written)["libraries"] == ()
    assert read_stacks(first, written)["threads"] == (Thread("thread 0x1", True, ()),)


def test_a_process_that_has_the_number_of_an_earlier_one_is_found(directory, monkeypatch):
    """As in a process that has looked at all of them before; numbers are given again after some ten thousand."""
    ranks = Ranks(directory, 1, encode(OwnStatus()))
    try:
        stale = [psutil.Process(each.pid) for each in psutil.Process(ranks.processes[0].pid).children()]
        for each in stale:
            monkeypatch.setattr(each, "is_running", lambda: False)
            monkeypatch.setattr(each, "ppid", lambda pid=each.pid: no_longer(pid))
        others = [each for each in psutil.process_iter() if each not in stale]
        monkeypatch.setattr(psutil, "process_iter", lambda: [*others, *stale])
        facts = collect({0: ranks.processes[0].pid}, str(directory))
    finally:
        ranks.close()
    assert len(facts[0].processes) == 2


def no_longer(pid: int) -> int:
    raise psutil.NoSuchProcess(pid, None, "process no longer exists and its PID has been reused")
