"""
`point`: the named places at which ``hvdlite-run --chaos`` has faults happen in this process.

    point("vote") ── no faults: returns ── a fault is due here: ask hvdlite-run ── yes: the fault

Modules that take part in a step call `point`, which costs one look at a variable without faults.
`runtime.bootstrap` calls `arm` in the first `hvd.init` of a worker with faults. docs/chaos.md lists the kinds and
the points.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import NoReturn

from hvdlite_wire.job_contract import WorkerFault, worker_faults


class _Armed:
    """This process's faults, and the number of its optimizer steps so far."""

    def __init__(
        self, faults: list[WorkerFault], may_begin: Callable[[int, int], bool], cut_links: Callable[[], int]
    ) -> None:
        self._faults = dict(enumerate(faults))  # by their places in HVDLITE_CHAOS
        self._may_begin = may_begin
        self._cut_links = cut_links
        self._steps = 0

    def pass_point(self, name: str) -> None:
        for index, fault in list(self._faults.items()):
            if fault.point == name and fault.step <= self._steps and self._may_begin(index, self._steps):
                del self._faults[index]
                where = f"{name!r} in step {self._steps}"
                if fault.kind != "link":
                    _begin(fault.kind, where)
                elif not self._cut_links():
                    raise RuntimeError(
                        f"hvdlite-run --chaos: link at {where}: this worker has no connection to another host to cut: "
                        "name a worker of a job over several hosts, and a point at which it is connected"
                    )
        if name == "stepped":
            self._steps += 1


_armed: _Armed | None = None


def point(name: str) -> None:
    """Passes a named place; a fault that is due there happens now."""
    if _armed is not None:
        _armed.pass_point(name)


def arm(text: str, may_begin: Callable[[int, int], bool], cut_links: Callable[[], int]) -> None:
    """Sets this process's faults, once, from a text such as ``kill@vote:7,segv@voted:9``.

    ``may_begin(index, step)`` asks hvdlite-run whether a fault may happen now. ``cut_links`` cuts the connections to
    other hosts, and returns how many.
    """
    global _armed  # noqa: PLW0603 - read at every point, which must cost nothing without faults
    if _armed is None:
        _armed = _Armed(worker_faults(text), may_begin, cut_links)


def _begin(kind: str, where: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "shm":
            _touch_missing_memory()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            _hang()
        case "exception":
            raise RuntimeError(f"hvdlite-run --chaos: an exception at {where}")
        case _:
            # hvdlite-run now ends what is on this host.
            while True:
                time.sleep(3600)


def _touch_missing_memory() -> None:
    """Reads a page behind the end of its file: the SIGBUS that a page of shared memory causes in a full /dev/shm."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        memory[0]


def _hang() -> NoReturn:
    # PyDLL keeps the interpreter's lock, so no other thread of this process runs.
    pause = ctypes.PyDLL(None).pause
    while True:
        pause()
