"""
`GradientState`: the progress of one parameter's gradient in the current step, and its *home*.

The home keeps the gradient between backward and step. It is a `bucket`, or the gradient stays in ``param.grad``:
`InPlaceHome` is for all gradients of a single rank, `GatheredHome` for sparse gradients, whose rows are gathered, and
Adasum's is in `adasum_step`. On a single rank, changes by the user that several ranks could not handle are errors too,
so that a program which works on one rank works on many. `layout` creates the states; `reducer` looks one up for every
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ..errors import GradientError
from .plan import Slice


class Home(Protocol):
    """The object that keeps a gradient between backward and step."""

    def take(self, state: GradientState, /, last_pass: bool) -> bool:
        """Keeps ``param.grad``, to which a backward pass has just added. It is complete if this was the last pass.

        Returns True if it was the last gradient that a bucket waited for.
        """
        ...


class GradientState:
    """One parameter's home and slice of a bucket, and the progress of its gradient in this step."""

    __slots__ = (
        "awaited", "fresh", "frozen", "held", "home", "late", "name", "param", "passes", "piece", "ready", "scaled",
        "sparse", "version", "view",
    )  # fmt: skip

    def __init__(self, home: Home, piece: Slice, param: Tensor) -> None:
        self.home = home
        self.piece = piece
        self.name = piece.spec.name
        self.param = param
        # The view of the bucket's buffer that `param.grad` is set to, once the bucket has memory.
        self.view: Tensor | None = None
        # In this step: `param.grad` as its home has left it. Autograd adds to it in place, or the user has dropped it.
        self.held: Tensor | None = None
        self.passes = 0
        # Whether no rank trained the parameter in the last step. Equal on all ranks.
        self.frozen = not self.piece.spec.trainable
        # Whether the bucket waits for the gradient in this step before it is sent during backward.
        self.awaited = True
        # Whether the gradient has come after the bucket was sent, and so waits in `param.grad` for a further round.
        self.late = False
        # Whether the gradient is complete for this step.
        self.ready = False
        self.sparse = False
        # The `Tensor._version` of a sparse gradient, as its home has left it.
        self.version = 0
        # Whether the view already holds the gradient times the bucket's scale.
        self.scaled = False
        # Whether no pass has added to the gradient since autograd created it.
        self.fresh = False


class InPlaceHome:
    """Remembers gradients, so that `require_same` can detect changes by the user."""

    def take(self, state: GradientState, last_pass: bool) -> bool:
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


class GatheredHome:
    """Checks that a gradient stays sparse, once some rank has had a sparse one for the parameter."""

    def __init__(self, state: GradientState) -> None:
        self.state = state

    def take(self, state: GradientState, last_pass: bool) -> bool:
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


def require_same(states: Iterable[GradientState]) -> None:
    """Raises GradientError if a complete gradient in ``param.grad`` was changed, replaced or set to None."""
    for state in states:
        if state.ready and state.sparse:
            require_sparse_untouched(state)
        elif state.ready:
            grad = state.param.grad
            if grad is not state.held:
                raise replaced(state)
            if state.fresh and grad is not None and grad._version != 0:
                raise changed_too_early(f"the gradient of {state.name} was changed")


def require_sparse_untouched(state: GradientState) -> None:
    """Raises GradientError if a complete sparse gradient was changed, replaced or set to None."""
    grad = state.param.grad
    if grad is not state.held:
        raise replaced(state)
    if grad is not None and grad._version != state.version:
        raise changed_too_early(f"the gradient of {state.name} was changed")


def replaced(state: GradientState) -> GradientError:
    """Returns the error for a gradient that is not in ``param.grad`` any more."""
    how = "set to None" if state.param.grad is None else "replaced"
    return changed_too_early(f"the gradient of {state.name} was {how}")


def misfit(state: GradientState, grad: Tensor) -> GradientError:
    """Returns the error for a gradient whose dtype or device is not that of its bucket."""
    spec = state.piece.spec
    if (state.param.dtype, state.param.device, state.param.shape) == (spec.dtype, spec.device, spec.shape):
        # Before a pass, PyTorch lets a gradient be different from its parameter by this attribute alone.
        return GradientError(
            f"parameter {state.name!r} has dtype {spec.dtype} on {spec.device}, and a gradient of {grad.dtype} on "
            f"{grad.device}: hvdlite averages gradients in the dtype of their parameters. Leave out param.grad_dtype, "
            "and convert what optimizer.synchronize() has averaged; or keep the parameters in that dtype, and compute "
            "in the other one with torch.autocast"
        )
    return GradientError(
        f"parameter {state.name!r} had dtype {spec.dtype} on {spec.device} when the optimizer was wrapped, with shape "
        f"{spec.shape}, and has a gradient of {grad.dtype} on {grad.device} with shape {tuple(grad.shape)} now: move, "
        "convert or resize the model before hvd.DistributedOptimizer(...)"
    )


def changed_too_early(what: str) -> GradientError:
    """Returns the error for a gradient that was changed before it was averaged; ``what`` begins the message."""
    return GradientError(
        f"{what} while it was being averaged, so the ranks would have come to differ. To clip, leave clip_grad_norm_ "
        "out, and give hvd.DistributedOptimizer(..., max_norm=...). Leave DistributedDataParallel out, which averages "
        "the same gradients. Otherwise call optimizer.synchronize() after backward() and before changing or dropping "
        "gradients; register hooks that change gradients before hvd.DistributedOptimizer(...)"
    )
