"""
`point`: the named places at which ``hvdlite-run --chaos`` has faults happen in this process.

    point("vote") ── no faults: returns ── a fault is due here: ask hvdlite-run ── yes: the fault

Modules that take part in a step call `point`, which costs one look at a variable without faults.
`runtime.elastic_world` calls `arm` in the first `hvd.init` of a worker with faults. docs/chaos.md lists the kinds and
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
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is due when ``point`` is passed in or after the ``step``-th step; ``index`` is its place."""

    index: int
    kind: str
    point: str
    step: int


class _Armed:
    """This process's faults, and the number of its optimizer steps so far."""

    def __init__(
        self, faults: list[Fault], may_begin: Callable[[int, int], bool], cut_links: Callable[[], int]
    ) -> None:
        self._faults = faults
        self._may_begin = may_begin
        self._cut_links = cut_links
        self._steps = 0

    def pass_point(self, name: str) -> None:
        for fault in self._faults:
            if fault.point == name and fault.step <= self._steps and self._may_begin(fault.index, self._steps):
                self._faults.remove(fault)
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
        faults = [_read(index, item) for index, item in enumerate(text.split(","))]
        _armed = _Armed(faults, may_begin, cut_links)


def _read(index: int, item: str) -> Fault:
    kind, _, rest = item.partition("@")
    name, _, step = rest.partition(":")
    return Fault(index, kind, name, int(step))


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
