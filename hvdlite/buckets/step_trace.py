"""
Timeline rows about gradients: for each optimizer one row of steps, and one row for each bucket.

    optimizer 1             │ step 7 ................ synchronize [wait][wait] .. │ step 8
    optimizer 1, bucket 0   │      ready │ wire │ all-reduce .......... │
    optimizer 1, bucket 1   │                ready │ wire │ all-reduce ......... │

*ready*: from the bucket's last gradient until its turn in plan order. *wire*: packing and compressing it.
*all-reduce*: from its launch to its end. *wait*: the program blocks for it. *step*: from the end of one step to the end
of the next. `reducer`, `in_flight` and the steps report these events; the recorder in `comm.recorder` writes them.

On a GPU, *ready*, *wire* and *wait* are times of the program, which runs ahead of the GPU. *all-reduce* is from when
the GPU reaches the launch until it has ended, as seen by a thread that waits for CUDA events. Steps that a CUDA graph
captures or replays are not recorded.
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

_FAMILY = 10_000  # the maximum number of rows per optimizer


class StepTrace:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        family = recorder.next_family()
        self.optimizer = f"optimizer {family}"
        """The optimizer's name by its number, equal on all ranks that construct their optimizers in the same order."""
        self.step = 0
        """How many steps the optimizer has taken in this world."""
        self._steps = Row(family * _FAMILY, self.optimizer)
        self._last_step_ns = time.monotonic_ns()

    def trace_of(self, index: int, bucket: Bucket) -> BucketTrace | None:
        """Returns the trace of the bucket that is launched as this number of a step, or None if none is recorded."""
        if not self._recorder.is_on or captures(bucket.plan.device):
            return None
        return BucketTrace(self._recorder, self._steps, self._row(index), bucket)

    def name_of(self, index: int) -> str:
        """Returns the name, in errors and stall messages, of the bucket that is number ``index`` in a step's order."""
        return f"bucket {index} of {self.optimizer}"

    def combining(self, index: int, what: str) -> AbstractContextManager[None]:
        """A context that records ``what`` in the row of bucket ``index``, while the program combines deltas."""
        return self._recorder.span(self._row(index), what)

    def _row(self, index: int) -> Row:
        return Row(self._steps.number + 1 + index, f"{self.optimizer}, bucket {index}")

    def synchronizing(self) -> AbstractContextManager[None]:
        return self._recorder.span(self._steps, "synchronize")

    def stepped(self) -> None:
        self.step += 1
        if self._recorder.is_on:
            began_ns, self._last_step_ns = self._last_step_ns, time.monotonic_ns()
            self._recorder.note(self._steps, f"step {self.step}", began_ns, self._last_step_ns)
            self._recorder.write_soon()


class BucketTrace:
    def __init__(self, recorder: Recorder, steps: Row, row: Row, bucket: Bucket) -> None:
        self._recorder = recorder
        self._steps = steps
        self._row = row
        self._detail: dict[str, Any] = {"of": bucket.plan.describe()}
        # The time when packing begins, and when it ends (None until then).
        self._taken_ns = now_ns = time.monotonic_ns()
        self._sent_ns: int | None = None
        # A thread of the engine and the program may both see the end of the all-reduce: only the first records it.
        self._noting = threading.Lock()
        self._is_under_way = False
        # A bucket with missing gradients was never full, so it is ready only now.
        recorder.note(row, "ready", now_ns if bucket.full_since_ns is None else bucket.full_since_ns, now_ns)

    def launching(self) -> None:
        """Records that the bucket is packed. Optional: without it `launched` records this."""
        self._sent_ns = time.monotonic_ns()
        self._recorder.note(self._row, "wire", self._taken_ns, self._sent_ns)

    def launched(self, work: Work, wire: Tensor) -> None:
        """Records that the bucket's all-reduce has just been launched, with this wire."""
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
        """A context that records the program's wait for the all-reduce, and its end."""
        with self._recorder.span(self._steps, "wait", self._detail):
            yield
        self._ended()

    def _ended(self) -> None:
        with self._noting:
            if self._is_under_way and self._sent_ns is not None:
                self._is_under_way = False
                self._recorder.note(self._row, "all-reduce", self._sent_ns, time.monotonic_ns(), self._detail)

    def _follow(self, began: torch.cuda.Event) -> None:
        # Called at once by `when_done`, on a stream that waits for the all-reduce.
        ended = _here_on_gpu()
        row, detail = self._row, self._detail
        self._recorder.gpu.see(
            began, ended, lambda start_ns, stop_ns: self._recorder.note(row, "all-reduce", start_ns, stop_ns, detail)
        )


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is capturing the program's work on this device, which then runs only in a replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _here_on_gpu() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's own is untyped
    event.record()
    return event
