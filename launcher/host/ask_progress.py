"""`Progress`: finds out how far the workers of one host are, without any thread or process of its own.

    AskProgress ──► Progress ── "brief" ──► <job's directory>/r<pid>, of each process that has called hvd.init()
    Progressed  ◄── JSON: processor time, memory, what the worker answers, and the load of the host

A rank that does not answer until the next question, since it is stopped or its interpreter's lock is held, is told of
without an answer. All reads are of /proc files that no other process can block; `collect` finds out more, in a child.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite_wire.processes import stat_of

from ..plan.worker_environment import progress_file
from ..wire.messages import Progressed
from .host_load import HostLoad

_READ_BYTES = 1 << 14
_MOST_BYTES = 1 << 16
_SOCKET = re.compile(r"r([0-9]+)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The numbers of fields in proc(5).
_PARENT, _USER_TIME, _SYSTEM_TIME, _RESIDENT_PAGES = 4, 14, 15, 24


@dataclass
class _AskedProcess:
    """A process that was asked. Its worker is known once it has answered."""

    pid: int
    connection: socket.socket
    answer: bytearray = field(default_factory=bytearray)


class Progress:
    """The question that is being answered on this host."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Progressed], None], load: HostLoad) -> None:
        """``selector``: the data of each registration is a function without arguments, which the event loop calls."""
        self._selector = selector
        self._send = send
        self.load = load
        self._host: dict[str, object] = {}  # what is told of the host with the next worker
        self._number = 0
        self._job_dir = ""
        self._asked: list[_AskedProcess] = []
        self._silent: dict[int, int] = {}  # the pids of workers that have not answered, by their numbers
        self._unanswered: set[int] = set()  # the pids that this question was for, as long as they have not answered
        self._workers: dict[int, int] = {}  # the workers' numbers by their own pids, and by those that have answered

    def take(self, number: int, workers: Mapping[int, int], job_dir: str) -> None:
        """Sends a `Progressed` for each of the workers, given as pids by their numbers; returns at once.

        ``facts`` is JSON: ``pid`` of the process that has answered, or else the worker's own, ``cpu_s`` and ``memory``
        (bytes) of that process, ``gpu``, the part of the time in which its GPU computes, if that is known, and
        ``answer``, None if there is none. ``can_answer``: whether a process of this worker has called hvd.init(), and
        has not ended. ``is_ending``: it has left its note of how far it has come, and does not answer any more. The
        first one has ``host``, see `HostLoad.facts`.
        """
        self._give_up()
        self._job_dir = job_dir
        self._host = self.load.facts()
        self._number, self._silent, self._unanswered = number, dict(workers), set()
        self._workers.update((pid, worker) for worker, pid in workers.items())
        for name in _names_in(job_dir):
            if found := _SOCKET.fullmatch(name):
                self._ask(int(found[1]), os.path.join(job_dir, name))
        if not self._asked:
            self._tell_silent()

    def note_end(self, worker: int, pid: int, path: str) -> None:
        """Sends what a worker that has ended wrote to this file of how far it had come, if it did.

        ``host`` has the bytes over the network until now.
        """
        self._silent.pop(worker, None)
        self._workers = {each: number for each, number in self._workers.items() if number != worker}
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                answer = _parsed(file.read(_MOST_BYTES))
            os.unlink(path)
            self._tell(worker, pid, 0, answer, can_answer=True, host=self.load.network())

    def _ask(self, pid: int, path: str) -> None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # this process can open no more files
            self._unanswered.add(pid)
            return
        connection.setblocking(False)
        try:
            connection.connect(path)
            connection.sendall(b"brief")
        except BlockingIOError:  # so many questions wait for it that it takes no more
            connection.close()
            self._unanswered.add(pid)
            return
        except OSError:  # it has ended
            connection.close()
            return
        self._unanswered.add(pid)
        asked = _AskedProcess(pid, connection)
        self._asked.append(asked)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(asked))

    def _read(self, asked: _AskedProcess) -> None:
        try:
            data = asked.connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        asked.answer += data
        if data and len(asked.answer) <= _MOST_BYTES:
            return
        self._close(asked)
        self._unanswered.discard(asked.pid)
        answer = _parsed(asked.answer)
        worker = answer.get("worker")
        if isinstance(worker, int) and self._silent.pop(worker, None) is not None:
            self._workers[asked.pid] = worker
            self._tell(worker, asked.pid, self._number, answer, can_answer=True)
        if not self._asked:
            self._tell_silent()

    def _close(self, asked: _AskedProcess) -> None:
        self._asked.remove(asked)
        self._selector.unregister(asked.connection)
        asked.connection.close()

    def _give_up(self) -> None:
        for asked in list(self._asked):
            self._close(asked)
        self._tell_silent()

    def _tell_silent(self) -> None:
        can_answer = set(map(self._worker_of, self._unanswered))
        silent, self._silent = self._silent, {}
        for worker, pid in silent.items():
            self._tell(worker, pid, self._number, None, can_answer=worker in can_answer)

    def _worker_of(self, pid: int) -> int | None:
        """Returns the worker that this process has named, or else the one that it descends from; None if neither."""
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in self._workers:
            ancestor = _parent_of(ancestor)
        return None if ancestor is None else self._workers[ancestor]

    def _tell(
        self,
        worker: int,
        pid: int,
        number: int,
        answer: dict[str, Any] | None,
        *,
        can_answer: bool,
        host: Mapping[str, object] | None = None,
    ) -> None:
        cpu_s, memory = _usage(pid)
        facts: dict[str, object] = {
            "pid": pid,
            "cpu_s": cpu_s,
            "memory": memory,
            "answer": answer,
            "can_answer": can_answer,
            "is_ending": answer is None and os.path.exists(progress_file(self._job_dir, worker)),
        }
        if (gpu := self.load.gpu_use(pid)) is not None:
            facts["gpu"] = gpu
        if host is None:
            host, self._host = self._host, {}
        if host:
            facts["host"] = host
        self._send(Progressed(worker, number, json.dumps(facts)))


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # this process can open no more files
        return []


def _usage(pid: int) -> tuple[float, int]:
    """Returns a process' seconds of processor time and bytes of memory; zeros if it has ended or there is no /proc."""
    if (stat := stat_of(pid)) is None:
        return 0.0, 0
    return (stat[_USER_TIME] + stat[_SYSTEM_TIME]) / _TICKS_PER_S, stat[_RESIDENT_PAGES] * _PAGE_BYTES


def _parent_of(pid: int) -> int | None:
    """Returns the process' parent; None if it has none, has ended, or there is no /proc."""
    stat = stat_of(pid)
    return None if stat is None else stat[_PARENT] or None


def _parsed(answer: bytes | bytearray) -> dict[str, Any]:
    try:
        parsed = json.loads(answer)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
