"""
Broadcasts tensors, parameters and picklable objects from one rank; gathers objects of all ranks (`allgather_object`).

    a tensor ── broadcast ── a new one, or the rank's own overwritten
    named tensors ── small ones packed as bytes into flat buffers, one per device and 64 MiB ── broadcast ── copied out
                  └─ those of 1 MiB and more ── broadcast from where they are to where they belong

Each call is one operation: all ranks compare what must be equal, then the bytes are sent. Objects are pickled and
unpickled on the calling thread, since their methods may run any code, including other operations. An optimizer's state
is in `optim.optimizer_state`, which uses this module.

Every rank of the process set must call these functions, and they wait for all of them. ``root_rank`` is a global rank,
also in a process set.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calls.operation import (
    ALLGATHER_OBJECT,
    ALLREDUCE,
    BROADCAST_OBJECT,
    BROADCAST_PARAMETERS,
    Execution,
    Operation,
)
from ..comm.flat_bytes import as_bytes, is_plain, mark_written, plain
from ..comm.group import Group
from ..comm.reduce_op import Average
from ..errors import words_of
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set, group_of
from ..runtime.process_set import ProcessSet
from ..signing import digest
from ..values import shown
from .allreduce import Allreduce
from .base import Collective, submit, title
from .reduction import Reduction
from .sendable import check_sendable, check_writable, plain_tensor

# Large enough that a model needs few broadcasts, and small relative to the model.
PACK_BYTES = 64 * 2**20

_PACK_ALIGNMENT_BYTES = 16

# A tensor from this size on is sent by itself, without a copy: it takes longer than beginning a broadcast.
_ALONE_BYTES = 2**20

Params = Mapping[str, Any] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(eq=False)
class Broadcast(Collective):
    """The root's tensor on all ranks, where the root is a global rank; with ``in_place``, into the given tensor."""

    root_rank: int
    in_place: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # The given tensor if it is to be overwritten; it may be of a subclass.
        self._target = self.inputs[0] if self.in_place else None
        self._root = group_of(self.process_set, self.what).group_rank_of_root(self.root_rank, self.what)
        if self.in_place:
            check_writable(self.inputs[0], self.what)

    def same(self) -> Mapping[str, Any]:
        return {**self.signature(), "root_rank": group_of(self.process_set).ranks[self._root]}

    def run(self, execution: Execution) -> Tensor:
        (source,), target = self.sources, self._target
        group, is_root = execution.group, execution.group.rank == self._root
        if source.numel() == 0:
            return torch.empty_like(source) if target is None else target
        if target is not None:
            _broadcast_alone(source, self._root, group, execution.what)
            if is_root and is_plain(source):
                mark_written([source])
            return target
        wire = plain(source) if is_root else torch.empty(source.shape, dtype=source.dtype, device=source.device)
        if is_root and wire.data_ptr() == source.data_ptr():
            wire = wire.clone()
        group.broadcast(wire, self._root, execution.what).wait()
        return wire

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        mine = list(grads.values())
        backward = Allreduce(ALLREDUCE, mine, self.gradient_name(), self.process_set, Reduction(Average))
        (average,) = backward.differentiable()
        group = group_of(self.process_set)
        if group.rank != group.group_rank_of_root(self.root_rank, self.what):
            # Not fresh zeros, which have no graph: every rank must go through here in a second backward pass.
            average = average.masked_fill(torch.ones((), dtype=torch.bool, device=average.device), 0)
        return [average]


def broadcast_parameters(params: Params, root_rank: int = 0, *, process_set: ProcessSet = global_process_set) -> None:
    """Overwrites tensors in place with those of the root.

    ``params`` is a ``state_dict()``, a list of tensors, or ``named_parameters()``, which may be the generator itself;
    entries may have any dtype and memory layout. Every rank must pass tensors of the same names, shapes and dtypes, in
    any order if they have names. If they differ, all ranks raise a `MismatchError` that names the first.

    Several threads may call it at once for models whose tensors have different names.
    """
    kind = BROADCAST_PARAMETERS
    group = group_of(process_set, kind.name)
    root = group.group_rank_of_root(root_rank, kind.name)
    named = _named_tensors(params)
    tensors = [plain_tensor(tensor) for _, tensor in named]
    same = {
        "root_rank": group.ranks[root],
        "tensors": [
            [name, list(tensor.shape), str(tensor.dtype), tensor.device.type]
            for (name, _), tensor in zip(named, tensors, strict=True)
        ],
    }
    pairing = digest_of([name for name, _ in named])
    operation = Operation(
        kind, lambda execution: broadcast_tensors(tensors, root, execution), pairing, same, has_users_name=False
    )
    submit(operation, process_set, tensors).wait()


def broadcast_object(
    obj: object = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the root's picklable object to every rank, and returns it; the root returns the object itself.

    Other ranks may pass anything. Calls with a ``name`` pair up by it, others by their order: several threads need
    names. Every rank raises a TypeError if the object cannot be pickled.
    """
    what = title(BROADCAST_OBJECT, name)
    group = group_of(process_set, what)
    root = group.group_rank_of_root(root_rank, what)
    is_root = group.rank == root
    data, error = to_bytes(obj) if is_root else (None, None)

    def run(execution: Execution) -> bytes:
        return execution.group.broadcast_signed(data, root, execution.what)

    operation = Operation(BROADCAST_OBJECT, run, name, {"root_rank": group.ranks[root]})
    received = submit(operation, process_set, []).wait()
    if is_root and error is None:
        return obj
    return from_bytes(received, group.describe_rank(root), what, error)


def allgather_object(
    obj: object, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns every rank's picklable object, as a list in rank order.

    Names are as in `broadcast_object`. Every rank raises a TypeError if one of the objects cannot be pickled.
    """
    what = title(ALLGATHER_OBJECT, name)
    group = group_of(process_set, what)
    data, error = to_bytes(obj)
    operation = Operation(
        ALLGATHER_OBJECT, lambda execution: execution.group.all_gather_signed(data, execution.what), name
    )
    gathered = submit(operation, process_set, []).wait()
    return [from_bytes(part, group.describe_rank(rank), what, error) for rank, part in enumerate(gathered)]


def digest_of(value: object) -> str:
    """A digest by which calls of all ranks pair up; equal for values with the same repr."""
    return digest(repr(value).encode()).hex()


def broadcast_tensors(tensors: list[Tensor], root: int, execution: Execution) -> None:
    """Overwrites these tensors in place with those of group rank ``root``: large ones by themselves, others packed."""
    for pack in _packs([tensor for tensor in tensors if tensor.nbytes < _ALONE_BYTES]):
        _broadcast_pack(pack, root, execution.group, execution.what)
    for tensor in tensors:
        if tensor.nbytes >= _ALONE_BYTES:
            _broadcast_alone(tensor, root, execution.group, execution.what)


@dataclass(frozen=True, slots=True)
class _Unpicklable:
    """Sent in place of an object that cannot be pickled, so that no rank waits for it for ever."""

    cause: str


def to_bytes(obj: object, persistent_id: Callable[[Any], Any] | None = None) -> tuple[bytes, Exception | None]:
    """Returns the bytes to send for an object, and the error if it cannot be pickled.

    ``persistent_id`` is as in `pickle.Pickler`. Cloudpickle takes objects that pickle refuses, such as lambdas. It is
    tried second, since it would send classes of the main program by value, and they would arrive as different classes.
    """
    with contextlib.suppress(Exception):  # whatever an object's own methods raise
        return _dumps(obj, pickle.Pickler, persistent_id), None
    # Imported here, since most programs do not need it.
    import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415  # it has no types

    try:
        return _dumps(obj, cloudpickle.Pickler, persistent_id), None
    except Exception as error:  # noqa: BLE001 - as above
        return pickle.dumps(_Unpicklable(_one_line(error))), error


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {words_of(error)}".split())


def from_bytes(
    data: bytes, owner: str, what: str, own_error: Exception | None, loads: Callable[[bytes], Any] = pickle.loads
) -> Any:
    """Unpickles the object of the rank described as ``owner``; the signature of ``data`` must be checked before.

    Raises a TypeError, from ``own_error`` if this rank has one, if the object could not be pickled or unpickled.
    """
    try:
        value = loads(data)
    except Exception as error:
        raise TypeError(
            f"{what}: the object of {owner} cannot be unpickled on this rank: {_one_line(error)}"
        ) from error
    if isinstance(value, _Unpicklable):
        raise TypeError(f"{what}: the object of {owner} cannot be pickled: {value.cause}") from own_error
    return value


def _dumps(obj: object, pickler_class: type[pickle.Pickler], persistent_id: Callable[[Any], Any] | None) -> bytes:
    file = io.BytesIO()
    pickler = pickler_class(file)
    if persistent_id is not None:
        pickler.persistent_id = persistent_id  # type: ignore[method-assign]  # as its documentation allows
    pickler.dump(obj)
    return file.getvalue()


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
        # Sorted, so that ranks whose dictionaries have different orders still agree.
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
            hint = (
                "pass model.state_dict()"
                if isinstance(params, torch.nn.Module)
                else "leave it out, and pass it through hvd.broadcast_object(...)"
            )
            raise TypeError(
                f"broadcast_parameters: {shown(name)} is {type(value).__name__}, not a tensor, and cannot be "
                f"overwritten in place: {hint}"
            )
        check_sendable(value, "broadcast_parameters", repr(name))
        check_writable(value, "broadcast_parameters", repr(name))
        named.append((name, value))
    return named


def _check_entry_name(name: object) -> None:
    """Checks that a name can be sent for comparison; None is Horovod's for an entry without a name."""
    if name is not None and not isinstance(name, str | int):
        raise TypeError(f"broadcast_parameters: the name {shown(name)} of an entry is not a str: give it one")


def _packs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors to send together: of one device, in order, up to PACK_BYTES (a single one may be larger)."""
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


def _broadcast_alone(tensor: Tensor, root: int, group: Group, what: str) -> None:
    if group.rank == root:
        group.broadcast(plain(tensor), root, what).wait()
    elif is_plain(tensor):
        group.broadcast(tensor, root, what).wait()
        mark_written([tensor])
    else:
        wire = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        group.broadcast(wire, root, what).wait()
        tensor.copy_(wire)


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


keep_outside_graphs(globals())
