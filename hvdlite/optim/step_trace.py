"""
Timeline rows about gradients: for each optimizer one of its steps, and one for each bucket.

    optimizer 1             │ step 7 ................ synchronize [wait][wait] .. │ step 8
    optimizer 1, bucket 0   │      ready │ wire │ all-reduce .......... │
    optimizer 1, bucket 1   │                ready │ wire │ all-reduce ......... │

*ready*: from the bucket's last gradient until it is its turn to travel, which is in plan order. *wire*: it is filled
up, and compressed. *all-reduce*: from its launch until it is done. *wait*: how long the program stands still for it.
*step*: from the end of one step to the end of the next.

On a GPU, *ready*, *wire* and *wait* are what the program does, which runs ahead of the GPU; *all-reduce* is from when
the GPU has come to it until it is through, as a thread that waits for it sees that. Of a step that a CUDA graph
captures or replays, nothing is seen.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..comm.recorder import Recorder, Row
from ..comm.work import Work
from .bucket import Bucket

_FAMILY = 10_000  # rows of an optimizer, at most


class StepTrace:
    """The rows of one optimizer's gradients."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._family = recorder.next_family()
        self._steps = Row(self._family * _FAMILY, f"optimizer {self._family}")
        self._step = 0
        self._last_step_ns = time.monotonic_ns()

    def of(self, place: int, bucket: Bucket) -> BucketTrace | None:
        """For the bucket that is launched as number ``place`` in this step; None where nobody records."""
        if not self._recorder.is_on or captures(bucket.plan.device):
            return None
        return BucketTrace(self._recorder, self._steps, self._row(place), bucket)

    def name_of(self, place: int) -> str:
        """The bucket that is launched as number ``place`` in a step, as errors and stalls name it."""
        return f"bucket {place} of {self._steps.name}"

    @property
    def optimizer(self) -> str:
        """The optimizer by its number, the same on all ranks that make theirs in one order."""
        return self._steps.name

    def combining(self, place: int, what: str) -> AbstractContextManager[None]:
        """While bucket ``place`` goes another way than that, all of which the program waits for."""
        return self._recorder.span(self._row(place), what)

    def _row(self, place: int) -> Row:
        return Row(self._steps.number + 1 + place, f"{self._steps.name}, bucket {place}")

    def synchronizing(self) -> AbstractContextManager[None]:
        """While the program waits for all averages."""
        return self._recorder.span(self._steps, "synchronize")

    def stepped(self) -> None:
        """A step has ended."""
        self._step += 1
        if self._recorder.is_on:
            began_ns, self._last_step_ns = self._last_step_ns, time.monotonic_ns()
            self._recorder.note(self._steps, f"step {self._step}", began_ns, self._last_step_ns)
            self._recorder.write_soon()


class BucketTrace:
    """A bucket's way in one step, as it is recorded."""

    def __init__(self, recorder: Recorder, steps: Row, row: Row, bucket: Bucket) -> None:
        self._recorder = recorder
        self._steps = steps
        self._row = row
        self._detail: dict[str, Any] = {"of": bucket.plan.describe()}
        # When it is begun to be made ready, and since when it is; None until then.
        self._taken_ns = now_ns = time.monotonic_ns()
        self._sent_ns: int | None = None
        # Whoever first sees the end of the all-reduce notes it, a thread of the engine's or the program, which goes
        # on when that is done.
        self._noting = threading.Lock()
        self._is_under_way = False
        # A bucket that some gradient did not come for is ready when it is no longer waited for.
        recorder.note(row, "ready", now_ns if bucket.full_since_ns is None else bucket.full_since_ns, now_ns)

    def launching(self) -> None:
        """It is ready to travel, and about to be launched; before `launched`, which says so otherwise."""
        self._sent_ns = time.monotonic_ns()
        self._recorder.note(self._row, "wire", self._taken_ns, self._sent_ns)

    def launched(self, work: Work, wire: Tensor) -> None:
        """Its all-reduce has just begun."""
        if self._sent_ns is None:
            self.launching()
        self._detail["bytes"] = wire.numel() * wire.element_size()
        if wire.is_cuda:
            began = _here_on_gpu()
            work.when_done(lambda: self._follow(began))
        else:
            self._is_under_way = True
            work.when_done(self._ended)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the program waits for it, which is until it is done."""
        with self._recorder.span(self._steps, "wait", self._detail):
            yield
        self._ended()

    def _ended(self) -> None:
        with self._noting:
            if self._is_under_way and self._sent_ns is not None:
                self._is_under_way = False
                self._recorder.note(self._row, "all-reduce", self._sent_ns, time.monotonic_ns(), self._detail)

    def _follow(self, began: torch.cuda.Event) -> None:
        # Called at once, in a stream that comes after the all-reduce.
        ended = _here_on_gpu()
        row, detail = self._row, self._detail
        self._recorder.gpu.see(
            began, ended, lambda start_ns, stop_ns: self._recorder.note(row, "all-reduce", start_ns, stop_ns, detail)
        )


def captures(device: torch.device) -> bool:
    """Whether what the program does on this device is captured by a CUDA graph, and happens when that is replayed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _here_on_gpu() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's own is untyped
    event.record()
    return event
