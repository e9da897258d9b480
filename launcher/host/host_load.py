"""`HostLoad`: what one host has to do besides its workers' processor time: bytes over its network, and its GPUs.

    AskStatus ──► StatusCollector ──► HostLoad ── /proc/net/dev, /sys/class/infiniband
                                               └─ nvidia-smi, at most each 10 s, while the agent goes on

Nothing is looked at unless somebody asks. Where there is no GPU, nvidia-smi is started once at most.
"""

from __future__ import annotations

import contextlib
import glob
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from hvdlite_wire.worker_status import HostUsage

from ..system.process_tree import as_before

_EACH_S = 10.0
_READ_BYTES = 1 << 14
_MOST_BYTES = 1 << 18
_QUERY = (
    "nvidia-smi --query-gpu=uuid,utilization.gpu --format=csv,noheader,nounits && echo && "
    "exec nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv,noheader,nounits"
)
# The kernel counts words of four bytes there.
_RDMA = "/sys/class/infiniband/*/ports/*/counters/port_%s_data"
_RDMA_WORD = 4


class HostLoad:
    """The load of this host."""

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
            if data and len(text) < _MOST_BYTES:
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
