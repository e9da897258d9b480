"""
`Slot`: the state of one parameter's gradient in the current step.

Where the gradient itself is kept is its *home*: a `bucket`, or one of `homes`.
"""

from __future__ import annotations

import gc
from typing import Protocol

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import GradientError
from .plan import Slice


class Home(Protocol):
    """Where a gradient is kept between backward and step."""

    def take(self, slot: Slot, /, last_pass: bool) -> bool:
        """Keep what has just been added to ``param.grad``, which is complete if it was the last pass.

        Whether that was the last gradient that a bucket waited for.
        """
        ...


class Slot:
    """One parameter's place in a bucket, and how far it is in this step."""

    __slots__ = ("arrived", "fresh", "home", "name", "param", "passes", "piece", "scaled", "sparse", "view")

    def __init__(self, home: Home, piece: Slice, param: Tensor) -> None:
        self.home = home
        self.piece = piece
        self.name = piece.spec.name
        self.param = param
        # What `param.grad` is to be: the gradient's place in the flat buffer, once the bucket has taken memory.
        self.view: Tensor | None = None
        self.passes = 0
        self.arrived = False
        self.sparse = False
        # Whether the view holds the gradient times the bucket's scale already.
        self.scaled = False
        # Whether no pass has added to the gradient since it was made.
        self.fresh = False


def misfit(slot: Slot, grad: Tensor) -> GradientError:
    """What is raised where a gradient is no longer of the kind that the bucket was planned for."""
    spec = slot.piece.spec
    return GradientError(
        f"parameter {slot.name!r} had dtype {spec.dtype} on {spec.device} when the optimizer was "
        f"wrapped and has a gradient of {grad.dtype} on {grad.device} now: move or convert the model "
        "before hvd.DistributedOptimizer(...)"
    )


def changed_too_early(what: str, param: Tensor) -> GradientError:
    """What is raised where a gradient, such as this parameter's, has been changed before the averages were there."""
    if _is_in_ddp(param):
        return GradientError(
            f"{what} while it was on its way between the ranks, by DistributedDataParallel (DDP), which averages the "
            "same gradients: use one of the two, hvd.DistributedOptimizer with the model that is in DDP, or DDP with "
            "the optimizer that was wrapped"
        )
    return GradientError(
        f"{what} while it was on its way between the ranks, which would have made them differ: call "
        "optimizer.synchronize() after backward() and before clipping, changing or dropping gradients; hooks that "
        "change them belong on the parameters before hvd.DistributedOptimizer(...)"
    )


def _is_in_ddp(param: Tensor) -> bool:
    # A parameter does not know its modules; where an error is about to be raised there is time to look.
    modules = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return any(param is other for module in modules for other in module.parameters())
