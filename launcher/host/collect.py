"""Finds out what the workers of one host do, for a report on a job that stands still.

    TakeReport ──► Collector ── forks ── collect: asks each worker's processes, or signals them ── JSON ──► Reported

A worker that has called hvd.init() answers on a socket in the job's directory (`hvdlite.runtime.hang_report`). If it
does not within a second, its interpreter's lock is held: a signal then has its stacks written to a file there. So has
it those of a worker that has not called hvd.init() but imported torch. Of any other program there is only what the
system says of its processes.

A process that reads about others may be blocked by them (a hanging file system, a lock on their memory). So a child of
the agent does it, which is killed after some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

from ..plan.worker_environment import progress_file
from ..wire.messages import Reported
from .stacks_on_signal import STACKS_SIGNAL

_ANSWERS_WITHIN_S = 1.0
_STACKS_WITHIN_S = 1.0
_QUIET_S = 0.1
_KILLED_AFTER_S = 4
_READ_BYTES = 1 << 16
_MOST_ANSWER_BYTES = 300_000
_MOST_PROCESSES = 40
_RUN_NO_HANDLER = ("stopped", "tracing-stop", "zombie")


class Collector:
    """The reports that are being taken on this host."""

    def __init__(self, selector: selectors.DefaultSelector, send: Callable[[Reported], None]) -> None:
        self._selector = selector
        self._send = send

    def take(self, number: int, workers: Mapping[int, int], job_dir: str) -> None:
        """Sends a `Reported` for each of the workers, given as pids by their numbers; returns at once.

        Sends none where this host is out of files or processes.
        """
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
            _be_child(writes, workers, job_dir)
        os.close(writes)
        os.set_blocking(reads, False)
        buffer = bytearray()
        self._selector.register(reads, selectors.EVENT_READ, lambda: self._read(reads, buffer, number))

    def _read(self, reads: int, buffer: bytearray, number: int) -> None:
        data = os.read(reads, _READ_BYTES)
        buffer += data
        *lines, rest = buffer.split(b"\n")
        buffer[:] = rest
        for line in lines:
            worker, facts = line.split(b" ", 1)
            self._send(Reported(int(worker), number, facts.decode()))
        if not data:
            self._selector.unregister(reads)
            os.close(reads)


def _be_child(writes: int, workers: Mapping[int, int], job_dir: str) -> None:
    """Collects in a child of the agent, and ends it."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_KILLED_AFTER_S)
        with os.fdopen(writes, "w") as pipe:
            for worker, facts in collect(workers, job_dir).items():
                pipe.write(f"{worker} {json.dumps(facts)}\n")
                pipe.flush()
    finally:
        os._exit(0)


@dataclass
class _AskedWorker:
    """A process of a worker that can be asked."""

    pid: int
    path: str
    answer: bytes = b""
    is_answered: bool = False
    stacks_from: int = 0
    """The size of its file of stacks before the signal."""
    connection: socket.socket | None = field(default=None, repr=False)


def collect(workers: Mapping[int, int], job_dir: str) -> dict[int, dict[str, Any]]:
    """Returns what can be found out about each of the workers, given as pids by their numbers, within two seconds.

    ``processes``: the worker's process and its descendants, each with pid, name, state, CPU seconds, bytes of memory
    and command. ``pid`` is the one of these that has called hvd.init(), or else the worker's own. ``answer``: what it
    says of itself, None if nothing. ``stacks``: if it did not answer, the text that faulthandler wrote on a signal,
    with a first line about its libraries; else None. ``can_answer``: whether it has called hvd.init().
    ``is_ending``: it has left its note of how far it has come, and does not answer. ``load`` and ``cores`` are the
    host's.
    """
    processes = _processes_of_all(workers)
    can_answer = _outermost(processes, job_dir, "")
    _ask(list(can_answer.values()))
    # Those that have imported torch, and not called hvd.init().
    asked = {**_outermost(processes, job_dir, ".stacks"), **can_answer}
    states = {each["pid"]: each["state"] for found in processes.values() for each in found}
    silent = [each for each in asked.values() if not each.is_answered and states[each.pid] not in _RUN_NO_HANDLER]
    _have_stacks_written(silent)
    load = [round(each, 2) for each in os.getloadavg()]
    facts: dict[int, dict[str, Any]] = {}
    for worker, pid in workers.items():
        one = asked.get(worker)
        facts[worker] = {
            "pid": pid if one is None else one.pid,
            "processes": processes[worker],
            "answer": _parsed(one.answer) if one is not None and one.is_answered else None,
            "stacks": _stacks(one) if one in silent else None,
            "can_answer": worker in can_answer,
            "is_ending": one is not None and not one.is_answered and os.path.exists(progress_file(job_dir, worker)),
            "load": load[0],
            "cores": os.cpu_count(),
        }
    return facts


def _outermost(
    processes: Mapping[int, Sequence[Mapping[str, Any]]], job_dir: str, suffix: str
) -> dict[int, _AskedWorker]:
    """Returns the outermost process of each worker that has a file with this suffix in the job's directory."""
    return {
        worker: _AskedWorker(each["pid"], path)
        for worker, found in processes.items()
        for each in found[::-1]  # the outermost is the last to be set
        if os.path.exists((path := os.path.join(job_dir, f"r{each['pid']}")) + suffix)
    }


def _processes_of_all(workers: Mapping[int, int]) -> dict[int, list[dict[str, Any]]]:
    """Returns what the system says of each worker's process and its descendants, the outermost first."""
    import psutil  # noqa: PLC0415  # costs 20 ms, seldom needed

    # The system's processes are read once for all workers: there may be hundreds, and as many workers.
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    found: dict[int, list[dict[str, Any]]] = {}
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


def _described(process: psutil.Process) -> dict[str, Any] | None:
    import psutil  # noqa: PLC0415  # as above

    with contextlib.suppress(psutil.Error, OSError), process.oneshot():
        times = process.cpu_times()
        return {
            "pid": process.pid,
            "name": process.name(),
            "state": process.status(),
            "cpu_s": round(times.user + times.system, 2),
            "memory": process.memory_info().rss,
            "command": _command_of(process),
        }
    return None


def _command_of(process: psutil.Process) -> str:
    """Returns the start of the process' command; nothing if it has ended but is not reaped, as none is known then."""
    import psutil  # noqa: PLC0415  # as above

    try:
        return " ".join(process.cmdline())[:200]
    except psutil.ZombieProcess:
        return ""


def _ask(asked: list[_AskedWorker]) -> None:
    """Reads the answer of each process, as far as it comes in time."""
    with selectors.DefaultSelector() as selector:
        for each in asked:
            connection = each.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(0.1)
            try:
                connection.connect(each.path)
            except OSError:
                connection.close()
                continue
            with contextlib.suppress(OSError):  # it has just ended
                connection.sendall(b"report")
            selector.register(connection, selectors.EVENT_READ, each)
        until = time.monotonic() + _ANSWERS_WITHIN_S
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                each = key.data
                try:
                    data = each.connection.recv(_READ_BYTES)
                    is_end = not data
                except OSError:  # it has ended without an answer
                    data, is_end = b"", False
                each.answer += data
                if not data or len(each.answer) > _MOST_ANSWER_BYTES:
                    each.is_answered = is_end
                    selector.unregister(each.connection)
                    each.connection.close()
        for key in list(selector.get_map().values()):
            key.data.connection.close()


def _have_stacks_written(asked: list[_AskedWorker]) -> None:
    """Signals the processes, and waits until what they write has come to an end."""
    waiting = []
    for each in asked:
        with contextlib.suppress(OSError):
            each.stacks_from = os.path.getsize(f"{each.path}.stacks")
            if _handles_the_signal(each.pid):
                os.kill(each.pid, STACKS_SIGNAL)
                waiting.append(each)
    sizes = {each.pid: -1 for each in waiting}
    until = time.monotonic() + _STACKS_WITHIN_S
    while waiting and time.monotonic() < until:
        time.sleep(_QUIET_S)
        before = dict(sizes)
        sizes = {each.pid: _size_of_stacks(each) for each in waiting}
        waiting = [
            each for each in waiting if sizes[each.pid] != before[each.pid] or sizes[each.pid] == each.stacks_from
        ]


def _size_of_stacks(asked: _AskedWorker) -> int:
    """Returns the size of the process' file of stacks; -1 if it was removed meanwhile."""
    try:
        return os.path.getsize(f"{asked.path}.stacks")
    except OSError:
        return -1


def _handles_the_signal(pid: int) -> bool:
    """Whether the process has a handler: it may have become another program since, which the signal would end."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        handled = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(handled.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _stacks(asked: _AskedWorker) -> str | None:
    try:
        with open(f"{asked.path}.stacks", errors="replace") as file:
            libraries = file.readline()
            file.seek(max(asked.stacks_from, len(libraries.encode())))
            text = file.read(_MOST_ANSWER_BYTES)
    except OSError:
        return None
    return libraries + text if text else None


def _parsed(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return None
