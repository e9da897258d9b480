"""`StatusCollector`: answers AskStatus in the agent: brief (watch, metrics) itself, in full by forking `collect`.

    AskStatus ──► StatusCollector ── "brief" ──► <job's directory>/r<pid>, of each process that has called hvd.init()
                                  └─ in full: forks ── collect
    StatusTold ◄── what the worker answers, its processor time and memory, and the load of the host (`HostLoad`)

A brief question costs no thread or process. A rank that does not answer it until the next one, since it is stopped or
its interpreter's lock is held, is told of without an answer. All reads are of /proc files that no other process can
block. A full answer may be blocked (by a hanging file system, a lock on another's memory), so it is left to a child of
the agent, which is killed after some seconds. Nothing is looked at unless somebody asks.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hvdlite_wire.job_contract import note_file
from hvdlite_wire.linux import stat_of
from hvdlite_wire.worker_status import HostUsage, OwnStatus

from ..protocol.channel import encode
from ..protocol.messages import AskStatus, StatusTold
from ..system.process_tree import as_before
from .collect import Questions, collect, read_own, status_of

_READ_BYTES = _MOST_BYTES = 1 << 16
_KILLED_AFTER_S = 4
_WHOLE = b"."  # after all frames of a child, whose last byte is another
_SOCKET = re.compile(r"r([0-9]+)")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The numbers of fields in proc(5).
_PARENT, _USER_TIME, _SYSTEM_TIME, _RESIDENT_PAGES = 4, 14, 15, 24

_EACH_S = 10.0
_MOST_BYTES_OF_QUERY = 1 << 18
_QUERY = (
    "nvidia-smi --query-gpu=uuid,utilization.gpu --format=csv,noheader,nounits && echo && "
    "exec nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv,noheader,nounits"
)
# The kernel counts words of four bytes there.
_RDMA = "/sys/class/infiniband/*/ports/*/counters/port_%s_data"
_RDMA_WORD = 4


class HostLoad:
    def __init__(self, selector: selectors.BaseSelector, clock: Callable[[], float] = time.monotonic) -> None:
        self._selector = selector
        self._clock = clock
        self._query_at = 0.0 if shutil.which("nvidia-smi") else None
        self._is_asking = False
        self._interface: str | None = None
        self._before: tuple[int, int] | None = None  # the counts when the job began
        self.gpus: Mapping[str, float] = {}
        """The part of the time in which each GPU computes, by its UUID."""
        self.gpu_of_pid: Mapping[int, str] = {}
        """The GPU that a process uses, as far as the driver knows its number: in containers it may not."""

    def follow(self, interface: str | None) -> None:
        """Counts the bytes of this interface from now on, towards the job's other hosts; None: there are none."""
        self._interface = interface
        self._before = None if interface is None else network_bytes(interface)

    def network(self) -> HostUsage:
        """Returns the bytes since the job began, as far as they are known."""
        counts = None if self._interface is None else network_bytes(self._interface)
        if counts is None:
            return HostUsage()
        self._before = self._before or counts
        sent, received = self._before
        return HostUsage(max(0, counts[0] - sent), max(0, counts[1] - received))

    def usage(self) -> HostUsage:
        """Returns what `network` does, and the GPUs."""
        if self._query_at is not None and not self._is_asking and self._query_at <= self._clock():
            self._ask_for_gpus()
        return replace(self.network(), gpus=tuple(self.gpus.values()))

    def gpu_use(self, pid: int) -> float | None:
        """Returns the use of the GPU on which this process computes; None if that is not known."""
        return self.gpus.get(self.gpu_of_pid.get(pid, ""))

    def _ask_for_gpus(self) -> None:
        try:
            asked = subprocess.Popen(
                as_before(["sh", "-c", _QUERY]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:  # no process can be started now
            self._query_at = None
            return
        assert asked.stdout is not None
        pipe, text = asked.stdout, bytearray()
        os.set_blocking(pipe.fileno(), False)
        self._is_asking = True

        def read() -> None:
            data = os.read(pipe.fileno(), _READ_BYTES)
            text.extend(data)
            if data and len(text) < _MOST_BYTES_OF_QUERY:
                return
            self._selector.unregister(pipe)
            pipe.close()
            asked.poll()  # the agent may have reaped it
            self._is_asking = False
            self.gpus, self.gpu_of_pid = read_nvidia_smi(text.decode(errors="replace"))
            self._query_at = self._clock() + _EACH_S if self.gpus else None

        self._selector.register(pipe, selectors.EVENT_READ, read)


def network_bytes(interface: str, devices: str = "/proc/net/dev", rdma: str = _RDMA) -> tuple[int, int] | None:
    """Returns the bytes that this interface, and all RDMA ports, have sent and received; None if it is not there."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(devices) as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == interface:
                columns = counts.split()
                received, sent = int(columns[0]), int(columns[8])
                return sent + _rdma_bytes(rdma % "xmit"), received + _rdma_bytes(rdma % "rcv")
    return None


def _rdma_bytes(pattern: str) -> int:
    total = 0
    for path in glob.iglob(pattern):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            total += int(file.read()) * _RDMA_WORD
    return total


def read_nvidia_smi(text: str) -> tuple[dict[str, float], dict[int, str]]:
    """Returns the use of each GPU by its UUID, and the GPU of each process, from what nvidia-smi prints."""
    gpus: dict[str, float] = {}
    processes: dict[int, str] = {}
    first, _, second = text.partition("\n\n")
    for line in first.splitlines():
        uuid, _, use = line.partition(", ")
        if use.strip().isdigit():
            gpus[uuid] = min(int(use) / 100, 1.0)
    for line in second.splitlines():
        pid, _, uuid = line.partition(", ")
        if pid.strip().isdigit():
            processes[int(pid)] = uuid.strip()
    return gpus, processes


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
        self._questions.give_up()
        self._tell_silent()
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

    def _tell_silent(self) -> None:
        can_answer = set(map(self._worker_of, self._unanswered))
        silent, self._silent = self._silent, {}
        for worker, pid in silent.items():
            self._tell_next(worker, pid, None, can_answer=worker in can_answer)

    def _worker_of(self, pid: int) -> int | None:
        """Returns the worker that this process has named, or else the one that it descends from; None if neither."""
        while pid and pid not in self._workers:
            stat = stat_of(pid)
            pid = 0 if stat is None else stat[_PARENT]
        return self._workers.get(pid)

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
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_KILLED_AFTER_S)
        told = (StatusTold(worker, number, True, status) for worker, status in collect(workers, job_dir).items())
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(b"".join(map(encode, told)) + _WHOLE)
    finally:
        os._exit(0)
