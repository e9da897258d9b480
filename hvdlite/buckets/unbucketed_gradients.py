"""
The homes of gradients outside buckets, which stay in ``param.grad`` between backward and step.

`InPlaceHome` is for all gradients of a single rank, `GatheredHome` for sparse gradients, whose rows are gathered; that
of Adasum's is in `adasum_step`. On a single rank, changes by the user that several ranks could not handle are errors
too, so that a program which works on one rank works on many.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import GradientError
from .gradient_state import GradientState, changed_too_early, require_sparse_untouched


class InPlaceHome:
    """Remembers gradients, so that `require_same` can detect changes by the user."""

    def take(self, state: GradientState, last_pass: bool) -> bool:
        """Remembers the gradient tensor."""
        grad = state.param.grad
        state.held = grad
        if last_pass:
            state.ready = True
            state.sparse = grad is not None and grad.layout is not torch.strided
            state.version = 0 if grad is None else grad._version
            # Several gradients may share one version counter, which autograd still raises. Only if it is 0 here does a
            # later change of it prove that the user has changed the gradient.
            state.fresh = grad is not None and grad._version == 0
        return False


def require_same(states: Iterable[GradientState]) -> None:
    """Raises GradientError if a complete gradient was changed, replaced or set to None."""
    for state in states:
        if state.ready and state.sparse:
            require_sparse_untouched(state)
        elif state.ready:
            grad = state.param.grad
            if grad is not state.held:
                how = "set to None" if grad is None else "replaced"
                raise changed_too_early(f"the gradient of {state.name} was {how}", state.param)
            if state.fresh and grad is not None and grad._version != 0:
                raise changed_too_early(f"the gradient of {state.name} was changed", state.param)


class GatheredHome:
    """Checks that a gradient stays sparse.

    A parameter is in a bucket until some rank has a sparse gradient for it. From then on this is its home.
    """

    def __init__(self, state: GradientState) -> None:
        self.state = state

    def take(self, state: GradientState, last_pass: bool) -> bool:
        """Raises GradientError if the gradient is dense."""
        grad = state.param.grad
        if grad is not None and grad.layout == torch.strided:
            raise GradientError(
                f"parameter {state.name!r} had sparse gradients in earlier steps and has a dense one now: keep "
                "it sparse or dense in all steps, or wrap the optimizer with sparse_as_dense=True"
            )
        state.held, state.version = grad, 0 if grad is None else grad._version
        if last_pass:
            state.ready = True
        return False
