"""
`TorchState`: models, optimizers, samplers, schedulers and plain attributes of an elastic program.

    TorchState(model=..., optimizer=..., epoch=0) ── a handler for each that has one ── save, restore, sync
                                                  └─ the others as attributes of an ObjectState

Saved state is in memory: a copy of each tensor, on the same device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..ops.broadcast import broadcast_object, broadcast_parameters
from ..optim.optimizer_state import broadcast_optimizer_state
from ..runtime.world import rank
from .sampler import ElasticSampler
from .state import ObjectState


class StateHandler:
    """Saves, restores and sends one object of a `TorchState`, in place.

    ``value`` is the object. For types of your own, derive a class and add it with `set_handler_registry`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Save a copy of the object's state."""
        raise NotImplementedError(f"{type(self).__name__}.save")

    def restore(self) -> None:
        """Give the object the state that was saved last."""
        raise NotImplementedError(f"{type(self).__name__}.restore")

    def sync(self) -> None:
        """Give the object of every rank the state of rank 0's. Every rank must call it.

        `TorchState.sync` calls `save` once all handlers have done this; Horovod's handlers save here.
        """
        raise NotImplementedError(f"{type(self).__name__}.sync")

    def reset(self) -> None:
        """Adapt the object to a new world. Does nothing unless it is overridden."""

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = value
        self.save()


class _HasStateDict(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StateDictHandler(StateHandler):
    """For objects with `state_dict` and `load_state_dict`, such as schedulers and GradScaler. Sends a pickle."""

    value: _HasStateDict

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Copied once more: some keep what they are given, and it may be restored again.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """For modules: sends parameters and buffers as tensors, which are received in place."""

    value: torch.nn.Module

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict())


class OptimizerStateHandler(StateDictHandler):
    """For optimizers, wrapped or not: sends their state as tensors. After a restore, `reset` drops the gradients."""

    value: torch.optim.Optimizer
    _has_old_gradients = False

    def restore(self) -> None:
        super().restore()
        # They are dropped in the next world, since in one that has lost a rank averages may still be on their way.
        self._has_old_gradients = True

    def reset(self) -> None:
        if self._has_old_gradients:
            self._has_old_gradients = False
            self.value.zero_grad()

    def sync(self) -> None:
        broadcast_optimizer_state(self.value)


class SamplerStateHandler(StateDictHandler):
    """For `ElasticSampler`: sends rank 0's progress in the epoch; `reset` divides the rest among the current ranks."""

    value: ElasticSampler

    def reset(self) -> None:
        self.value.reset()


Registry = dict[type, type[StateHandler]]

_registry: Registry = {
    torch.nn.Module: ModelStateHandler,
    torch.optim.Optimizer: OptimizerStateHandler,
    ElasticSampler: SamplerStateHandler,
    LRScheduler: StateDictHandler,
    torch.amp.GradScaler: StateDictHandler,
}


def get_handler_registry() -> Registry:
    """Return the table of handlers by type, not a copy. An object gets the first one whose type fits."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the table of handlers."""
    global _registry  # noqa: PLW0603  # as in Horovod, whose programs call it
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    found = (handler for kind, handler in _registry.items() if isinstance(value, kind))
    handler = next(found, None)
    return None if handler is None else handler(value)


class TorchState(ObjectState):
    """The state of an elastic PyTorch program: ``TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)``.

    Modules, optimizers (wrapped or not), learning-rate schedulers, GradScaler and `ElasticSampler` are saved, restored
    and sent in place: the objects stay the same. All other arguments must be picklable values. Every rank must use the
    same names. Assigning another object to one of these names replaces the old one, and saves the new one.
    """

    _handlers: Mapping[str, StateHandler] = {}  # until it is made

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in given.items() if (handler := _handler_of(value)) is not None}
        self._handlers = handlers
        plain = {name: value for name, value in given.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)
        for name, handler in handlers.items():
            super().__setattr__(name, handler.value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def _is_known(self, name: str) -> bool:
        return name in self._handlers or super()._is_known(name)

    def save(self) -> None:
        """Save copies of the current state of everything."""
        self._each(lambda handler: handler.save())
        super().save()

    def restore(self) -> None:
        """Give everything the state that was saved last."""
        self._each(lambda handler: handler.restore())
        super().restore()

    def sync(self) -> None:
        """Give everything of every rank the state that rank 0's has now, and save it. Every rank must call it."""
        self._each(lambda handler: handler.sync())
        super().sync()
        # Only now, so that a rank that is lost in between leaves no half of a commit.
        self._each(lambda handler: handler.save())

    def reset(self) -> None:
        """Divide samplers anew among the ranks that there are now."""
        self._each(lambda handler: handler.reset())
        super().reset()

    def _each(self, do: Callable[[StateHandler], None]) -> None:
        for handler in self._handlers.values():
            do(handler)
