"""
The parameters of an optimizer as several ranks have them: the same on all, and each with one listener.

What is done with them is in `reducer` and `deltas`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..channels.collective import Group
from ..errors import GradientError, MismatchError
from .plan import Description, first_difference


class ParamListener(ABC):
    """Hears, by a bound method, when a gradient has been added to; a parameter has one such listener at most."""

    @abstractmethod
    def close(self) -> None:
        """Listen no more."""


def take_over(params: Iterable[Tensor]) -> None:
    """Close whoever listens to these parameters so far: averaged twice, their gradients would be too small."""
    for param in params:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            earlier = getattr(hook, "__self__", None)
            if isinstance(earlier, ParamListener):
                earlier.close()


def listen(param: Tensor, on_gradient: object) -> RemovableHandle:
    """Have a bound method of a `ParamListener` called after each addition to the gradient."""
    # Only what requires a gradient can be hooked. A frozen parameter may be unfrozen later.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    if frozen:
        param.requires_grad_(False)
    assert isinstance(handle, RemovableHandle), "torch returns what removes the hook"
    return handle


def too_many_passes(name: str, backward_passes_per_step: int) -> GradientError:
    """What a listener raises at a gradient that is one backward pass too many."""
    # The first two sentences are Horovod's.
    return GradientError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. (The first: those of {name!r}, with "
        f"backward_passes_per_step={backward_passes_per_step}. Or wrap all backward passes but the last in `with "
        "optimizer.no_sync():`)"
    )


def require_same_model(group: Group, description: Description) -> None:
    """A MismatchError on every rank, which names the first parameter, if one has others; waits for all."""
    descriptions = group.agree(description, "comparing the models")
    if descriptions is not None:
        raise MismatchError(_words_of_difference(descriptions, group))


def _words_of_difference(descriptions: Sequence[Description], group: Group) -> str:
    for rank, description in enumerate(descriptions):
        difference = first_difference(descriptions[0], description)
        if difference is not None:
            name, here, there = difference
            return (
                f"parameter {name!r} has {here} on {group.describe_rank(0)} and {there} on "
                f"{group.describe_rank(rank)}: every rank must build the same model; check the arguments that "
                "size it"
            )
    raise AssertionError("called only where the descriptions differ")
