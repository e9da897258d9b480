"""
Broadcasts an optimizer's state from the root to all ranks: groups' options, momenta, step counters.

    options, states ── pickled, but for their tensors ── broadcast ── unpickled, with tensors of this rank's devices
              tensors ── as bytes, in a few broadcasts ──┘

What an optimizer has is copied as it stands there: on its way through ``load_state_dict()`` every tensor would become
one of the parameter's dtype. Only optimizers that have a ``state_dict()`` of their own are asked for it. Ranks compare
what parameters they have and of what class their optimizers are, and nothing else.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..control.operation import BROADCAST_OPTIMIZER_STATE, Execution, Operation
from ..ops.base import submit
from ..ops.broadcast import broadcast_tensors, digest_of, from_bytes, to_bytes
from ..ops.sendable import check_sendable, is_sendable, plain_tensor
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import global_process_set, group_of
from ..values import shown
from .optimizer_proxy import OptimizerProxy

# The owner of a tensor that is no parameter's state.
_NOBODY = -1


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # Horovod's, for the step that it takes here
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state: learning rates, momenta, step counters.

    Afterwards each rank has what the root has and nothing else: options of parameter groups that only the root had, and
    none that only another rank had; state of the parameters for which the root has some. Values keep their types, and
    tensors their dtypes. ``optimizer.defaults``, which groups that are added later begin with, stay each rank's own, as
    in Horovod.

    Takes no step and changes no parameter; an optimizer that has no state yet stays without. ``model`` is needed for
    nothing, and may be given as to Horovod. A `MismatchError` on every rank where parameters have other shapes, or lie
    in other groups, or where the optimizers are of different classes.

    Several threads may call it at once for optimizers whose parameters have different shapes.
    """
    kind = BROADCAST_OPTIMIZER_STATE.name
    own = _checked(optimizer, kind)
    group = group_of(process_set, kind)
    root = group.group_rank_of_root(root_rank, kind)
    # Through the wrapper, which then waits for gradients that are on their way.
    groups = optimizer.param_groups
    params = [param for entry in groups for param in entry["params"]]
    for param in params:
        # The others have a shape, and need not travel themselves.
        if torch.nn.parameter.is_lazy(param) or param.is_nested:
            check_sendable(param, kind, "a parameter")
    shapes = [[list(param.shape) for param in entry["params"]] for entry in groups]
    same = {
        "root_rank": group.ranks[root],
        "class": type(own).__qualname__,
        "(parameter shapes by parameter group)": shapes,
    }
    is_root = group.rank == root
    packer = _Packer(params)
    data, error = to_bytes(own, packer.dumps) if is_root else (None, None)
    if error is not None:
        packer.clear()
    tensors = packer.tensors

    def run(execution: Execution) -> tuple[bytes, list[Tensor]]:
        received = execution.group.broadcast_signed(data, root, execution.what)
        metas = json.dumps([meta.pack() for meta in packer.metas]).encode() if is_root else None
        packed = json.loads(execution.group.broadcast_signed(metas, root, execution.what))
        room = tensors if is_root else [_Meta.unpack(each).empty(params) for each in packed]
        broadcast_tensors(room, root, execution)
        return received, room

    name = digest_of([type(own).__qualname__, shapes])
    operation = Operation(BROADCAST_OPTIMIZER_STATE, run, name, same, has_users_name=False)
    received, tensors = submit(operation, process_set, [*params, *tensors]).wait()
    # Where the root's cannot be pickled, the error is told on the root too.
    unpacker = _Unpacker(params, tensors)
    state = from_bytes(received, group.describe_rank(root), kind, error, unpacker.loads)
    if not is_root:
        state.give_to(own, params)


def _checked(optimizer: Any, kind: str) -> Any:
    """The optimizer itself, where it is wrapped."""
    if isinstance(optimizer, torch.optim.LBFGS):
        # Horovod's words.
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is not averaged by hvdlite either")
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise TypeError(f"{kind}: optimizer={shown(optimizer)} is not a torch.optim.Optimizer")
    return optimizer._optimizer if isinstance(optimizer, OptimizerProxy) else optimizer


@dataclass(frozen=True, slots=True)
class _Standing:
    """What an optimizer has, as it stands there."""

    options: list[dict[str, Any]]
    # By the parameter's number among all.
    states: dict[int, Any]
    # What is kept under keys that are no parameters.
    rest: dict[Any, Any]

    def give_to(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Have it be what this optimizer has."""
        for entry, options in zip(optimizer.param_groups, self.options, strict=True):
            members = entry["params"]
            # In place: a scheduler, or a wrapper, may hold the same dictionary.
            entry.clear()
            entry.update({"params": members, **options})
        optimizer.state.clear()
        optimizer.state.update({params[number]: state for number, state in self.states.items()})
        optimizer.state.update(self.rest)


@dataclass(frozen=True, slots=True)
class _StateDict:
    """What an optimizer says that it has, which has a way of its own to say so."""

    value: Any

    def give_to(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Have the optimizer load it."""
        optimizer.load_state_dict(self.value)


@dataclass(frozen=True, slots=True)
class _Meta:
    """What a rank needs to make room for a tensor that it does not have yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    # The number of the parameter whose state it is, which says on which device it has its place.
    owner: int

    def pack(self) -> list[Any]:
        """For a message; see `unpack`."""
        return [list(self.shape), str(self.dtype), self.on_cpu, self.owner]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> _Meta:
        shape, dtype, on_cpu, owner = packed
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")), on_cpu, owner)

    def empty(self, params: Sequence[Tensor]) -> Tensor:
        """Room for it, where the same has its place on this rank."""
        device = "cpu" if self.on_cpu or not params else params[max(0, self.owner)].device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class _Packer:
    """Pickles what an optimizer has, and keeps the tensors out of it."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._number_of = {id(param): number for number, param in enumerate(params)}
        self._owner = _NOBODY
        self._place_of: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.metas: list[_Meta] = []

    def dumps(self, optimizer: Any, pickler_class: type[pickle.Pickler]) -> bytes:
        """What `_Unpacker` makes the same of; ``tensors`` and ``metas`` are what it needs besides."""
        self.clear()
        file = io.BytesIO()
        pickler = pickler_class(file)
        pickler.persistent_id = self._persistent_id  # type: ignore[method-assign]  # as its documentation allows
        # Part by part, so that it is known whose tensors come.
        for owner, part in self._parts(optimizer):
            self._owner = owner
            pickler.dump(part)
        return file.getvalue()

    def clear(self) -> None:
        """Forget the tensors of what could not be pickled."""
        self.tensors.clear()
        self.metas.clear()
        self._place_of.clear()

    def _parts(self, optimizer: Any) -> Iterator[tuple[int, Any]]:
        if not _is_plain(optimizer):
            yield _NOBODY, False
            yield _NOBODY, optimizer.state_dict()
            return
        yield _NOBODY, True
        yield _NOBODY, [{k: v for k, v in entry.items() if k != "params"} for entry in optimizer.param_groups]
        own = [number for number, param in enumerate(self._params) if param in optimizer.state]
        yield _NOBODY, own
        for number in own:
            yield number, optimizer.state[self._params[number]]
        yield _NOBODY, {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}

    def _persistent_id(self, obj: object) -> tuple[str, int] | None:
        if not isinstance(obj, Tensor):
            return None
        number = self._number_of.get(id(obj))
        if number is not None:
            return "parameter", number
        if type(obj) not in (Tensor, torch.nn.Parameter) or not is_sendable(obj):
            # It knows itself how it is pickled.
            return None
        place = self._place_of.get(id(obj))
        if place is None:
            place = self._place_of[id(obj)] = len(self.tensors)
            self.tensors.append(plain_tensor(obj))
            self.metas.append(_Meta(tuple(obj.shape), obj.dtype, obj.device.type == "cpu", self._owner))
        return "tensor", place


class _Unpacker:
    """Makes of the bytes what they were, of this rank's parameters and the tensors that have come."""

    def __init__(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._params = params
        self._tensors = tensors

    def loads(self, data: bytes) -> Any:
        """What has come, or what says why nothing has."""
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._persistent_load  # type: ignore[method-assign]  # as for the pickler
        is_plain = unpickler.load()
        if not isinstance(is_plain, bool):
            # It is what says that there was nothing to be sent.
            return is_plain
        if not is_plain:
            return _StateDict(unpickler.load())
        options = unpickler.load()
        states = {number: unpickler.load() for number in unpickler.load()}
        return _Standing(options, states, unpickler.load())

    def _persistent_load(self, known: Any) -> Tensor:
        kind, number = known
        tensor: Tensor = (self._params if kind == "parameter" else self._tensors)[number]
        return tensor


def _is_plain(optimizer: Any) -> bool:
    """Whether all that it has lies in its groups and its state, as in those of `torch.optim`."""
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        getattr(getattr(optimizer, name), "__func__", None) is getattr(torch.optim.Optimizer, name)
        for name in ("state_dict", "load_state_dict")
    )
