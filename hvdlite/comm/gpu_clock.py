"""
Reads the host's clock when a GPU reaches a point of its stream.

A thread waits for each CUDA event, so there is no polling, and no conversion between clocks. The times are exact to the
few microseconds that it takes to wake a thread. `Recorder.gpu` is a `GpuClock`, which `buckets.step_trace` uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

_SETTLE_S = 5.0


class Point(Protocol):
    """A `torch.cuda.Event` that has been recorded, with ``blocking=True`` so that waiting uses no CPU."""

    def synchronize(self) -> object: ...


class GpuClock:
    """Waits for pairs of points on one thread, in the order of the calls to `see`."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def see(self, began: Point, ended: Point, then: Callable[[int, int], object]) -> None:
        """Call ``then`` with the times (ns) at which the GPU reached both points; returns at once.

        The clock's thread makes the call, once the GPU has reached them.
        """
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hvdlite-gpu-watch", daemon=True)
                self._thread.start()
        self._jobs.put(lambda: then(_reached_ns(began), _reached_ns(ended)))

    def settle(self) -> None:
        """Wait, for at most a few seconds, until ``then`` has been called for all points passed to `see` so far."""
        if self._thread is not None:
            settled = threading.Event()
            self._jobs.put(settled.set)
            settled.wait(_SETTLE_S)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


def _reached_ns(point: Point) -> int:
    point.synchronize()
    return time.monotonic_ns()
