"""
Gradients outside buckets: those of a single rank, and sparse ones, stay in ``param.grad`` between backward and step.

`StayingHome` is for a single rank's, `SparseHome` for sparse ones, whose rows are gathered. What is an
error among several ranks is one on a rank alone too, so that a program is tried at one rank and runs at many.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import GradientError
from .slot import Slot, changed_too_early


class StayingHome:
    """Remembers gradients, to see whether somebody changes them."""

    def take(self, slot: Slot, last_pass: bool) -> bool:
        """Remember the gradient as it is."""
        grad = slot.param.grad
        slot.view = grad
        if last_pass:
            slot.arrived = True
            slot.sparse = grad is not None and grad.layout is not torch.strided
            # PyTorch's count of changes, which a gradient may share with one that autograd has yet to add to: it
            # says something of those alone that nothing has been added to since they were made.
            slot.fresh = grad is not None and grad._version == 0
        return False


def require_same(slots: Iterable[Slot]) -> None:
    """Raise a GradientError where a gradient has been changed since it was complete."""
    for slot in slots:
        if slot.arrived and not slot.sparse:
            grad = slot.param.grad
            if grad is not slot.view:
                how = "set to None" if grad is None else "replaced"
                raise changed_too_early(f"the gradient of {slot.name} was {how}", slot.param)
            if slot.fresh and grad is not None and grad._version != 0:
                raise changed_too_early(f"the gradient of {slot.name} was changed", slot.param)


class SparseHome:
    """Checks that a gradient stays sparse.

    A parameter comes here once some rank has shown a sparse gradient for it; until then it is in a bucket like any
    other.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def take(self, slot: Slot, last_pass: bool) -> bool:
        """Check that the gradient is still of the kind that all ranks gather."""
        grad = slot.param.grad
        if grad is not None and grad.layout == torch.strided:
            raise GradientError(
                f"parameter {slot.name!r} had sparse gradients in earlier steps and has a dense one now: keep "
                "it one or the other, or wrap the optimizer with sparse_as_dense=True"
            )
        if last_pass:
            slot.arrived = True
        return False
