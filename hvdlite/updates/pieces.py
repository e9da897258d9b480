"""
`ParameterPiece`: what a rank updates of a parameter where ranks share an optimizer's work, and the state of it.

    bucket, with a part of it for each rank ── pieces_of_rank ── pieces of this part
    state of whole parameters (a checkpoint's) ── slice_state ── states of pieces
    states of all ranks' pieces ── gather_states, bucket by bucket ── joined ── state of whole parameters

A *piece* is a flat `torch.nn.Parameter` in the memory of the model's, or the parameter itself if it is whole. The
optimizer's state has pieces as keys. A piece's state has, of each tensor in the shape of its parameter, the elements of
the piece, in one dimension; and all else, such as a count of steps, as it is.

With ``master=True`` the optimizer updates a copy in float32 of each piece of half precision, its *master*
(`MasterPiece`). A checkpoint has it in the parameter's state.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..buckets.bucket import Bucket
from ..buckets.plan import ParamSpec, is_dense
from ..buckets.shares import master_dtype
from ..comm.flat_bytes import as_bytes, plain
from ..comm.group import Group
from ..errors import GradientError
from ..ops.base import raise_together
from ..ops.typed_values import ValueDecoder, ValueEncoder, room_for
from ..outside_graphs import keep_outside_graphs

MASTER = "master"
"""The key of masters in states."""


class ParameterPiece:
    """What one rank updates of a parameter: its elements from ``start`` to ``stop``, in the order of its memory.

    ``place`` is where their gradients begin in the bucket's buffer.
    """

    __slots__ = ("_memory", "_spec", "param", "place", "start", "stop", "tensor", "values")

    def __init__(self, spec: ParamSpec, param: Tensor, start: int, stop: int, place: int) -> None:
        self._spec = spec
        self.param = param
        self.start = start
        self.stop = stop
        self.place = place
        self._point()
        self.tensor = self._new_tensor()
        """What the optimizer updates, and the key of its state."""

    def _new_tensor(self) -> Tensor:
        return self.param if self.is_whole else nn.Parameter(self.values, requires_grad=self.param.requires_grad)

    def _point(self) -> None:
        param, spec = self.param, self._spec
        if not is_dense(tuple(param.shape), param.stride()):
            raise GradientError(
                f"parameter {spec.name!r} of shape {tuple(param.shape)} and strides {param.stride()} has gaps in its "
                "memory, so that shard= cannot divide it: make it contiguous before it is wrapped"
            )
        if tuple(param.shape) != spec.shape or _order(spec.shape, param.stride()) != _order(spec.shape, spec.stride):
            raise GradientError(
                f"parameter {spec.name!r} had shape {spec.shape} and strides {spec.stride} when the optimizer was "
                f"wrapped, and has {tuple(param.shape)} and {param.stride()} now: with shard= ranks have parts of it "
                "in the order of its memory; convert the model before hvd.DistributedOptimizer(...)"
            )
        self.values = flat_of_dense(param)[self.start : self.stop]
        """Its values, flat, in the memory of the parameter."""
        self._memory = (param.data_ptr(), param.stride())

    def refresh(self) -> None:
        """Follows the parameter to other memory, where the program has set ``param.data`` or moved the model."""
        if (self.param.data_ptr(), self.param.stride()) != self._memory:
            self._point()
            self.use(self.tensor)

    def use(self, tensor: Tensor) -> None:
        """Has the optimizer update this tensor, the key of the state of such a piece."""
        self.tensor = tensor
        if not self.is_parameter:
            tensor.data = self.values

    @property
    def is_parameter(self) -> bool:
        """Whether the optimizer updates the parameter itself."""
        return self.tensor is self.param

    def take_average(self, flat: Tensor) -> None:
        """Sets the gradient of what the optimizer updates, if there is one, from the bucket's averages."""
        if not self.is_whole:
            self.tensor.grad = None if self.param.grad is None else self.of(flat)

    def write(self) -> None:
        """Writes what the optimizer has updated into the parameter's memory. It is there already."""

    def state_of(self, states: Mapping[Tensor, Any]) -> dict[str, Any]:
        """Returns all that a checkpoint has of this piece; ``states`` are the optimizer's."""
        return dict(states.get(self.tensor) or {})

    def take_over(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the optimizer's state of what `state_of` has returned, and takes over the rest."""
        return {key: value for key, value in state.items() if key != MASTER}

    @property
    def name(self) -> str:
        return self._spec.name

    def of(self, flat: Tensor) -> Tensor:
        """Returns its part of the bucket's flat buffer."""
        return flat[self.place : self.place + self.stop - self.start]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.stop - self.start == self.param.numel()


class MasterPiece(ParameterPiece):
    """A piece of a parameter of half precision, of which the optimizer updates a copy in float32, its master."""

    __slots__ = ()

    def _new_tensor(self) -> Tensor:
        copied = (self.param.detach() if self.is_whole else self.values).to(master_dtype(self.param.dtype))
        return nn.Parameter(copied, requires_grad=self.param.requires_grad)

    def use(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @torch.no_grad()
    def take_average(self, flat: Tensor) -> None:
        """Sets the master's gradient, if there is one, from the bucket's averages.

        Where the program has written the parameter since the last step, the master follows.
        """
        master = flat_of_dense(self.tensor)
        master.copy_(torch.where(master.to(self.values.dtype) == self.values, master, self.values.float()))
        grad = self.param.grad
        self.tensor.grad = None if grad is None else (grad if self.is_whole else self.of(flat)).float()

    @torch.no_grad()
    def write(self) -> None:
        self.values.copy_(flat_of_dense(self.tensor))

    def state_of(self, states: Mapping[Tensor, Any]) -> dict[str, Any]:
        return {**super().state_of(states), MASTER: self.tensor.detach()}

    @torch.no_grad()
    def take_over(self, state: dict[str, Any]) -> dict[str, Any]:
        if MASTER in state:
            self.tensor.copy_(state[MASTER])
        return super().take_over(state)


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Returns the strides that decide where elements are."""
    return [step for step, length in zip(stride, shape, strict=True) if length > 1]


def flat_of_dense(tensor: Tensor) -> Tensor:
    """Returns all elements of a tensor without gaps, in the order of its memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def pieces_of_rank(bucket: Bucket, rank: int, *, masters: bool) -> list[ParameterPiece]:
    """Returns the pieces that a rank updates of a bucket; ``masters``: those of half precision have masters here."""
    make = MasterPiece if masters and master_dtype(bucket.plan.dtype) != bucket.plan.dtype else ParameterPiece
    first, last = bucket.plan.bounds[rank : rank + 2]
    found = []
    for state in bucket.states:
        at, end = state.piece.start, state.piece.stop
        # One without elements has a state too.
        start, stop = (max(at, first), min(end, last)) if at < end else (at, at)
        if start < stop or (at == end and rank == 0):
            found.append(make(state.piece.spec, state.param, start - at, stop - at, start))
    return found


# -- from whole states to pieces


def slice_state(piece: ParameterPiece, state: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Returns a piece's part of the state of its whole parameter. Raises GradientError if it cannot be divided."""
    sliced = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == piece.param.shape and value.layout is torch.strided:
            like_param = value
            if value.stride() != piece.param.stride():
                like_param = torch.empty_like(piece.param, dtype=value.dtype, device=value.device).copy_(value)
            sliced[key] = (
                like_param.clone() if piece.is_whole else flat_of_dense(like_param)[piece.start : piece.stop].clone()
            )
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise GradientError(
                f"{optimizer}: the state {key!r} of parameter {piece.name!r} has shape {tuple(value.shape)}, and the "
                f"parameter has {tuple(piece.param.shape)}, which shard= cannot divide: load the state of this model"
            )
        else:
            sliced[key] = copy.deepcopy(value)
    return sliced


def check_whole(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, slices: bool) -> None:
    """Raises ValueError if a state dict of whole parameters lacks something, or is that of another model.

    ``slices``: each parameter of a group has the same kinds of state, of its own shape. Others are not checked.
    """
    if not slices:
        return
    for group in state["param_groups"]:
        having = [(number, state["state"][number]) for number in group["params"] if state["state"].get(number)]
        keys = {key for _, each in having for key in each} - {MASTER}
        for number, each in having:
            if missing := sorted(map(str, keys - set(each))):
                raise ValueError(
                    f"the state of parameter {number} has no {missing[0]!r}, and that of others has: the checkpoint is "
                    "incomplete; load a whole one, or delete its 'state' on every rank to begin anew"
                )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, params, strict=False):
        for key, value in (state["state"].get(number) or {}).items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != param.shape:
                raise ValueError(
                    f"the state {key!r} of parameter {number} has shape {tuple(value.shape)}, and the parameter has "
                    f"{tuple(param.shape)}: the checkpoint is that of another model"
                )


# -- from pieces to whole states


# A piece's first element and the one behind its last, and its state.
Part = tuple[int, int, dict[str, Any]]


def gather_states(
    pieces: Sequence[ParameterPiece], states: Mapping[Tensor, Any], group: Group, what: str, *, keeps: bool
) -> dict[str, list[Part]]:
    """Returns the states of all ranks' pieces by the name of the parameter, in CPU memory; nothing unless ``keeps``.

    ``pieces`` are this rank's, of one bucket. Every rank of those that share must call it, and waits for all.
    """
    encoder = ValueEncoder()
    failure: Exception | None = None
    own = []
    try:
        for piece in pieces:
            if state := piece.state_of(states):
                encoded = encoder.encode(state, f"state of {piece.name!r}")
                own.append([piece.name, piece.start, piece.stop, encoded])
    except Exception as error:  # noqa: BLE001 - whatever the methods of an object raise; the other ranks wait
        failure = error
    raise_together(group, failure, what)
    headers = group.all_gather_signed(json.dumps([own, encoder.metas]).encode(), what)
    data = [as_bytes(plain(tensor).cpu()) for tensor in encoder.tensors]
    all_bytes = group.all_gather(torch.cat(data) if data else torch.empty(0, dtype=torch.uint8, device="cpu"), what)
    if not keeps:
        return {}
    found: dict[str, list[Part]] = defaultdict(list)
    for rank, (header, flat) in enumerate(zip(headers, all_bytes, strict=True)):
        encoded, metas = json.loads(header)
        tensors = room_for(metas, [])
        at = 0
        for tensor in tensors:
            as_bytes(tensor).copy_(flat[at : at + tensor.nbytes])
            at += tensor.nbytes
        decoder = ValueDecoder(tensors, group.describe_rank(rank), what)
        for name, start, stop, state in encoded:
            found[name].append((start, stop, decoder.decode(state)))
    return found


def joined(name: str, param: Tensor, parts: Sequence[Part]) -> dict[str, Any]:
    """Returns a whole parameter's state, in CPU memory, of its pieces'. Raises GradientError if they do not fit."""
    numel = param.numel()
    if sum(stop - start for start, stop, _ in parts) != numel:
        raise GradientError(f"some ranks have no state of their part of parameter {name!r}, and others have")
    if len(parts) == 1:
        return without_idle_master(param, parts[0][2])
    whole: dict[str, Any] = {}
    for key, first in parts[0][2].items():
        values: list[Any] = [state.get(key) for _, _, state in parts]
        start, stop, _ = parts[0]
        if isinstance(first, Tensor) and first.dim() == 1 and first.numel() == stop - start:
            made = torch.empty_strided(param.shape, param.stride(), dtype=first.dtype, device="cpu")
            flat = flat_of_dense(made)
            for (begin, end, _), value in zip(parts, values, strict=True):
                flat[begin:end].copy_(value)
            whole[key] = made
        else:
            if any(not _equal(first, value) for value in values):
                raise GradientError(
                    f"the ranks have different values of {key!r} in the optimizer's state of parameter {name!r}: "
                    f"{', '.join(map(str, values))}; they must take the same steps"
                )
            whole[key] = first
    return without_idle_master(param, whole)


def without_idle_master(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole state; an empty one if it has a master alone, which an optimizer would take for a state."""
    if state.keys() == {MASTER} and torch.equal(state[MASTER].to(param.dtype).to(state[MASTER].dtype), state[MASTER]):
        return {}
    return state


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


@contextmanager
def showing(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> Iterator[None]:
    """A context in which the optimizer's state is another one."""
    earlier = optimizer.state
    optimizer.state = defaultdict(dict, state)
    try:
        yield
    finally:
        optimizer.state = earlier


keep_outside_graphs(globals())
