"""
`Weights`: averages gradients by the samples or tokens that each rank has in a step, for `optimizer.weighted`.

    loss × n / reference ── backward ── averaged over the ranks ── × correction ── sum(n g) / sum(n)
          n of every rank, behind the first bucket's flags ── correction, and the next step's reference

The reference only keeps numbers in range, for 16-bit wires: it must be near the n of the ranks, and equal on all. It is
the mean n of the last step. `gradient_plan` has a `Weights`; `bucket` sends its part with the first bucket. Each rank
writes its n into elements of its own, 8 bits into each, so that n is exact in any dtype of a bucket, and in any order
of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MismatchError
from .flags import ParticipantCount, RankAndSize

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
