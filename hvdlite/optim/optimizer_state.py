"""
`broadcast_optimizer_state`: sends an optimizer's state from the root to all ranks: options, momenta, step counters.

    options, states ── pickled without their tensors ── broadcast ── unpickled, with tensors on this rank's devices
              tensors ── as bytes, in a few broadcasts ──┘

The optimizer's ``param_groups`` and ``state`` are copied directly, since ``load_state_dict()`` would cast every tensor
to the parameter's dtype. ``state_dict()`` is used only for optimizers that override it. Ranks first compare the shapes
of their parameters and the classes of their optimizers, and nothing else.
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

# The owner of a tensor that does not belong to one parameter's state.
_NOBODY = -1


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # unused: Horovod takes a step here, and needs it for that
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Sends the root's optimizer state to every rank: learning rates, momenta, step counters.

    Every rank must call it. Afterwards each rank has exactly the root's options of parameter groups and state of
    parameters: whatever only another rank had is removed. Values keep their types, and tensors their dtypes.
    ``optimizer.defaults``, which apply to groups that are added later, are not sent, as in Horovod.

    Takes no step and changes no parameter. If the root's optimizer has no state yet, none has any afterwards. ``model``
    is ignored, and accepted since Horovod has it. Raises `MismatchError` on every rank if the ranks' parameters have
    different shapes or groups, or if their optimizers have different classes.

    Several threads may call it at once for optimizers whose parameters have different shapes.
    """
    kind = BROADCAST_OPTIMIZER_STATE.name
    own = _checked(optimizer, kind)
    group = group_of(process_set, kind)
    root = group.group_rank_of_root(root_rank, kind)
    # The property of a DistributedOptimizer waits for gradients that are being averaged.
    groups = optimizer.param_groups
    params = [param for entry in groups for param in entry["params"]]
    for param in params:
        # Other parameters are not sent themselves: only their shapes are needed.
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
    # If the root cannot pickle its state, this raises the error, on the root as well.
    unpacker = _Unpacker(params, tensors)
    state = from_bytes(received, group.describe_rank(root), kind, error, unpacker.loads)
    if not is_root:
        state.give_to(own, params)


def _checked(optimizer: Any, kind: str) -> Any:
    """Returns the optimizer, unwrapped. Raises ValueError for LBFGS, and TypeError for anything but an optimizer."""
    if isinstance(optimizer, torch.optim.LBFGS):
        # Horovod's words.
        raise ValueError("cannot broadcast torch.optim.LBFGS state: hvdlite does not support this optimizer")
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict", "load_state_dict")):
        raise TypeError(
            f"{kind}: optimizer={shown(optimizer)} is not a torch.optim.Optimizer: pass the optimizer itself"
        )
    return optimizer._optimizer if isinstance(optimizer, OptimizerProxy) else optimizer


@dataclass(frozen=True, slots=True)
class _Standing:
    """The contents of an optimizer's ``param_groups`` and ``state``."""

    options: list[dict[str, Any]]
    # By the parameter's number, counted over all groups.
    states: dict[int, Any]
    # Entries of ``state`` whose keys are not parameters.
    rest: dict[Any, Any]

    def give_to(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Replaces the optimizer's options and state by these."""
        for entry, options in zip(optimizer.param_groups, self.options, strict=True):
            members = entry["params"]
            # In place, since a scheduler or wrapper may refer to the same dictionary.
            entry.clear()
            entry.update({"params": members, **options})
        optimizer.state.clear()
        optimizer.state.update({params[number]: state for number, state in self.states.items()})
        optimizer.state.update(self.rest)


@dataclass(frozen=True, slots=True)
class _StateDict:
    """The ``state_dict()`` of an optimizer that overrides that method."""

    value: Any

    def give_to(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> None:
        """Loads it into the optimizer."""
        optimizer.load_state_dict(self.value)


@dataclass(frozen=True, slots=True)
class _Meta:
    """The description of a tensor, by which a rank allocates memory to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool
    # The number of the parameter whose state it is, which determines its device on each rank.
    owner: int

    def pack(self) -> list[Any]:
        """Returns it as JSON values; see `unpack`."""
        return [list(self.shape), str(self.dtype), self.on_cpu, self.owner]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> _Meta:
        shape, dtype, on_cpu, owner = packed
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")), on_cpu, owner)

    def empty(self, params: Sequence[Tensor]) -> Tensor:
        """Allocates the tensor, on the device of its parameter on this rank, or on the CPU."""
        device = "cpu" if self.on_cpu or not params else params[max(0, self.owner)].device
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class _Packer:
    """Pickles an optimizer's contents, with its tensors replaced by references."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._number_of = {id(param): number for number, param in enumerate(params)}
        self._owner = _NOBODY
        self._place_of: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.metas: list[_Meta] = []

    def dumps(self, optimizer: Any, pickler_class: type[pickle.Pickler]) -> bytes:
        """Returns the pickle for `_Unpacker`, and sets ``tensors`` and ``metas``, which are sent separately."""
        self.clear()
        file = io.BytesIO()
        pickler = pickler_class(file)
        pickler.persistent_id = self._persistent_id  # type: ignore[method-assign]  # as its documentation allows
        # Pickles each parameter's state separately, so that `_persistent_id` knows a tensor's owner.
        for owner, part in self._parts(optimizer):
            self._owner = owner
            pickler.dump(part)
        return file.getvalue()

    def clear(self) -> None:
        """Drops the tensors, as after a failed pickle."""
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
            # Subclasses and unsendable tensors are pickled by their own methods.
            return None
        place = self._place_of.get(id(obj))
        if place is None:
            place = self._place_of[id(obj)] = len(self.tensors)
            self.tensors.append(plain_tensor(obj))
            self.metas.append(_Meta(tuple(obj.shape), obj.dtype, obj.device.type == "cpu", self._owner))
        return "tensor", place


class _Unpacker:
    """Unpickles what `_Packer` made, with this rank's parameters and the received tensors."""

    def __init__(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._params = params
        self._tensors = tensors

    def loads(self, data: bytes) -> Any:
        """Returns the contents, or an object that describes the root's error."""
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._persistent_load  # type: ignore[method-assign]  # as for the pickler
        is_plain = unpickler.load()
        if not isinstance(is_plain, bool):
            # `to_bytes` has sent an error in place of the contents.
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
    """Whether it overrides neither ``state_dict`` nor ``load_state_dict``, so that groups and state are all it has."""
    return isinstance(optimizer, torch.optim.Optimizer) and all(
        getattr(getattr(optimizer, name), "__func__", None) is getattr(torch.optim.Optimizer, name)
        for name in ("state_dict", "load_state_dict")
    )
