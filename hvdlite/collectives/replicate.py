"""
Starting equal: what one rank has, given to all. Parameters, optimizer state, any picklable object.

    named tensors ── packed as bytes into a few flat buffers, one per device and 64 MiB ── broadcast ── copied out

All functions must be called by every rank of the process set, and wait for all of them. ``root_rank`` is a global
rank, in a process set too.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..channels.collective import Group
from ..channels.flat import as_bytes
from ..errors import MismatchError
from ..process_set import ProcessSet
from ..process_sets import global_process_set, group_of
from .submission import check_has_values

# Large enough for a handful of broadcasts per model, small beside the model itself.
PACK_BYTES = 64 * 2**20

_PACK_ALIGNMENT_BYTES = 16

Params = Mapping[str, Any] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def broadcast_parameters(params: Params, root_rank: int = 0, *, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors in place with those of the root.

    ``params`` is a ``state_dict()``, a list of tensors, or ``named_parameters()``, the generator included;
    entries of any dtype and layout. Every rank must pass tensors of the same names, shapes and dtypes, in
    any order if they have names; where they differ, all ranks get a `MismatchError` that names the first.
    """
    what = "broadcast_parameters"
    group = group_of(process_set, what)
    root = group.place_of_root(root_rank)
    broadcast_tensors(_named_tensors(params), root, group, what)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # Horovod's, for the step that it takes here
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state: learning rates, momenta, step counters.

    Takes no step and changes no parameter; an optimizer that has no state yet stays without. ``model`` is needed for
    nothing, and may be given as to Horovod.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        # Horovod's words.
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is not averaged by hvdlite either")
    what = "broadcast_optimizer_state"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{what}: optimizer={optimizer!r} is not a torch.optim.Optimizer")
    group = group_of(process_set, what)
    root = group.place_of_root(root_rank)
    shapes = [[tuple(param.shape) for param in entry["params"]] for entry in optimizer.param_groups]
    # Under the wrapper, whose class says nothing, the state's shape is that of the optimizer it wraps.
    kind = sorted(optimizer.defaults)
    group.require_agreement((kind, shapes), what, "(settings, parameter shapes by parameter group)")
    own_state = optimizer.state_dict() if group.rank == root else None
    skeleton, tensors = _take_tensors_out(own_state)
    skeleton, metas = _broadcast_object((skeleton, [_Meta.of(t) for t in tensors]), root, group, what)
    if group.rank != root:
        params = [param for entry in optimizer.param_groups for param in entry["params"]]
        device = params[0].device if params else torch.device("cpu")
        tensors = [meta.empty(device) for meta in metas]
    names = [f"state tensor {number}" for number in range(len(tensors))]
    broadcast_tensors(list(zip(names, tensors, strict=True)), root, group, what)
    if group.rank != root:
        optimizer.load_state_dict(_put_tensors_back(skeleton, tensors))


def broadcast_object(
    obj: object = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's picklable object, on every rank; on the root the object itself.

    Other ranks may pass anything. ``name`` is what messages call it. A TypeError on every rank if it cannot be pickled.
    """
    what = "broadcast_object" if name is None else f"broadcast_object of {name!r}"
    group = group_of(process_set, what)
    root = group.place_of_root(root_rank)
    group.require_agreement(root_rank, what, "root_rank")
    return _broadcast_object(obj, root, group, what)


def allgather_object(
    obj: object, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's picklable object, as a list in rank order. ``name`` is what messages call it.

    A TypeError on every rank if one of them cannot be pickled.
    """
    what = "allgather_object" if name is None else f"allgather_object of {name!r}"
    group = group_of(process_set, what)
    group.agree(None, what)
    data, error = _pickled(obj)
    gathered = group.all_gather_signed(data, what)
    return [_unpickled(part, group.describe_rank(rank), what, error) for rank, part in enumerate(gathered)]


def broadcast_tensors(named: list[tuple[str, Tensor]], root: int, group: Group, what: str) -> None:
    """Overwrite these tensors in place with those at place ``root``, in as few broadcasts as their devices allow."""
    signature = [(name, tuple(t.shape), str(t.dtype), t.device.type) for name, t in named]
    signatures = group.agree((signature, group.ranks[root]), what)
    if signatures is not None:
        raise MismatchError(_first_difference(signatures, group, what))
    with torch.no_grad():
        for pack in _packs([tensor for _, tensor in named]):
            _broadcast_pack(pack, root, group, what)


def _broadcast_object(obj: object, root: int, group: Group, what: str) -> Any:
    data, error = _pickled(obj) if group.rank == root else (None, None)
    received = group.broadcast_signed(data, root, what)
    if group.rank == root and error is None:
        return obj
    return _unpickled(received, group.describe_rank(root), what, error)


@dataclass(frozen=True, slots=True)
class _Unpicklable:
    """Travels in place of an object that cannot, so that no rank waits for it in vain."""

    cause: str


def _pickled(obj: object) -> tuple[bytes, Exception | None]:
    """What travels, and why the object itself does not."""
    try:
        return pickle.dumps(obj), None
    except Exception as error:  # noqa: BLE001 - whatever an object's own methods raise
        return pickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}")), error


def _unpickled(data: bytes, owner: str, what: str, own_error: Exception | None) -> Any:
    """The object of the rank described as ``owner``; ``data`` are known to be signed with the job's key."""
    value = pickle.loads(data)
    if isinstance(value, _Unpicklable):
        raise TypeError(
            f"{what}: the object of {owner} cannot be pickled, and so not sent: {value.cause}"
        ) from own_error
    return value


@dataclass(frozen=True, slots=True)
class _Meta:
    """What a rank needs to make room for a tensor that it does not have yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Meta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


def _named_tensors(params: Params) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        # The first words are Horovod's.
        raise ValueError(
            f"invalid params of type: {type(params)}. Pass model.state_dict(), model.named_parameters() "
            "or a list of tensors"
        )
    if isinstance(params, Mapping):
        # Sorted, so that ranks that built their dictionaries in different orders still agree.
        entries: list[tuple[str, Any]] = sorted(params.items())
    else:
        entries = [
            (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 else (f"entry {number}", item)
            for number, item in enumerate(params)
        ]
    named = []
    for name, value in entries:
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"broadcast_parameters: {name!r} is {type(value).__name__}, not a tensor, and cannot be "
                "overwritten in place: leave it out, and pass it through hvd.broadcast_object(...)"
            )
        check_has_values(value, f"broadcast_parameters: {name!r}")
        named.append((name, value))
    return named


def _packs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that travel together: of one device, in order, to PACK_BYTES (a lone one may be larger)."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        pack: list[Tensor] = []
        packed_bytes = 0
        for tensor in members:
            if pack and packed_bytes + tensor.nbytes > PACK_BYTES:
                yield pack
                pack, packed_bytes = [], 0
            pack.append(tensor)
            packed_bytes += tensor.nbytes
        yield pack


def _broadcast_pack(pack: list[Tensor], root: int, group: Group, what: str) -> None:
    starts = [0]
    for tensor in pack:
        starts.append(starts[-1] + -(-tensor.nbytes // _PACK_ALIGNMENT_BYTES) * _PACK_ALIGNMENT_BYTES)
    flat = torch.empty(starts[-1], dtype=torch.uint8, device=pack[0].device)
    places = [flat[start : start + tensor.nbytes] for start, tensor in zip(starts, pack, strict=False)]
    if group.rank == root:
        for place, tensor in zip(places, pack, strict=True):
            place.copy_(as_bytes(tensor.contiguous()))
    group.broadcast(flat, root, what).wait()
    if group.rank != root:
        for place, tensor in zip(places, pack, strict=True):
            tensor.copy_(place.view(tensor.dtype).view(tensor.shape))


def _first_difference(signatures: list[Any], group: Group, what: str) -> str:
    """Which tensor, on which ranks, and how: for the first rank that differs from rank 0."""
    first, first_root = signatures[0]
    for rank, (other, other_root) in enumerate(signatures):
        ours, theirs = group.describe_rank(0), group.describe_rank(rank)
        if other_root != first_root:
            return f"{what}: root_rank is {first_root} on {ours} and {other_root} on {theirs}"
        here = {entry[0]: entry[1:] for entry in first}
        there = {entry[0]: entry[1:] for entry in other}
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                return (
                    f"{what}: {name!r} is {_words(here.get(name))} on {ours} and {_words(there.get(name))} on "
                    f"{theirs}: every rank must build the same model; check the arguments that size it"
                )
        if [entry[0] for entry in first] != [entry[0] for entry in other]:
            return f"{what}: {ours} and {theirs} pass the same tensors in different orders"
    raise AssertionError("called only where the signatures differ")


def _words(entry: Sequence[Any] | None) -> str:
    return "missing" if entry is None else f"{tuple(entry[0])} {entry[1]} on {entry[2]}"


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in an optimizer's state for the tensor of this number."""

    number: int


def _take_tensors_out(value: Any) -> tuple[Any, list[Tensor]]:
    tensors: list[Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item.detach())
            return _Place(len(tensors) - 1)
        if isinstance(item, dict):
            return {key: walk(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(walk(entry) for entry in item)
        return copy.copy(item)

    return walk(value), tensors


def _put_tensors_back(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_tensors_back(entry, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_tensors_back(entry, tensors) for entry in value)
    return value
