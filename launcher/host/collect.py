"""Only for reports, in a forked child: asks a host's workers for their stacks, or signals them; describes processes.

    status_collector ── forks ── collect: asks each worker's process, or signals it ──► WorkerStatus of each

A worker that has called hvd.init() answers on a socket in the job's directory (`hvdlite.runtime.hang_report`). If it
does not within a second, its interpreter's lock is held: a signal then has its stacks written to a file there, as for a
worker that has only imported torch. Of any other program there is only what the system says of its processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdlite_wire.codec import MessageError, decode
from hvdlite_wire.job_contract import STACKS_SIGNAL, note_file, report_socket, stacks_file
from hvdlite_wire.worker_status import Frame, OwnStatus, Process, Source, Thread, WorkerStatus

from ..system.process_tree import handles
from .nccl_view import nccl_view

if TYPE_CHECKING:
    import psutil

_ANSWERS_WITHIN_S = 1.0
_STACKS_WITHIN_S = 1.0
_QUIET_S = 0.1
_READ_BYTES = 1 << 16
_MOST_BYTES = 300_000
_MOST_PROCESSES = 40
_RUN_NO_HANDLER = ("stopped", "tracing-stop", "zombie")
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])?.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line ([0-9]{1,9}|\?\?\?) in (.*)')


@dataclass(eq=False)
class Questions:
    """Questions to processes that have called hvd.init(), each on a connection of its own; no call blocks.

    ``what`` is asked, also by `status_collector` in the agent. ``on_answer`` is called with the pid; None if a process
    has ended, or said nonsense, as an answer of more than ``most_bytes`` is. ``open`` are the connections to processes
    that have not answered, by pid.
    """

    what: bytes
    selector: selectors.BaseSelector
    on_answer: Callable[[int, OwnStatus | None], object]
    most_bytes: int
    open: dict[int, socket.socket] = field(default_factory=dict)

    def ask(self, pid: int, path: str) -> bool:
        """Asks the process with this socket; returns False if it has ended.

        Where this process can open no more files, or so many questions wait that the other takes no more, nothing is
        asked.
        """
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            return True
        connection.setblocking(False)
        try:
            connection.connect(path)
            connection.sendall(self.what)
        except OSError as error:
            connection.close()
            return isinstance(error, BlockingIOError)
        self.open[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, partial(self._read, pid, connection, bytearray()))
        return True

    def give_up(self) -> None:
        for pid in list(self.open):
            self._close(pid)

    def _read(self, pid: int, connection: socket.socket, answer: bytearray) -> None:
        if self.open.get(pid) is not connection:  # it was closed after this round's `select`
            return
        try:
            data = connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        answer += data
        if not data or len(answer) > self.most_bytes:
            self._close(pid)
            self.on_answer(pid, None if data else read_own(answer))

    def _close(self, pid: int) -> None:
        connection = self.open.pop(pid)
        self.selector.unregister(connection)
        connection.close()


def read_own(answer: bytes | bytearray) -> OwnStatus | None:
    """Returns what a process has said of itself; None if it is nonsense."""
    try:
        return decode(OwnStatus, bytes(answer))
    except MessageError:
        return None


def status_of(worker: int, own: OwnStatus | None, **known: Any) -> WorkerStatus:
    """Returns the status of a worker that has said this of itself, with what is ``known`` of it besides."""
    if own is not None:
        known["source"] = Source.ANSWER
    return WorkerStatus(**{**vars(own or OwnStatus()), **known, "worker": worker})


def collect(workers: Mapping[int, int], job_dir: str) -> dict[int, WorkerStatus]:
    """Returns what can be found out about each of the workers, given as pids by their numbers, within three seconds."""
    processes = _processes_of_all(workers)
    can_answer = _outermost(processes, partial(report_socket, job_dir))
    answers = _answers_of({pid: report_socket(job_dir, pid) for pid in can_answer.values()})
    # Those that have imported torch, and not called hvd.init().
    asked = {**_outermost(processes, partial(stacks_file, job_dir)), **can_answer}
    states = {each.pid: each.state for found in processes.values() for each in found}
    silent = [pid for pid in asked.values() if pid not in answers and states[pid] not in _RUN_NO_HANDLER]
    begins = _have_stacks_written({pid: stacks_file(job_dir, pid) for pid in silent})
    load = round(os.getloadavg()[0], 2)
    nccl_pid, nccl = nccl_view(can_answer.values()) or (None, ())
    found: dict[int, WorkerStatus] = {}
    for worker, own_pid in workers.items():
        pid = asked.get(worker, own_pid)
        own = answers.get(pid)
        found[worker] = status_of(
            worker,
            own,
            **(_stacks(stacks_file(job_dir, pid), begins[pid]) if pid in begins else {}),
            pid=pid,
            processes=tuple(processes[worker]),
            can_answer=worker in can_answer,
            is_ending=worker in asked and own is None and os.path.exists(note_file(job_dir, worker, "progress")),
            load=load,
            cores=os.cpu_count(),
            nccl=nccl if pid == nccl_pid else (),
        )
    return found


def _outermost(processes: Mapping[int, Sequence[Process]], file_of: Callable[[int], str]) -> dict[int, int]:
    """Returns the pid of the outermost process of each worker that has such a file."""
    return {
        worker: each.pid
        for worker, found in processes.items()
        for each in found[::-1]  # the outermost is the last to be set
        if os.path.exists(file_of(each.pid))
    }


def _processes_of_all(workers: Mapping[int, int]) -> dict[int, list[Process]]:
    """Returns what the system says of each worker's process and its descendants, the outermost first."""
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    # The system's processes are read once for all workers: there may be hundreds, and as many workers.
    children: dict[int, list[psutil.Process]] = {}
    # Not by `process_iter`, which keeps processes: of one whose number another has by now it knows no parent.
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            children.setdefault(process.ppid(), []).append(process)
    found: dict[int, list[Process]] = {}
    for worker, pid in workers.items():
        processes: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [psutil.Process(pid)]
            for process in processes:  # which grows
                processes += children.get(process.pid, ())
                if len(processes) >= _MOST_PROCESSES:
                    break
        found[worker] = list(filter(None, map(_described, processes[:_MOST_PROCESSES])))
    return found


def _described(process: psutil.Process) -> Process | None:
    import psutil  # noqa: PLC0415  # as above

    with contextlib.suppress(psutil.Error, OSError), process.oneshot():
        times = process.cpu_times()
        command = ""  # of one that has ended and is not reaped, none is known
        with contextlib.suppress(psutil.ZombieProcess):
            command = " ".join(process.cmdline())[:200]
        cpu_s, memory = round(times.user + times.system, 2), process.memory_info().rss
        return Process(process.pid, process.name(), process.status(), cpu_s, memory, command)
    return None


def _answers_of(sockets: Mapping[int, str]) -> dict[int, OwnStatus]:
    """Returns what the processes with these sockets answer in time, by their pids."""
    answers: dict[int, OwnStatus | None] = {}
    with selectors.DefaultSelector() as selector:
        questions = Questions(b"report", selector, answers.__setitem__, _MOST_BYTES)
        for pid, path in sockets.items():
            questions.ask(pid, path)
        until = time.monotonic() + _ANSWERS_WITHIN_S
        while questions.open and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                key.data()
        questions.give_up()
    return {pid: own for pid, own in answers.items() if own is not None}


def _have_stacks_written(files: Mapping[int, str]) -> dict[int, int]:
    """Signals the processes, and waits until what they write to their files has come to an end.

    Returns the sizes of the files before.
    """
    begins: dict[int, int] = {}
    waiting = []
    for pid, path in files.items():
        with contextlib.suppress(OSError):
            begins[pid] = os.path.getsize(path)
            # It may have become another program since, which the signal would end.
            if handles(pid, STACKS_SIGNAL):
                os.kill(pid, STACKS_SIGNAL)
                waiting.append(pid)
    sizes = dict.fromkeys(waiting, -1)
    until = time.monotonic() + _STACKS_WITHIN_S
    while waiting and time.monotonic() < until:
        time.sleep(_QUIET_S)
        before, sizes = sizes, dict.fromkeys(waiting, -1)
        for pid in waiting:
            with contextlib.suppress(OSError):  # it was removed meanwhile
                sizes[pid] = os.path.getsize(files[pid])
        waiting = [pid for pid in waiting if sizes[pid] != before[pid] or sizes[pid] == begins[pid]]
    return begins


def _stacks(path: str, begin: int) -> dict[str, Any]:
    """Returns what a process has written of its threads, as fields of `WorkerStatus`; none if it has not."""
    try:
        with open(path, "rb") as file:
            libraries = file.readline(_READ_BYTES)
            # Of very many threads the last are kept, one of which is the main thread.
            file.seek(max(begin, len(libraries), os.fstat(file.fileno()).st_size - _MOST_BYTES))
            written = file.read(_MOST_BYTES)
    except OSError:
        return {}
    # Of other bytes than ASCII, which faulthandler does not write, JSON might have six times as many.
    first, rest = (re.sub(rb"[^\n -~]", b"?", each).decode("ascii") for each in (libraries, written))
    return read_stacks(first, rest) if rest else {}


def read_stacks(first: str, written: str) -> dict[str, Any]:
    """Returns fields of `WorkerStatus` for what faulthandler wrote, after a ``first`` line of JSON about libraries."""
    try:
        libraries = [each for each in json.loads(first)["libraries"] if each and isinstance(each, str)]
    except (ValueError, LookupError, TypeError, RecursionError):
        libraries = []
    stacks: list[tuple[str, list[Frame]]] = []
    for line in written.split("\n"):
        if head := _THREAD.match(line):
            stacks.append((head[2] or f"thread {head[1]}", []))
        elif stacks and (found := _FRAME.match(line)):
            stacks[-1][1].append(Frame(found[1], 0 if found[2] == "???" else int(found[2]), found[3]))
    # The newest thread is written first, so the main thread is the last one.
    threads = [
        Thread(name, index == len(stacks) - 1, tuple(reversed(frames))) for index, (name, frames) in enumerate(stacks)
    ]
    return {"source": Source.SIGNAL, "threads": tuple(threads), "libraries": tuple(libraries)}
