"""
Counts at the end of a bucket's flat buffer, summed in its all-reduce: ranks that used a gradient, that take part.

    for every slice: used, sparse │ sits out uncounted │ takes part, by block of ranks │ for sleeping buckets: needed

Each is 1 or 0 before the all-reduce, and how many ranks say so after it. Where they lie is in `plan`. Of all but one it
is only asked whether any rank says so. The number of ranks that take part is exact in any dtype that travels: an
element counts the ranks of one block, `RANKS_PER_COUNT` at most. So counting costs neither a collective of its own nor
a wider wire.

Reading the flags on a GPU waits for the device, but for a rank that is alone, which knows what it has written. Writing
them waits where they are not what they were in the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import BucketPlan

RANKS_PER_COUNT = 128
"""Whole numbers up to 256 are exact in bfloat16, up to 2048 in float16."""

# Whether this rank sits out and does not count; whether it takes part.
TAKES_PART = (0, 1)


@dataclass(frozen=True, slots=True)
class RankAndSize:
    """How many ranks share a bucket, and which of them this is."""

    rank: int = 0
    size: int = 1

    @property
    def count_slots(self) -> int:
        """Elements of a bucket's tail that count ranks together."""
        return -(-self.size // RANKS_PER_COUNT)


class Flags:
    """Writes and reads the flags of one bucket, in the ``tail`` of its buffer."""

    def __init__(self, plan: BucketPlan, ranks: RankAndSize) -> None:
        self._plan = plan
        self._ranks = ranks
        self._usual: Tensor | None = None
        # What was written last otherwise than usual, and the same on the device.
        self._written: tuple[int, ...] = ()
        self._there = torch.empty(0)

    def write_usual(self, tail: Tensor) -> None:
        """Every gradient is there, and dense. On the device, so that the usual case stays asynchronous on a GPU."""
        if self._usual is None:
            count = len(self._plan.slices)
            flags = [1] * count + [0] * count + self._presence_of(TAKES_PART)
            self._usual = torch.tensor(flags, dtype=tail.dtype, device=tail.device)
        tail.copy_(self._usual)

    def write(self, tail: Tensor, used: Sequence[bool], sparse: Sequence[bool], wake: Sequence[bool]) -> None:
        """What this rank has of each gradient, and which sleeping buckets it needs."""
        self._write(tail, (*used, *sparse, *self._presence_of(TAKES_PART), *wake))

    def write_presence(self, tail: Tensor, presence: tuple[int, int]) -> None:
        """Nothing but whether this rank sits out and does not count, and whether it takes part."""
        unused = [0] * 2 * len(self._plan.slices)
        self._write(tail, (*unused, *self._presence_of(presence), *[0] * self._plan.wake_slots))

    def _presence_of(self, presence: tuple[int, int]) -> list[int]:
        left_out, takes_part = presence
        counts = [0] * self._plan.count_slots
        counts[self._ranks.rank // RANKS_PER_COUNT] = takes_part
        return [left_out, *counts]

    def _write(self, tail: Tensor, flags: tuple[int, ...]) -> None:
        if flags != self._written:
            self._written = flags
            self._there = torch.tensor(flags, dtype=tail.dtype, device=tail.device)
        tail.copy_(self._there)

    def read(self, tail: Tensor, *, alone: bool) -> list[tuple[bool, bool]]:
        """For every slice whether any rank used it, and whether any had it sparse, where that is not as usual."""
        count = len(self._plan.slices)
        flags = self._written if alone else tail.abs().tolist()
        return [(flags[i] > 0, flags[count + i] > 0) for i in range(count)]

    def read_wake(self, tail: Tensor, *, alone: bool) -> list[bool]:
        """Which sleeping buckets some rank needs."""
        flags = self._written if alone else tail.abs().tolist()
        return [value > 0 for value in flags[self._plan.wake_start - self._plan.grad_numel :]]


def presence_of(plan: BucketPlan, tail: Tensor) -> Tensor:
    """How many ranks sat out and do not count, and how many of each block took part, for a `ParticipantCount`."""
    start = 2 * len(plan.slices)
    counts = tail[start : start + 1 + plan.count_slots]
    return counts.real if counts.is_complex() else counts


class ParticipantCount:
    """How many ranks took part in a step, and over how many an average is; read from a bucket that has come back.

    An average is over all ranks, unless some sat out and do not count. Each number is read once, when it is asked for.
    """

    __slots__ = ("_divisor", "_presence", "_size", "_there", "is_on_host")

    def __init__(self, presence: Tensor, size: int) -> None:
        """``presence`` is as of `presence_of`, and is read when that is asked for; there are ``size`` ranks."""
        self._presence = presence
        self._size = size
        # Whether reading it waits for no device.
        self.is_on_host = presence.device.type == "cpu"
        self._divisor: int | None = None
        self._there: Tensor | None = None

    @classmethod
    def of_all(cls, size: int) -> ParticipantCount:
        """The count when all ``size`` ranks take part."""
        return cls(torch.tensor([0, size]), size)

    @property
    def active(self) -> int:
        """The ranks that took part; waits for the device."""
        return int(sum(self._presence.tolist()[1:]))

    def __int__(self) -> int:
        """Over how many ranks an average is, never 0; waits for the device."""
        if self._divisor is None:
            left_out, *active = self._presence.tolist()
            self._divisor = int(sum(active)) or self._size if left_out > 0 else self._size
        return self._divisor

    def there(self) -> Tensor:
        """The same as a float64 scalar on the device, which is not waited for."""
        if self._there is None:
            active = self._presence[1:].double().sum().clamp(min=1.0)
            self._there = torch.where(self._presence[0] > 0, active, float(self._size))
        return self._there

    def keep(self) -> None:
        """Take a copy, so that nothing changes with what becomes of the bucket."""
        self._presence = self._presence.clone()

    def on_host(self) -> ParticipantCount:
        """The same to be read on any device; waits for its own."""
        return ParticipantCount(self._presence.cpu(), self._size)
