"""
`KeptGradients`: autograd's own gradients of a step, from which it can be averaged again if a rank is lost.

A bucket copies each gradient into its buffer, and the sums of all ranks take its place there. `reducer` keeps the
tensor that autograd has made, which costs the memory of all gradients once more, and no copy. It copies only what
autograd has added to in a bucket's buffer: after `zero_grad(set_to_none=False)`, or in the later of several passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from ..buckets.gradient_state import GradientState


class _Kept(NamedTuple):
    gradient: Tensor | None
    passes: int
    is_ready: bool


class KeptGradients:
    """The gradients of one optimizer's current step on this rank."""

    def __init__(self) -> None:
        # By the parameter's `id`, as in `Layout.states`.
        self._gradients: dict[int, Tensor] = {}
        self._states: dict[int, _Kept] = {}

    def keep(self, state: GradientState) -> None:
        """Keeps ``param.grad``, before a bucket takes it."""
        grad = state.param.grad
        if grad is not None:
            self._gradients[id(state.param)] = grad.detach().clone() if grad is state.view else grad

    def keep_rest(self, states: Mapping[int, GradientState]) -> None:
        """Keeps incomplete gradients too, and how far each gradient is. Call it before the last buckets are sent."""
        for state in states.values():
            if not state.ready:
                self.keep(state)
        gradients = self._gradients
        self._states = {own: _Kept(gradients.get(own), state.passes, state.ready) for own, state in states.items()}

    def put_back(self, states: Iterable[GradientState]) -> None:
        """Gives the parameters the gradients that they had before the step was sent, and has new buckets take them."""
        for state in states:
            kept = self._states[id(state.param)]
            state.param.grad = kept.gradient
            state.passes = kept.passes
            if kept.is_ready:
                state.home.take(state, True)

    def begin(self) -> None:
        """Forgets what `keep` has kept, for the next step; `put_back` still has what `keep_rest` found."""
        self._gradients.clear()

    def forget(self) -> None:
        """Frees the gradients, since all ranks have the averages, or the step has failed."""
        self._gradients.clear()
        self._states.clear()
