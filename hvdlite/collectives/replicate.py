"""
Starting equal: what one rank has, given to all. Parameters, optimizer state, any picklable object.

    named tensors ── packed as bytes into a few flat buffers, one per device and 64 MiB ── broadcast ── copied out

Each call is one operation: all ranks compare what must be equal, then the bytes move in its turn. Objects are pickled
and unpickled by who calls, since their own methods may do anything, other operations included.

All functions must be called by every rank of the process set, and wait for all of them. ``root_rank`` is a global
rank, in a process set too.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..agreement.request import Request, Turn
from ..channels.collective import Group
from ..channels.flat import as_bytes
from ..process_set import ProcessSet
from ..process_sets import global_process_set, group_of
from ..signing import digest
from ..values import shown
from .fusion import is_plain, plain
from .submission import submit, title
from .travel import check_travels, check_writable, traveller, travels

# Large enough for a handful of broadcasts per model, small beside the model itself.
PACK_BYTES = 64 * 2**20

_PACK_ALIGNMENT_BYTES = 16

Params = Mapping[str, Any] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def broadcast_parameters(params: Params, root_rank: int = 0, *, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors in place with those of the root.

    ``params`` is a ``state_dict()``, a list of tensors, or ``named_parameters()``, the generator included;
    entries of any dtype and layout. Every rank must pass tensors of the same names, shapes and dtypes, in
    any order if they have names; where they differ, all ranks get a `MismatchError` that names the first.

    Several threads may call it at once for models whose tensors have different names.
    """
    kind = "broadcast_parameters"
    root = group_of(process_set, kind).place_of_root(root_rank, kind)
    named = _named_tensors(params)
    tensors = [traveller(tensor) for _, tensor in named]
    same = {
        "root_rank": int(root_rank),
        "tensors": [
            [name, list(tensor.shape), str(tensor.dtype), tensor.device.type]
            for (name, _), tensor in zip(named, tensors, strict=True)
        ],
    }
    request = Request(kind, _digest([name for name, _ in named]), same, has_users_name=False, is_compared=True)
    submit(request, process_set, tensors, lambda turn: _broadcast_tensors(tensors, root, turn)).wait()


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

    Several threads may call it at once for optimizers whose parameters have different shapes.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        # Horovod's words.
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is not averaged by hvdlite either")
    kind = "broadcast_optimizer_state"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{kind}: optimizer={shown(optimizer)} is not a torch.optim.Optimizer")
    group = group_of(process_set, kind)
    root = group.place_of_root(root_rank, kind)
    for param in (param for entry in optimizer.param_groups for param in entry["params"]):
        # The others have a shape, and need not travel themselves.
        if torch.nn.parameter.is_lazy(param) or param.is_nested:
            check_travels(param, kind, "a parameter")
    # Under the wrapper, whose class says nothing, the state's shape is that of the optimizer it wraps.
    about = [
        sorted(optimizer.defaults),
        [[list(param.shape) for param in entry["params"]] for entry in optimizer.param_groups],
    ]
    same = {"root_rank": int(root_rank), "(settings, parameter shapes by parameter group)": about}
    is_root = group.rank == root
    skeleton, tensors = _take_tensors_out(optimizer.state_dict() if is_root else None)
    data, error = _pickled(skeleton) if is_root else (None, None)
    params = [param for entry in optimizer.param_groups for param in entry["params"]]
    device = params[0].device if params else torch.device("cpu")

    def body(turn: Turn) -> tuple[bytes, list[Tensor]]:
        received = turn.group.broadcast_signed(data, root, turn.what)
        metas = json.dumps([_Meta.of(tensor).pack() for tensor in tensors]).encode() if is_root else None
        packed = json.loads(turn.group.broadcast_signed(metas, root, turn.what))
        room = tensors if is_root else [_Meta.unpack(each).empty(device) for each in packed]
        _broadcast_tensors(room, root, turn)
        return received, room

    request = Request(kind, _digest(about), same, has_users_name=False, is_compared=True)
    received, tensors = submit(request, process_set, [*params, *tensors], body).wait()
    # Where the root's cannot be pickled, the error is told on the root too.
    state = _unpickled(received, group.describe_rank(root), kind, error)
    if not is_root:
        try:
            optimizer.load_state_dict(_put_tensors_back(state, tensors))
        except RuntimeError as error:
            raise TypeError(
                f"{kind}: the state of {group.describe_rank(root)} cannot be loaded here: {_one_line(error)}"
            ) from error


def broadcast_object(
    obj: object = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's picklable object, on every rank; on the root the object itself.

    Other ranks may pass anything. Calls with a ``name`` pair up by it, others by their order: where several threads
    call it, each needs a name. A TypeError on every rank if the object cannot be pickled.
    """
    kind = "broadcast_object"
    what = title(kind, name)
    group = group_of(process_set, what)
    root = group.place_of_root(root_rank, what)
    is_root = group.rank == root
    data, error = _pickled(obj) if is_root else (None, None)
    request = Request(kind, name, {"root_rank": int(root_rank)}, is_compared=True)
    received = submit(request, process_set, [], lambda turn: turn.group.broadcast_signed(data, root, turn.what)).wait()
    if is_root and error is None:
        return obj
    return _unpickled(received, group.describe_rank(root), what, error)


def allgather_object(
    obj: object, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's picklable object, as a list in rank order.

    Calls with a ``name`` pair up by it, others by their order: where several threads call it, each needs a name. A
    TypeError on every rank if one of the objects cannot be pickled.
    """
    kind = "allgather_object"
    what = title(kind, name)
    group = group_of(process_set, what)
    data, error = _pickled(obj)
    gathered = submit(
        Request(kind, name, is_compared=True),
        process_set,
        [],
        lambda turn: turn.group.all_gather_signed(data, turn.what),
    ).wait()
    return [_unpickled(part, group.describe_rank(rank), what, error) for rank, part in enumerate(gathered)]


def _digest(value: object) -> str:
    """What calls on all ranks pair up by; it is equal where the values are."""
    return digest(repr(value).encode()).hex()


def _broadcast_tensors(tensors: list[Tensor], root: int, turn: Turn) -> None:
    """Overwrite these tensors in place with those at place ``root``, in as few broadcasts as their devices allow."""
    for pack in _packs(tensors):
        _broadcast_pack(pack, root, turn.group, turn.what)


@dataclass(frozen=True, slots=True)
class _Unpicklable:
    """Travels in place of an object that cannot, so that no rank waits for it in vain."""

    cause: str


def _pickled(obj: object) -> tuple[bytes, Exception | None]:
    """What travels, and why the object itself does not."""
    try:
        return pickle.dumps(obj), None
    except Exception as error:  # noqa: BLE001 - whatever an object's own methods raise
        return pickle.dumps(_Unpicklable(_one_line(error))), error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _unpickled(data: bytes, owner: str, what: str, own_error: Exception | None) -> Any:
    """The object of the rank described as ``owner``; ``data`` are known to be signed with the job's key."""
    try:
        value = pickle.loads(data)
    except Exception as error:
        raise TypeError(
            f"{what}: the object of {owner} cannot be unpickled here: {_one_line(error)}: pass another"
        ) from error
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

    def pack(self) -> list[Any]:
        """For a message; see `unpack`."""
        return [list(self.shape), str(self.dtype), self.on_cpu]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> _Meta:
        shape, dtype, on_cpu = packed
        return cls(tuple(shape), getattr(torch, dtype.removeprefix("torch.")), on_cpu)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


def _named_tensors(params: Params) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor | str | bytes | bytearray) or not isinstance(params, Iterable):
        # The first words are Horovod's.
        raise ValueError(
            f"invalid params of type: {type(params)}. Pass model.state_dict(), model.named_parameters() "
            "or a list of tensors"
        )
    if isinstance(params, Mapping):
        for name in params:
            _check_entry_name(name)
        # Sorted, so that ranks that built their dictionaries in different orders still agree.
        entries: list[tuple[str, Any]] = sorted(params.items(), key=lambda entry: (type(entry[0]).__name__, entry[0]))
    else:
        entries = [
            (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 else (f"entry {number}", item)
            for number, item in enumerate(params)
        ]
    named = []
    for name, value in entries:
        _check_entry_name(name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(
                f"broadcast_parameters: {shown(name)} is {type(value).__name__}, not a tensor, and cannot be "
                "overwritten in place: leave it out, and pass it through hvd.broadcast_object(...)"
            )
        check_travels(value, "broadcast_parameters", repr(name))
        check_writable(value, "broadcast_parameters", repr(name))
        named.append((name, value))
    return named


def _check_entry_name(name: object) -> None:
    """A name travels, so that ranks can compare it; None is Horovod's for an entry without one."""
    if name is not None and not isinstance(name, str | int):
        raise TypeError(f"broadcast_parameters: the name {shown(name)} of an entry is not a str: give it one")


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
            place.copy_(as_bytes(plain(tensor)))
    group.broadcast(flat, root, what).wait()
    if group.rank != root:
        for place, tensor in zip(places, pack, strict=True):
            if is_plain(tensor):
                as_bytes(tensor).copy_(place)
            else:
                tensor.copy_(place.view(tensor.dtype).view(tensor.shape))


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in an optimizer's state for the tensor of this number."""

    number: int


def _take_tensors_out(value: Any) -> tuple[Any, list[Tensor]]:
    tensors: list[Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, Tensor) and travels(item):
            tensors.append(traveller(item))
            return _Place(len(tensors) - 1)
        if isinstance(item, dict):
            return {key: walk(entry) for key, entry in item.items()}
        # Not a subclass of these, which may be made otherwise.
        if type(item) in (list, tuple):
            return type(item)(walk(entry) for entry in item)
        # What is no tensor that travels is pickled; if that cannot be done, all ranks are told.
        return item

    return walk(value), tensors


def _put_tensors_back(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_tensors_back(entry, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_tensors_back(entry, tensors) for entry in value)
    return value
