"""`StatusCollector`: answers AskStatus in the agent: brief (watch, metrics) itself, in full by forking `collect`.

    AskStatus ──► StatusCollector ── "brief" ──► <job's directory>/r<pid>, of each process that has called hvd.init()
                                  └─ in full: forks ── collect
    StatusTold ◄── what the worker answers, its processor time and memory, and the load of the host

A brief question costs no thread or process. A rank that does not answer it until the next one, since it is stopped or
its interpreter's lock is held, is told of without an answer. All reads are of /proc files that no other process can
block. A full answer may be blocked (by a hanging file system, a lock on another's memory), so it is left to a child of
the agent, which is killed after some seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
from collections.abc import Callable, Mapping
from typing import Any

from hvdlite_wire.job_contract import note_file
from hvdlite_wire.linux import stat_of
from hvdlite_wire.worker_status import HostUsage, OwnStatus

from ..protocol.channel import encode
from ..protocol.messages import AskStatus, StatusTold
from .collect import Questions, collect, read_own, status_of
from .host_load import HostLoad

_READ_BYTES = _MOST_BYTES = 1 << 16
_KILLED_AFTER_S = 4
_WHOLE = b"."  # after all frames of a child, whose last byte is another
_SOCKET = re.compile(r"r([0-9]+)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The numbers of fields in proc(5).
_PARENT, _USER_TIME, _SYSTEM_TIME, _RESIDENT_PAGES = 4, 14, 15, 24


class StatusCollector:
    """The questions that are being answered on this host: one that is brief, and any number in full."""

    def __init__(
        self, selector: selectors.BaseSelector, send: Callable[[StatusTold | bytes], object], load: HostLoad
    ) -> None:
        self._selector = selector
        self._send = send
        self.load = load
        self._usage: HostUsage | None = None  # what is told of the host with the next worker
        self._number = 0
        self._job_dir = ""
        self._questions = Questions(b"brief", selector, self._answered, _MOST_BYTES)
        self._silent: dict[int, int] = {}  # the pids of workers that have not answered, by their numbers
        self._unanswered: set[int] = set()  # the pids that this question was for, as long as they have not answered
        self._workers: dict[int, int] = {}  # the workers' numbers by their own pids, and by those that have answered

    def ask(self, question: AskStatus, workers: Mapping[int, int], job_dir: str) -> None:
        """Sends a `StatusTold` for each of the workers, given as pids by their numbers; returns at once.

        In full, it sends none where this host is out of files or processes.
        """
        if question.in_full:
            self._fork(question.number, workers, job_dir)
            return
        self._give_up()
        self._job_dir = job_dir
        self._usage = self.load.usage()
        self._number, self._silent, self._unanswered = question.number, dict(workers), set()
        self._workers.update((pid, worker) for worker, pid in workers.items())
        names: list[str] = []
        with contextlib.suppress(OSError):  # this process can open no more files
            names = os.listdir(job_dir)
        for name in names:
            if (found := _SOCKET.fullmatch(name)) and self._questions.ask(pid := int(found[1]), f"{job_dir}/{name}"):
                self._unanswered.add(pid)
        if not self._questions.open:
            self._tell_silent()

    def note_end(self, worker: int, pid: int, path: str) -> None:
        """Sends what a worker that has ended wrote to this file of how far it had come, if it did.

        ``usage`` has the bytes over the network until now.
        """
        self._silent.pop(worker, None)
        self._workers = {each: number for each, number in self._workers.items() if number != worker}
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                own = read_own(file.read(_MOST_BYTES))
            os.unlink(path)
            self._tell(worker, pid, 0, own or OwnStatus(), can_answer=True, usage=self.load.network())

    def _answered(self, pid: int, own: OwnStatus | None) -> None:
        self._unanswered.discard(pid)
        if own is not None and self._silent.pop(own.worker, None) is not None:
            self._workers[pid] = own.worker
            self._tell_next(own.worker, pid, own, can_answer=True)
        if not self._questions.open:
            self._tell_silent()

    def _give_up(self) -> None:
        self._questions.give_up()
        self._tell_silent()

    def _tell_silent(self) -> None:
        can_answer = set(map(self._worker_of, self._unanswered))
        silent, self._silent = self._silent, {}
        for worker, pid in silent.items():
            self._tell_next(worker, pid, None, can_answer=worker in can_answer)

    def _worker_of(self, pid: int) -> int | None:
        """Returns the worker that this process has named, or else the one that it descends from; None if neither."""
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in self._workers:
            stat = stat_of(ancestor)
            ancestor = None if stat is None else stat[_PARENT] or None
        return None if ancestor is None else self._workers[ancestor]

    def _tell_next(self, worker: int, pid: int, own: OwnStatus | None, *, can_answer: bool) -> None:
        """Tells of one more worker, and with the first of what the host has to do."""
        usage, self._usage = self._usage, None
        self._tell(worker, pid, self._number, own, can_answer=can_answer, usage=usage)

    def _tell(self, worker: int, pid: int, number: int, own: OwnStatus | None, **known: Any) -> None:
        stat = stat_of(pid)  # None if it has ended, or there is no /proc
        status = status_of(
            worker,
            own,
            **known,
            pid=pid,
            cpu_s=0.0 if stat is None else (stat[_USER_TIME] + stat[_SYSTEM_TIME]) / _TICKS_PER_S,
            memory=0 if stat is None else stat[_RESIDENT_PAGES] * _PAGE_BYTES,
            gpu_use=self.load.gpu_use(pid),
            is_ending=own is None and os.path.exists(note_file(self._job_dir, worker, "progress")),
        )
        self._send(StatusTold(worker, number, False, status))

    # -- in full

    def _fork(self, number: int, workers: Mapping[int, int], job_dir: str) -> None:
        if not workers:
            return
        try:
            reads, writes = os.pipe()
        except OSError:
            return
        try:
            pid = os.fork()
        except OSError:
            os.close(reads)
            os.close(writes)
            return
        if pid == 0:
            _be_child(writes, number, workers, job_dir)
        os.close(writes)
        os.set_blocking(reads, False)
        frames = bytearray()

        def read() -> None:
            data = os.read(reads, _READ_BYTES)
            frames.extend(data)
            if not data:
                self._selector.unregister(reads)
                os.close(reads)
                if frames.endswith(_WHOLE):
                    self._send(bytes(frames[: -len(_WHOLE)]))

        self._selector.register(reads, selectors.EVENT_READ, read)


def _be_child(writes: int, number: int, workers: Mapping[int, int], job_dir: str) -> None:
    """Collects in a child of the agent, and ends it."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_KILLED_AFTER_S)
        told = (StatusTold(worker, number, True, status) for worker, status in collect(workers, job_dir).items())
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(b"".join(map(encode, told)) + _WHOLE)
    finally:
        os._exit(0)
