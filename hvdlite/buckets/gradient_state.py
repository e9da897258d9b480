"""
`GradientState`: the progress of one parameter's gradient in the current step, and its *home*.

The home keeps the gradient between backward and step. It is a `bucket`, or one of `unbucketed_gradients`. `layout`
creates the states; `reducer` looks one up for every gradient.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

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


def require_sparse_untouched(state: GradientState) -> None:
    """Raises GradientError if a complete sparse gradient was changed, replaced or set to None."""
    grad = state.param.grad
    if grad is not state.held:
        how = "set to None" if grad is None else "replaced"
        raise changed_too_early(f"the gradient of {state.name} was {how}", state.param)
    if grad is not None and grad._version != state.version:
        raise changed_too_early(f"the gradient of {state.name} was changed", state.param)


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


@contextmanager
def explaining_lost_graphs() -> Iterator[None]:
    """Says of an optimizer's step that differentiates gradients why it cannot: averages have no graph."""
    try:
        yield
    except RuntimeError as error:
        # Of PyTorch's error for a tensor without a graph.
        if "does not require grad and does not have a grad_fn" not in str(error):
            raise
        raise GradientError(
            "the optimizer differentiates the gradients, and averages have no graph, with backward(create_graph=True) "
            "too: compute its second derivatives before step(), from this rank's own gradients, by "
            "torch.autograd.grad(loss, params, create_graph=True), and average them with hvd.allreduce"
        ) from error


def changed_too_early(what: str, param: Tensor) -> GradientError:
    """Returns the error for a gradient that was changed before it was averaged; ``what`` begins the message."""
    if _is_in_ddp(param):
        return GradientError(
            f"{what} while it was being averaged, by DistributedDataParallel (DDP), which averages the same gradients: "
            "use one of the two, hvd.DistributedOptimizer without DDP, or DDP with the original optimizer"
        )
    return GradientError(
        f"{what} while it was being averaged, so the ranks would have come to differ. To clip, leave clip_grad_norm_ "
        "out, and give hvd.DistributedOptimizer(..., max_norm=...). Otherwise call optimizer.synchronize() after "
        "backward() and before changing or dropping gradients; register hooks that change gradients before "
        "hvd.DistributedOptimizer(...)"
    )


def _is_in_ddp(param: Tensor) -> bool:
    # A parameter has no reference to its modules, but DDP has a list of them. Only referrers are looked up: a list of
    # all objects would have those that other threads are still making, which then fail in C.
    lists = [each for each in gc.get_referrers(param) if type(each) is list]
    owners = [owner for each in lists for owner in gc.get_referrers(each)]
    owners += [owner for each in owners if type(each) is dict for owner in gc.get_referrers(each)]
    return any(issubclass(type(owner), DistributedDataParallel) for owner in owners)
