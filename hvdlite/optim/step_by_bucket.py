"""
``step_on_arrival``: runs the optimizer's step bucket by bucket, while other buckets are still being sent.

    averages of a bucket ── param_groups narrowed to its parameters ── step ── gradients freed ── the next bucket

`averaging_optimizer` calls `StepByBucket`, and `reducer` calls it back for each bucket. It runs only inside ``step()``:
during backward, autograd still reads the parameters to compute the gradients of earlier layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import GradientError
from ..updates.update import narrowed
from .reducer import Reducer


class StepByBucket:
    """Takes one step of an optimizer in several parts, with bit-identical results.

    This requires an optimizer that updates each parameter independently, from only its gradient, its state, and the
    options of its group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        # The number of each parameter's group, by the parameter's `id`.
        self._group_of: dict[int, int] = {}

    def step(self) -> None:
        """Waits for the averages, and steps on those of each bucket as soon as they are there."""
        groups = self._optimizer.param_groups
        self._group_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
        self._reducer.synchronize(self._update)
        self._reducer.state.require_sound()
        # On the remaining parameters, even if there are none: this call runs the LR scheduler's count of steps.
        with self._narrowed([[param for param in group["params"] if param.grad is not None] for group in groups]):
            self._optimizer.step()

    @property
    def is_possible(self) -> bool:
        """Whether the step may be taken in parts: no step hook is registered, and ``step`` is not replaced.

        Such code may read all gradients, unless it is an LR scheduler's.
        """
        optimizer = self._optimizer
        own_step = vars(optimizer).get("step")
        return not (
            _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or (own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"))
        )

    def _update(self, params: Iterable[Tensor]) -> None:
        """Takes the step on these parameters alone."""
        parts: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for param in params:
            # One that has left the groups within this step is let go after it.
            if (number := self._group_of.get(id(param))) is not None:
                parts[number].append(param)
        with self._narrowed(parts):
            # The class's method: an LR scheduler replaces the instance's, to count whole steps.
            type(self._optimizer).step(self._optimizer)

    @contextmanager
    def _narrowed(self, parts: list[list[Tensor]]) -> Iterator[None]:
        """A context in which the parameter groups hold only these parameters, a list for each group."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        with narrowed(groups, parts):
            yield
        for number, (group, earlier) in enumerate(zip(groups, before, strict=True)):
            self._require_unchanged(number, group, earlier)

    def _require_unchanged(self, number: int, group: dict[str, Any], earlier: dict[str, Any]) -> None:
        """Raises GradientError if a partial step changed an option, such as a count of steps kept in the group."""
        for key, value in group.items():
            if key not in earlier or earlier[key] is not value:
                raise GradientError(
                    f"step_on_arrival=True does not work with {type(self._optimizer).__name__}: its step changes "
                    f"param_groups[{number}][{key!r}], and would do so once for each bucket. Wrap it without "
                    "step_on_arrival"
                )
