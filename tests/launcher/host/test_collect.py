"""What is found out about many workers of a host: real processes, whose answers the test gives."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hvdlite_launcher.host.collect import collect

RANKS = 64


class Ranks:
    """Processes with a child each, in whose place a thread answers with ``answer``; it counts who asks."""

    def __init__(self, directory: Path, count: int, answer: bytes) -> None:
        self.asked: list[bytes] = []
        self.processes = [
            subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000"], start_new_session=True) for _ in range(count)
        ]
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
            process.wait()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # a short one, since it is part of sockets' addresses
        yield Path(path)


def test_many_ranks_are_each_asked_once_and_the_systems_processes_are_read_once(directory, monkeypatch):
    frames = [["/usr/lib/python3/library.py", line, "function"] for line in range(200)]
    answer = {"libraries": [], "threads": [{"name": "t", "is_main": True, "frames": frames}] * 10}
    ranks = Ranks(directory, RANKS, json.dumps(answer).encode())
    read = []
    every = psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda: read.append(1) or every())
    monkeypatch.setattr(psutil.Process, "children", None)  # which reads all of them for each process
    try:
        facts = collect({worker: process.pid for worker, process in enumerate(ranks.processes)}, str(directory))
    finally:
        ranks.close()
    assert len(read) == 1
    assert ranks.asked == [b"report"] * RANKS
    assert [each["answer"] for each in facts.values()] == [answer] * RANKS
    for worker, process in enumerate(ranks.processes):
        own, child = facts[worker]["processes"]
        assert (facts[worker]["pid"], own["pid"]) == (process.pid, process.pid)
        assert (own["name"], child["name"]) == ("sleep", "sleep")


def test_a_worker_that_has_ended_leaves_the_others_facts_as_they_are(directory):
    ranks = Ranks(directory, 1, b"{}")
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        facts = collect({0: gone.pid, 1: ranks.processes[0].pid}, str(directory))
    finally:
        ranks.close()
    assert (facts[0]["processes"], facts[0]["can_answer"], facts[0]["answer"]) == ([], False, None)
    assert len(facts[1]["processes"]) == 2
    assert facts[1]["answer"] == {}
