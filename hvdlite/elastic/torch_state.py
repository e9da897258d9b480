"""
`TorchState`: models, optimizers, samplers, schedulers and plain attributes of an elastic program.

    TorchState(model=..., optimizer=..., epoch=0) ── a handler for each that has one ── save, restore
                                                  ├─ the others as attributes of an ObjectState
                                                  └─ sync ── `handover`: all of it in one operation

Saved state is in memory: a copy of each tensor, on the same device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..calls.operation import ELASTIC_STATE
from ..comm.reduce_op import Min
from ..ops.api import allreduce, barrier
from ..ops.broadcast import broadcast_object
from ..ops.sendable import check_sendable, check_writable, plain_tensor
from ..ops.typed_values import ValueDecoder, ValueEncoder
from ..optim.optimizer import DistributedOptimizer
from ..optim.optimizer_state import (
    Filler,
    encode_state,
    loading_in_place,
    params_of,
    require_undivided,
    take_state,
    unwrapped,
    what_is_equal,
)
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set
from ..runtime.world import rank, require_ended
from .handover import Handed, InPlace, hand_over
from .sampler import ElasticSampler
from .state import SAVED, HostsUpdatedInterrupt, ObjectState


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

    def reset_after_callbacks(self) -> None:
        """Adapt the object once the reset callbacks have been called. Does nothing unless it is overridden."""

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler, Handed):
    """For objects with `state_dict` and `load_state_dict`, such as schedulers and GradScaler. Sends typed values.

    A `TorchState` sends the objects of all such handlers together, unless a derived class defines a `sync` of its own.
    """

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def differs_by_rank(self) -> bool:
        """Whether ranks may have different states of the object after the same commit."""
        return False

    def save_changes(self) -> None:
        """Save, where only little has changed since the last `save` or `restore`."""
        self.save()

    def restore(self) -> None:
        # Copied once more: some keep what they are given, and it may be restored again.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        hand_over({"": self}, None, 0)

    def encode(self, encoder: ValueEncoder) -> Any:
        return encoder.encode(self.value.state_dict(), "state_dict()")

    def given(self) -> None:
        # As the other ranks do: a sampler divides the rest of the epoch anew.
        self.value.load_state_dict(self.value.state_dict())

    def take(self, tree: Any, decoder: ValueDecoder, *, is_whole: bool) -> None:
        self.value.load_state_dict(decoder.decode(tree))


class _LargeStateHandler(StateDictHandler):
    """For objects with large tensors: `save_changes` copies only those that have changed."""

    # The tensors when they were saved or restored, with their numbers of changes. While they are kept here, no other
    # tensor can be in the same memory.
    _before: Sequence[tuple[torch.Tensor, int]] = ()

    def save(self) -> None:
        self._save(self.value.state_dict(), {})

    def save_changes(self) -> None:
        current = self.value.state_dict()
        tensors, saved = list(_tensors_in(current)), list(_tensors_in(self._saved))
        unchanged = {}
        if len(tensors) == len(self._before) == len(saved):
            for now, (before, changes), copied in zip(tensors, self._before, saved, strict=True):
                if now.data_ptr() == before.data_ptr() and _changes(now) == changes and _form(now) == _form(copied):
                    unchanged[id(now)] = copied
        self._save(current, unchanged)

    def _save(self, current: Any, unchanged: dict[int, Any]) -> None:
        self._saved = copy.deepcopy(current, unchanged)
        self._note(current)

    def restore(self) -> None:
        super().restore()
        self._note(self.value.state_dict())

    def given(self) -> None:
        return

    def _note(self, current: Any) -> None:
        self._before = [(tensor, _changes(tensor)) for tensor in _tensors_in(current)]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each)


def _changes(tensor: torch.Tensor) -> int:
    # Tensors of inference mode do not count them: equal to no number.
    return -1 if tensor.is_inference() else tensor._version


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


class ModelStateHandler(_LargeStateHandler):
    """For modules: sends parameters and buffers as tensors, which are received in place."""

    value: torch.nn.Module

    def in_place(self) -> Sequence[InPlace]:
        params = {name for name, _ in self.value.named_parameters(remove_duplicate=False)}
        entries = []
        for name, tensor in sorted(self.value.state_dict().items()):
            if isinstance(tensor, torch.Tensor):
                check_sendable(tensor, ELASTIC_STATE.name, repr(name))
                check_writable(tensor, ELASTIC_STATE.name, repr(name))
                entries.append(InPlace(name, plain_tensor(tensor), name in params))
        return entries

    def encode(self, encoder: ValueEncoder) -> Any:
        # What modules return in `get_extra_state`.
        others = {name: each for name, each in self.value.state_dict().items() if not isinstance(each, torch.Tensor)}
        return encoder.encode(others, "state_dict()")

    def take(self, tree: Any, decoder: ValueDecoder, *, is_whole: bool) -> None:
        if others := decoder.decode(tree):
            self.value.load_state_dict({**self.value.state_dict(), **others})


class OptimizerStateHandler(_LargeStateHandler):
    """For optimizers, wrapped or not: sends their state as tensors. Drops the gradients of a given-up step."""

    _has_old_gradients = False

    @property
    def shares(self) -> bool:
        """Whether ranks share the optimizer's state."""
        return isinstance(self.value, DistributedOptimizer) and self.value.shard is not None

    @property
    def holds_parts(self) -> bool:
        """Whether this rank has a part alone of the optimizer's state."""
        return isinstance(self.value, DistributedOptimizer) and self.value._states.holds_parts

    def gather(self) -> None:
        """Makes the state that `save` saves that of all ranks, where they share it. Every rank must call it."""
        if self.shares:
            self.value.consolidate_state_dict(to=None)

    def make_whole(self) -> None:
        """Gives every rank all of the state, where ranks share it: others may do so next. Every rank must call it."""
        if self.shares:
            self.gather()
            with loading_in_place(self.value):
                self.value.load_state_dict(self.value.state_dict())

    def save(self) -> None:
        if not self.holds_parts:
            super().save()
            return
        current = self.value.state_dict()
        if "shard" in current.get("hvdlite", {}):
            raise ValueError(
                "TorchState.save: this rank has a part alone of the optimizer's state: call state.commit() on all ranks"
            )
        # Nobody writes to the tensors that `gather` has made.
        self._saved = copy.deepcopy(current, {id(tensor): tensor for tensor in _tensors_in(current["state"])})
        self._before = ()

    def restore(self) -> None:
        # Ranks that are new have the tensors and groups that their program made, so those that stay must keep theirs.
        with loading_in_place(self.value):
            super().restore()
        # Once more, now that the tensors are in their places.
        self._note(self.value.state_dict())
        self.give_up_step()

    def give_up_step(self) -> None:
        """Notes that its gradients are of no use."""
        # They are dropped in the next world, since in one that has lost a rank averages may still be on their way.
        self._has_old_gradients = True

    def reset_after_callbacks(self) -> None:
        # An optimizer's process set may be added again only by a callback.
        if self._has_old_gradients:
            self._has_old_gradients = False
            self.value.zero_grad()

    def what_is_equal(self) -> Mapping[str, Any]:
        return what_is_equal(self._unwrapped())

    def differs_by_rank(self) -> bool:
        return isinstance(self.value, DistributedOptimizer) and self.value.process_set is not global_process_set

    def encode(self, encoder: ValueEncoder) -> Any:
        require_undivided(self.value, "TorchState.sync")
        return encode_state(self._unwrapped(), encoder)

    def params(self) -> Sequence[torch.Tensor]:
        return params_of(self.value)

    def take(self, tree: Any, decoder: ValueDecoder, *, is_whole: bool) -> None:
        take_state(tree, decoder, self._unwrapped(), is_whole=is_whole)

    def _unwrapped(self) -> Any:
        return unwrapped(self.value, ELASTIC_STATE.name)


class SamplerStateHandler(StateDictHandler):
    """For `ElasticSampler`: sends rank 0's progress in the epoch; `reset` divides the rest among the current ranks."""

    def reset(self) -> None:
        self.value.reset()


class _Attributes(Handed):
    """The other attributes of a state, as an object that `hand_over` takes."""

    def __init__(self, state: TorchState, names: Sequence[str]) -> None:
        self._state, self._names = state, names

    def encode(self, encoder: ValueEncoder) -> Any:
        return [[name, encoder.encode(getattr(self._state, name), name)] for name in self._names]

    def take(self, tree: Any, decoder: ValueDecoder, *, is_whole: bool) -> None:
        for name, encoded in tree:
            self._state._take_attribute(name, decoder.decode(encoded))


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
    return next((handler(value) for kind, handler in _registry.items() if isinstance(value, kind)), None)


def _has_gpu_parameters(handlers: Iterable[StateHandler]) -> bool:
    return any(param.is_cuda for each in handlers if isinstance(each, StateDictHandler) for param in each.params())


# Among the names of objects, that of all other attributes together.
_REST = "*"


class TorchState(ObjectState):
    """The state of an elastic PyTorch program: ``TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)``.

    Modules, optimizers (wrapped or not), learning-rate schedulers, GradScaler and `ElasticSampler` are saved, restored
    and sent in place: the objects stay the same, and so do tensors among an optimizer's options and parameter groups.
    All other arguments must be picklable values; of these only tensors stay the same. Every rank must use the same
    names. Assigning another object to one of these names replaces the old one, and saves the new one.
    """

    _handlers: Mapping[str, StateHandler] = {}  # until it is made

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in given.items() if (handler := _handler_of(value)) is not None}
        self._handlers = handlers
        plain = {name: value for name, value in given.items() if name not in handlers}
        self._given_tensors = {name: value for name, value in plain.items() if isinstance(value, torch.Tensor)}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)
        for name, handler in handlers.items():
            super().__setattr__(name, handler.value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def _is_known(self, name: str) -> bool:
        return name in self._handlers or super()._is_known(name)

    def on_reset(self) -> None:
        super().on_reset()
        self._each(lambda handler: handler.reset_after_callbacks())

    def save(self) -> None:
        self._each(lambda handler: handler.save())
        super().save()

    def _require_ended(self) -> None:
        # A GPU's wait for a lost rank can only be aborted, while the program is ahead of it: then the optimizer has
        # used gradients that are no averages. So no rank saves before the collectives of all have ended well.
        if _has_gpu_parameters(self._handlers.values()):
            require_ended("state.commit()")
            barrier()
        # Before anything is saved: a rank may be lost in it.
        self._each_optimizer(OptimizerStateHandler.gather)

    def _give_up_step(self) -> None:
        self._each_optimizer(OptimizerStateHandler.give_up_step)

    def _each_optimizer(self, do: Callable[[OptimizerStateHandler], None]) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                do(handler)

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on every rank if rank 0 knows of hosts that were added or removed.

        Every rank must call it, and waits for rank 0. Where ranks share an optimizer's state, each has all of it then.
        """
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self._each_optimizer(OptimizerStateHandler.make_whole)
            raise

    def restore(self) -> None:
        self._each(lambda handler: handler.restore())
        earlier = {name: getattr(self, name) for name in self._saved_state}
        super().restore()
        for name, value in earlier.items():
            restored = getattr(self, name)
            super().__setattr__(name, value)
            self._take_attribute(name, restored)

    def _take_attribute(self, name: str, value: Any) -> None:
        # The program may use a tensor that it has given elsewhere too, such as a learning rate. Where it has assigned
        # another one since, that may be any part of its data, which is not to be overwritten.
        own = self._given_tensors.get(name)
        setattr(self, name, Filler(()).fill(own, value) if own is getattr(self, name) else value)

    def sync(self) -> None:
        """Give everything of every rank the state that rank 0's has now, and save it. Every rank must call it."""
        for name, handler in self._handlers.items():
            # Not where some have come to the same ranks, or have gone back to a commit.
            if isinstance(handler, OptimizerStateHandler) and handler.shares:
                has_parts = torch.tensor(handler.holds_parts, dtype=torch.int32, device="cpu")
                if allreduce(has_parts, op=Min, name=f"TorchState.sync of {name}"):
                    handler.make_whole()
        handed: dict[str, Handed] = {}
        for name, handler in self._handlers.items():
            if isinstance(handler, StateDictHandler) and type(handler).sync is StateDictHandler.sync:
                handed[name] = handler
            else:
                handler.sync()
        names = tuple(self._saved_state)
        handed[_REST] = _Attributes(self, names)
        # The ranks outside of an optimizer's process set have older parameters, though they have the same commit.
        differs = any(isinstance(each, StateDictHandler) and each.differs_by_rank() for each in self._handlers.values())
        own_state = None if differs else self._here
        receipt = hand_over(handed, own_state, self._saves or 0, lambda name: self._title(name, names))
        # Only now, so that a rank that is lost in between leaves no half of a commit.
        is_saved = self._here is not None and self._here[0] == SAVED and not receipt.is_whole
        self._saves = receipt.commits
        for handler in self._handlers.values():
            if is_saved and isinstance(handler, StateDictHandler):
                handler.save_changes()
            else:
                handler.save()
        super().save()

    def _title(self, name: str, names: Sequence[str]) -> str:
        return f"{type(self).__name__}({', '.join(names) if name == _REST else name})"

    def reset(self) -> None:
        """Divide samplers anew among the ranks that there are now."""
        self._each(lambda handler: handler.reset())
        super().reset()

    def _each(self, do: Callable[[StateHandler], None]) -> None:
        for handler in self._handlers.values():
            do(handler)


keep_outside_graphs(globals())
