"""
``step_on_arrival``: runs the optimizer's step bucket by bucket, while the gradients of other buckets still travel.

    averages of a bucket ── param_groups narrowed to its parameters ── step ── gradients gone ── the next bucket

When a bucket's averages are there is for `reducer` to say. Inside ``step()`` alone: during backward the parameters are
still read, to compute the gradients of what came before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import GradientError
from .reducer import Reducer


class StepByBucket:
    """One step of an optimizer in several parts; its bits are those of the step as a whole.

    For that the optimizer must update each parameter by itself: from the parameter's gradient, its state, and the
    options of its group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        # The parameter groups by the `id` of each parameter.
        self._group_of: dict[int, int] = {}

    def take(self) -> bool:
        """Wait for the averages and step; False, with nothing done, if the step is to be taken as a whole."""
        if self._is_watched():
            return False
        groups = self._optimizer.param_groups
        self._group_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
        self._reducer.synchronize(self._update)
        self._reducer.require_sound()
        # On what is left, be it nothing: this is the step that counts.
        with self._narrowed([[param for param in group["params"] if param.grad is not None] for group in groups]):
            self._optimizer.step()
        return True

    def drop_gradients(self) -> None:
        """Drop the gradients after a step, whether it was taken by bucket or at once."""
        self._reducer.drop_gradients()

    def _is_watched(self) -> bool:
        """Whether a step hook is registered, or ``step`` replaced on the instance by more than an LR scheduler's count.

        These see the step as a whole, and may look at all gradients.
        """
        optimizer = self._optimizer
        own_step = vars(optimizer).get("step")
        return bool(
            _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or (own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"))
        )

    def _update(self, params: Iterable[Tensor]) -> None:
        """Take the step on these parameters alone."""
        parts: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for param in params:
            parts[self._group_of[id(param)]].append(param)
        with self._narrowed(parts):
            # The class's own: that of a scheduler, on the instance, counts whole steps.
            type(self._optimizer).step(self._optimizer)

    @contextmanager
    def _narrowed(self, parts: list[list[Tensor]]) -> Iterator[None]:
        """Let the parameter groups hold these parameters inside."""
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            # In place: an optimizer within the optimizer may hold the same groups.
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            yield
        finally:
            for group, earlier in zip(groups, before, strict=True):
                group["params"] = earlier["params"]
        for number, (group, earlier) in enumerate(zip(groups, before, strict=True)):
            self._require_unchanged(number, group, earlier)

    def _require_unchanged(self, number: int, group: dict[str, Any], earlier: dict[str, Any]) -> None:
        """An optimizer that keeps count in its groups would count the parts of a step."""
        for key, value in group.items():
            if key not in earlier or earlier[key] is not value:
                raise GradientError(
                    f"step_on_arrival: the step of {type(self._optimizer).__name__} changes "
                    f"param_groups[{number}][{key!r}], and would do so once for each bucket: it does not update every "
                    "parameter by itself; wrap it without step_on_arrival"
                )
