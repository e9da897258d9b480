"""
The tail of a bucket's flat buffer: what all ranks must know together of its gradients, in the same all-reduce.

    for every slice: used, sparse │ this rank takes part, sits out uncounted │ for every sleeping bucket: needed

Each is 1 or 0 before the all-reduce, and how many ranks say so after it. Where they lie is in `plan`. Reading them on a
GPU waits for the device, but for a rank that is alone, which knows what it has written. Writing them waits where they
are not what they were in the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import BucketPlan

TAKES_PART = (1, 0)


class Flags:
    """Writes and reads the flags of one bucket's buffer."""

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._usual: Tensor | None = None
        # What was written last otherwise than usual, and the same on the device.
        self._written: tuple[int, ...] = ()
        self._there = torch.empty(0)

    def write_usual(self, buffer: Tensor) -> None:
        """Every gradient is there, and dense. On the device, so that the usual case stays asynchronous on a GPU."""
        if self._usual is None:
            count = len(self._plan.slices)
            flags = [1] * count + [0] * count + [*TAKES_PART]
            self._usual = torch.tensor(flags, dtype=buffer.dtype, device=buffer.device)
        buffer[self._plan.grad_numel :].copy_(self._usual)

    def write(self, buffer: Tensor, used: Sequence[bool], sparse: Sequence[bool], wake: Sequence[bool]) -> None:
        """What this rank has of each gradient, and which sleeping buckets it needs."""
        self._write(buffer, (*used, *sparse, *TAKES_PART, *wake))

    def write_presence(self, buffer: Tensor, presence: tuple[int, int]) -> None:
        """Nothing but whether this rank takes part, and whether it sits out and does not count."""
        self._write(buffer, (*[0] * 2 * len(self._plan.slices), *presence, *[0] * self._plan.wake_slots))

    def _write(self, buffer: Tensor, flags: tuple[int, ...]) -> None:
        if flags != self._written:
            self._written = flags
            self._there = torch.tensor(flags, dtype=buffer.dtype, device=buffer.device)
        buffer[self._plan.grad_numel :].copy_(self._there)

    def read(self, buffer: Tensor, *, alone: bool) -> list[tuple[bool, bool]]:
        """For every slice whether any rank used it, and whether any had it sparse, where that is not as usual."""
        count = len(self._plan.slices)
        tail = self._written if alone else buffer[self._plan.grad_numel :].abs().tolist()
        return [(tail[i] > 0, tail[count + i] > 0) for i in range(count)]

    def read_wake(self, buffer: Tensor, *, alone: bool) -> list[bool]:
        """Which sleeping buckets some rank needs."""
        tail = self._written if alone else buffer[self._plan.grad_numel :].abs().tolist()
        return [value > 0 for value in tail[self._plan.wake_start - self._plan.grad_numel :]]

    def presence(self, buffer: Tensor) -> Tensor:
        """How many ranks took part, and how many sat out and do not count; waits for nothing."""
        counts = buffer[self._plan.presence_start : self._plan.wake_start]
        return counts.real if counts.is_complex() else counts
