"""
Gradients that stay where autograd has put them: those of a rank that has nobody to average with.

    param.grad ── (remembered, to see whether somebody changes it) ── the optimizer

A rank alone takes no bucket's memory and copies nothing. What is an error among several ranks is one here too, so
that a program is tried at one rank and runs at many.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .slot import Slot, changed_too_early


class SingleRankHome:
    """Where all gradients of such a rank are kept."""

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
