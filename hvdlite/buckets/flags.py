"""
Flags at the end of a bucket's flat buffer: which parameters were used, and how many ranks take part in the step.

    per slice: used, sparse, trained │ ranks not in the divisor │ participants, per block of ranks │ that drop, keep

(Behind them the first bucket has the elements of `weights`.) `bucket` writes and reads them; `plan` says at which
offsets they are. A rank writes 1 or 0 into each. They are summed with the gradients, and then hold the number of ranks
that wrote 1. A rank trains a parameter if it has a gradient of it, or if the parameter requires one: what no rank
trains is not waited for in the next step. Only one of these numbers must be exact: how many ranks take part. Of the
others it matters whether they are 0. To be exact in any dtype of a bucket, that number is split: each element counts
one block of at most `RANKS_PER_COUNT` ranks. So no extra collective is needed.

Reading the flags on a GPU waits for the device, except on a rank that is alone. Writing them waits too, if they differ
from those of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import FLAGS_PER_SLICE, BucketPlan

RANKS_PER_COUNT = 128
"""The ranks that one element counts. Whole numbers are exact up to 256 in bfloat16 and up to 2048 in float16."""


class Presence(NamedTuple):
    """What one rank adds to the counts of ranks in a step."""

    left_out: bool
    """It sits out, and does not count in the averages' divisor."""
    takes_part: bool
    drops: bool
    """It takes part, and drops the averages: its program has dropped the gradients."""


TAKES_PART = Presence(left_out=False, takes_part=True, drops=False)
DROPS = Presence(left_out=False, takes_part=True, drops=True)


class SliceFlags(NamedTuple):
    """Whether any rank has a gradient for a slice, has a sparse one, and trains the parameter."""

    used: bool
    sparse: bool
    trained: bool


@dataclass(frozen=True, slots=True)
class RankAndSize:
    """This rank, and the number of ranks, in the group that a bucket is averaged over."""

    rank: int = 0
    size: int = 1

    @property
    def count_slots(self) -> int:
        """The number of elements in a bucket's tail that together count the ranks that take part."""
        return -(-self.size // RANKS_PER_COUNT)


class Flags:
    """Writes and reads the flags of one bucket, in the ``tail`` of its buffer."""

    def __init__(self, plan: BucketPlan, ranks: RankAndSize) -> None:
        self._plan = plan
        self.ranks = ranks
        self._usual: Tensor | None = None
        # The last flags that `_write` wrote, and the same as a tensor on the bucket's device.
        self._written: tuple[int, ...] = ()
        self._there = torch.empty(0, dtype=torch.float32, device="cpu")

    def write_usual(self, tail: Tensor) -> None:
        """Writes the flags of a rank that has every gradient, all dense. Copies on the device, so it does not wait."""
        if self._usual is None:
            count = len(self._plan.slices)
            flags = [1] * count + [0] * count + [1] * count + self._presence_of(TAKES_PART)
            self._usual = torch.tensor(flags, dtype=tail.dtype, device=tail.device)
        tail.copy_(self._usual)

    def write(
        self,
        tail: Tensor,
        presence: Presence,
        used: Sequence[bool],
        sparse: Sequence[bool],
        trained: Sequence[bool],
    ) -> None:
        """Writes which gradients this rank has, which of them are sparse, and which parameters it trains."""
        self._write(tail, (*used, *sparse, *trained, *self._presence_of(presence)))

    def write_unused(self, tail: Tensor, presence: Presence, trained: Sequence[bool]) -> None:
        """Writes the flags of a rank without gradients, and which parameters it trains."""
        unused = [False] * len(self._plan.slices)
        self.write(tail, presence, unused, unused, trained)

    def _presence_of(self, presence: Presence) -> list[int]:
        counts = [0] * self._plan.count_slots
        counts[self.ranks.rank // RANKS_PER_COUNT] = int(presence.takes_part)
        return [int(presence.left_out), *counts, int(presence.drops), int(presence.takes_part and not presence.drops)]

    def _write(self, tail: Tensor, flags: tuple[int, ...]) -> None:
        if flags != self._written:
            self._written = flags
            self._there = torch.tensor(flags, dtype=tail.dtype, device=tail.device)
        tail.copy_(self._there)

    def read(self, tail: Tensor, *, alone: bool) -> list[SliceFlags]:
        """Returns the flags of every slice, of all ranks.

        ``alone`` is for a single rank: it returns what `write` wrote, without waiting for the device.
        """
        count = len(self._plan.slices)
        flags = self._written if alone else tail.abs().tolist()
        return [SliceFlags(*(value > 0 for value in flags[i : 3 * count : count])) for i in range(count)]


def is_dropped_by_some(plan: BucketPlan, tail: Tensor) -> bool:
    """Whether some ranks drop the averages of a summed bucket, and others keep them. It waits for a GPU."""
    stop = plan.weight_start - plan.grad_numel
    return bool((tail[stop - 2 : stop] != 0).all())


def presence_of(plan: BucketPlan, tail: Tensor) -> Tensor:
    """Returns the elements that count ranks, for a `ParticipantCount`: first the uncounted ones, then one per block."""
    start = FLAGS_PER_SLICE * len(plan.slices)
    counts = tail[start : start + 1 + plan.count_slots]
    return counts.real if counts.is_complex() else counts


class ParticipantCount:
    """The number of ranks that took part in a step, and the divisor of its averages, from the flags of a summed bucket.

    An average is over all ranks, unless some sat out and do not count. The divisor is read once, at first use.
    """

    __slots__ = ("_divisor", "_presence", "_size", "_there", "is_on_host")

    def __init__(self, presence: Tensor, size: int) -> None:
        """``presence`` is the tensor of `presence_of`, read at first use. ``size`` is the number of ranks."""
        self._presence = presence
        self._size = size
        # Whether the count can be read without waiting for a device.
        self.is_on_host = presence.device.type == "cpu"
        self._divisor: int | None = None
        self._there: Tensor | None = None

    @classmethod
    def of_all(cls, size: int) -> ParticipantCount:
        """Returns the count for a step in which all ``size`` ranks take part."""
        return cls(torch.tensor([0, size], dtype=torch.int64, device="cpu"), size)

    @property
    def active(self) -> int:
        """The number of ranks that took part. Waits for the device."""
        return int(sum(self._presence.tolist()[1:]))

    def __int__(self) -> int:
        """Returns the number of ranks that an average is over, never 0. Waits for the device."""
        if self._divisor is None:
            left_out, *active = self._presence.tolist()
            self._divisor = int(sum(active)) or self._size if left_out > 0 else self._size
        return self._divisor

    def there(self) -> Tensor:
        """Returns the same number as a float64 scalar on the device, without waiting for it."""
        if self._there is None:
            active = self._presence[1:].double().sum().clamp(min=1.0)
            self._there = torch.where(self._presence[0] > 0, active, float(self._size))
        return self._there

    def keep(self) -> None:
        """Copies the flags, so that later writes to the bucket do not change the count."""
        self._presence = self._presence.clone()

    def on_host(self) -> ParticipantCount:
        """Returns this count with its flags on the CPU. Waits for the device that they are on."""
        return ParticipantCount(self._presence.cpu(), self._size)
