"""
`WholeUpdate`: how an optimizer's own step is taken once its averages are there, and where its state is.

    averages in param.grad ── WholeUpdate    each rank clips and updates all parameters, and has all of the state
                           └─ ShardedUpdate  each rank its own part (`sharded_update`), with a `DividedState`

`averaging_optimizer` has one, by the argument ``shard``. What updates some parameters alone, as `step_by_bucket` does
too, has the optimizer see these by `narrowed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..steps.step import Arrived
from .clipping import NormClipper


class WholeUpdate:
    """Every rank updates all parameters, and has all of the state."""

    holds_parts = False

    def __init__(self, optimizer: torch.optim.Optimizer, clipper: NormClipper | None) -> None:
        self._optimizer = optimizer
        self._clipper = clipper
        self.arrived: Arrived | None = None if clipper is None else clipper.measure
        """To be called with parameters whose averages have arrived, while others are still being sent."""

    def prepare(self, params: Sequence[Tensor]) -> None:
        """Clips the averages of ``params``, if they are to be clipped."""
        if self._clipper is not None:
            self._clipper.clip(params)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes the step. ``closure``, if there is one, leaves averages in the gradients, and calls `prepare`."""
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def state_dict(self, *, whole_for: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._optimizer.state_dict(), {}

    def complete_pattern(self) -> None:
        """Does nothing: the optimizer's first step has made all that is in its state."""

    def load_state_dict(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Loads the optimizer's state. Raises ValueError for one rank's part of a state."""
        if own:
            raise ValueError(
                f"the checkpoint has one rank's part of an optimizer's state, saved with shard={own['scope']!r}: wrap "
                "the optimizer with the same, or call consolidate_state_dict() on all ranks before it is saved"
            )
        self._optimizer.load_state_dict(state)

    def consolidate(self, *, keeps: bool) -> None:
        """Does nothing: every rank has all of the state."""


@contextmanager
def narrowed(groups: Sequence[dict[str, Any]], parts: Sequence[list[Tensor]]) -> Iterator[None]:
    """A context in which an optimizer's parameter groups hold only these parameters, a list for each group."""
    before = [group["params"] for group in groups]
    try:
        # In place, since an optimizer inside the optimizer may refer to the same groups.
        for group, part in zip(groups, parts, strict=True):
            group["params"] = part
        yield
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params
