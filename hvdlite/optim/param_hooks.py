"""
`ParamHooks`: autograd's hooks on an optimizer's parameters, which are called after each addition to a gradient.

    wrapped anew ── take_over: the earlier listener is closed ── hear ── autograd: on_gradient(param) ── remove
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .. import forks
from ..buckets.plan import can_have_gradient
from ..comm import deferred_close
from ..outside_graphs import keep_outside_graphs


class GradientListener(ABC):
    """What is told of gradients. At most one listens to a parameter."""

    @abstractmethod
    def on_gradient(self, param: Tensor) -> None:
        """Handles an addition to ``param.grad`` by autograd. Several threads may call it at once."""

    @abstractmethod
    def close(self) -> None:
        """Stops listening, since another one listens to the same parameters."""


class ParamHooks:
    """The hooks of one listener. They call its bound method, since autograd does so for each gradient."""

    def __init__(self, listener: GradientListener) -> None:
        self._listener = listener
        # By parameter.
        self._handles: dict[Tensor, RemovableHandle] = {}

    def hear(self, params: Sequence[Tensor]) -> None:
        """Hooks more parameters, and closes any earlier listener to them."""
        if forks.parent is not None:
            return
        deferred_close.prepare()
        take_over(params)
        on_gradient = self._listener.on_gradient
        self._handles |= {param: listen(param, on_gradient) for param in params if can_have_gradient(param.dtype)}

    def stop(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if (hook := self._handles.pop(param, None)) is not None:
                hook.remove()

    def remove(self) -> None:
        self.stop(list(self._handles))


def take_over(params: Iterable[Tensor]) -> None:
    """Closes any earlier listener to these parameters, since gradients averaged twice would be too small."""
    for param in params:
        for earlier in listeners_of(param):
            earlier.close()


def listeners_of(param: Tensor) -> list[GradientListener]:
    """Returns what listens to the parameter: at most one, unless an earlier one is about to be closed."""
    bound = [getattr(hook, "__self__", None) for hook in (param._post_accumulate_grad_hooks or {}).values()]
    return [each for each in bound if isinstance(each, GradientListener)]


def listen(param: Tensor, on_gradient: object) -> RemovableHandle:
    """Registers a bound method of a `GradientListener`, to be called after each addition to the gradient."""
    # PyTorch hooks only parameters that require a gradient, but a frozen one may be unfrozen later.
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    if frozen:
        param.requires_grad_(False)
    assert isinstance(handle, RemovableHandle), "torch returns what removes the hook"
    return handle


keep_outside_graphs(globals())
