"""
What is sent behind a bucket's gradients: flags, and in the first bucket the ranks' numbers of samples (`Weights`).

    per slice: used, sparse, trained │ ranks not in the divisor │ participants, per block of ranks │ that drop, keep

A rank writes 1 or 0 into each, at offsets that `plan` has. They are summed with the gradients, and then hold the number
of ranks that wrote 1. A rank trains a parameter if it has a gradient of it, or if the parameter requires one: what no
rank trains is not waited for in the next step. Only how many ranks take part must be exact; of the others it matters
whether they are 0. To be exact in any dtype of a bucket, that number is split: each element counts one block of at most
`RANKS_PER_COUNT` ranks. So no extra collective is needed. On a GPU reading the flags waits for the device, except on a
rank that is alone; so does writing them, if they differ from those of the step before.

`Weights` averages gradients by the samples or tokens that each rank has in a step, for `optimizer.weighted`:

    loss × n / reference ── backward ── averaged over the ranks ── × correction ── sum(n g) / sum(n)
          n of every rank, behind the first bucket's flags ── correction, and the next step's reference

The reference only keeps numbers in range, for 16-bit wires: it must be near the n of the ranks, and equal on all. It is
the mean n of the last step. Each rank writes its n into elements of its own, 8 bits into each, so that n is exact in
any dtype of a bucket, and in any order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from .plan import FLAGS_PER_SLICE, BucketPlan

RANKS_PER_COUNT = 128
"""The ranks that one element counts. Whole numbers are exact up to 256 in bfloat16 and up to 2048 in float16."""

# The elements of a bucket for one rank's n, of 8 bits each, which bfloat16 holds exactly.
_DIGITS = 5
_BASE = 256
_POWERS = torch.tensor([float(_BASE**digit) for digit in range(_DIGITS)], dtype=torch.float64, device="cpu")

MOST_PER_STEP = _BASE**_DIGITS - 3
"""The largest sum of n of one rank in a step."""

FIRST_REFERENCE = 1024.0
"""The reference of the first step. An fp16 wire then holds usual gradients of 1 to about 10 million tokens per rank."""

# What a rank writes: one of these, or its n + 2.
_NO_BACKWARD, _UNWEIGHTED, _LEAST = 0, 1, 2


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
        # The last flags that `write` wrote, and the same as a tensor on the bucket's device.
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
        flags = (*used, *sparse, *trained, *self._presence_of(presence))
        if flags != self._written:
            self._written = flags
            self._there = torch.tensor(flags, dtype=tail.dtype, device=tail.device)
        tail.copy_(self._there)

    def _presence_of(self, presence: Presence) -> list[int]:
        counts = [0] * self._plan.count_slots
        counts[self.ranks.rank // RANKS_PER_COUNT] = int(presence.takes_part)
        return [int(presence.left_out), *counts, int(presence.drops), int(presence.takes_part and not presence.drops)]

    def read(self, tail: Tensor, *, alone: bool) -> list[SliceFlags]:
        """Returns the flags of every slice, of all ranks. On a rank that is ``alone`` it does not wait."""
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
    """The number of ranks that took part in a step, and the divisor of its averages, read once at first use."""

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


class WeightState(NamedTuple):
    """All that `Weights` remembers, to begin a step again in another world."""

    reference: float = FIRST_REFERENCE
    # The sum of n of the step's backward passes, or None if no loss was weighted.
    counted: int | None = None
    # The same of losses whose backward pass has not begun.
    pending: int | None = None
    has_backward: bool = False


class Weights:
    """This rank's n of a step, and the correction of the averages by those of all ranks."""

    def __init__(self, ranks: RankAndSize) -> None:
        self._ranks = ranks
        self.slots = _DIGITS * ranks.size
        self.state = WeightState()
        # In this step: what the averages must still be multiplied by. 1 until `read`, and if all ranks have equal n.
        self.correction = 1.0
        # The last n that `write` wrote, and the elements that it wrote.
        self._written: tuple[int, Tensor] | None = None

    def add(self, n: int) -> float:
        """Adds n to the next backward pass, or to this step if none follows. Returns the factor of the loss."""
        self.state = self.state._replace(pending=(self.state.pending or 0) + n)
        return n / self.state.reference

    @property
    def of_step(self) -> int | None:
        """The sum of n on this rank in this step, or None if it has not weighted a loss."""
        counted, pending = self.state.counted, self.state.pending
        return None if counted is None and pending is None else (counted or 0) + (pending or 0)

    def begin_backward(self) -> None:
        """Notes that a backward pass of this optimizer has begun."""
        # A step whose gradients are dropped takes only the n of its own passes along, not those of the next pass.
        self.state = self.state._replace(counted=self.of_step, pending=None, has_backward=True)

    def drop(self) -> None:
        """Drops the n of backward passes, whose gradients are used or dropped."""
        self.state = self.state._replace(counted=None, has_backward=False)
        self.correction = 1.0

    def end_step(self) -> None:
        """Drops every n, after a step that all ranks have taken part in."""
        self.drop()
        self.state = self.state._replace(pending=None)

    def write(self, slots: Tensor) -> None:
        """Writes this rank's n into its elements of ``slots``, of shape ``(self.slots,)``, and zeros elsewhere."""
        n = self.of_step
        code = n + _LEAST if n is not None else _UNWEIGHTED if self.state.has_backward else _NO_BACKWARD
        if self._written is None or self._written[0] != code or self._written[1].dtype != slots.dtype:
            values = [0] * self.slots
            start = self._ranks.rank * _DIGITS
            values[start : start + _DIGITS] = [code // _BASE**digit % _BASE for digit in range(_DIGITS)]
            self._written = code, torch.tensor(values, dtype=slots.dtype, device=slots.device)
        slots.copy_(self._written[1])

    def read(self, slots: Tensor, count: ParticipantCount, describe: Callable[[int], str]) -> None:
        """Sets the correction and the next reference from the sum of all ranks' ``slots``.

        Raises MismatchError, on every rank, if some ranks have weighted their losses and others have not; ``describe``
        names a rank. On a GPU this waits, so there a rank that has weighted none does not read.
        """
        if slots.device.type != "cpu" and self.of_step is None:
            return
        real = slots.real if slots.is_complex() else slots
        codes = [int(code) for code in (real.cpu().double().view(-1, _DIGITS) @ _POWERS).tolist()]
        numbers = [code - _LEAST for code in codes if code >= _LEAST]
        if not numbers:
            return
        if _UNWEIGHTED in codes:
            weighted = [describe(rank) for rank, code in enumerate(codes) if code >= _LEAST]
            others = [describe(rank) for rank, code in enumerate(codes) if code == _UNWEIGHTED]
            raise MismatchError(
                f"optimizer.weighted(loss, n) was called in this step on {_some(weighted)}, and not on "
                f"{_some(others)}: call it on every rank for every loss, or on none"
            )
        self._use(sum(numbers), len(numbers), int(count))

    def read_alone(self) -> None:
        """Sets the correction and the next reference of a rank whose gradients are in no bucket."""
        if self.of_step is not None:
            self._use(self.of_step, 1, 1)

    def _use(self, total: int, ranks: int, divisor: int) -> None:
        # Without any sample, all gradients are zeros.
        if total > 0:
            self.correction = divisor * self.state.reference / total
            self.state = self.state._replace(reference=total / ranks)


class _NoGradient(torch.autograd.Function):
    """Zero in place of a loss of no samples, which may be NaN. Backward reaches no parameter."""

    @staticmethod
    def forward(ctx: object, loss: Tensor) -> Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> None:
        return None


def no_loss(loss: Tensor) -> Tensor:
    """Returns a zero of the loss's shape and dtype, whose backward pass gives no parameter a gradient."""
    # Not typed in every version of torch.
    untyped: Any = _NoGradient
    zero: Tensor = untyped.apply(loss)
    return zero


def _some(ranks: list[str]) -> str:
    return ", ".join(ranks[:3]) + (f" and {len(ranks) - 3} more ranks" if len(ranks) > 3 else "")
