"""`FakeBucket`: what DDP passes to a communication hook, for hooks that are called without DDP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FakeBucket:
    """A copy of these gradients as the only bucket of a model; the hook's results are in `gradients`."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._flat = torch.cat([grad.reshape(-1) for grad in grads])
        self._shapes = [grad.shape for grad in grads]

    def buffer(self) -> Tensor:
        """Returns all gradients, flat."""
        return self._flat

    def index(self) -> int:
        """Returns the number of the bucket."""
        return 0

    def is_last(self) -> bool:
        """Whether no other bucket follows in a step."""
        return True

    def gradients(self) -> list[Tensor]:
        """Returns the gradients as views of the buffer."""
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
