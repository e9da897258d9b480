"""
Operations that move tensors and change none: all-gather, broadcast, all-to-all, and the joining of sparse ones.

    tensors as bytes ── how many rows each rank has is known from the turn ── one collective ── rows of all ranks

What a rank does whose turn it is; any dtype will do. The functions that users call are in `asynchronous` and
`operations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..comm.flat_bytes import as_bytes, pieces_of
from ..comm.group import Group
from ..comm.reduce_op import Average
from ..control.handle import Handle
from ..control.request import Execution, Request
from ..errors import UnsupportedError
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import group_of
from ..values import shown
from .fusion import is_plain, mark_written, plain
from .reduction import Reduction, average
from .submission import signature, submit, title
from .travel import check_travels, check_writable, traveller

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class AllGather:
    """The body of an all-gather of one tensor or several: bytes of all that are on a device travel as one."""

    def __init__(self, tensors: Sequence[Tensor], *, is_group: bool) -> None:
        bare = [traveller(tensor) for tensor in tensors]
        self._tensors = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in bare]
        self._is_group = is_group
        self.rows: list[list[int]] = []
        """By tensor and rank, once it is done."""

    def own(self) -> list[int]:
        """The rows of each tensor, which the other ranks need to know."""
        return [len(tensor) for tensor in self._tensors]

    def __call__(self, execution: Execution) -> Any:
        self.rows = [[own[number] for own in execution.owns] for number in range(len(self._tensors))]
        outputs = list(self._tensors)
        for device in dict.fromkeys(tensor.device for tensor in self._tensors):
            members = [number for number, tensor in enumerate(self._tensors) if tensor.device == device]
            sizes = [[rows * _row_bytes(self._tensors[m]) for rows in self.rows[m]] for m in members]
            mine = torch.cat([as_bytes(plain(self._tensors[number])) for number in members])
            parts = execution.group.all_gather(
                mine, execution.what, [sum(column) for column in zip(*sizes, strict=True)]
            )
            pieces = [pieces_of(part, column) for part, column in zip(parts, zip(*sizes, strict=True), strict=True)]
            for place, number in enumerate(members):
                outputs[number] = _joined([row[place] for row in pieces], self._tensors[number], self.rows[number])
        return tuple(outputs) if self._is_group else outputs[0]


class AllToAll:
    """The body of an all-to-all: a rank's rows, so many for each rank."""

    def __init__(self, tensor: Tensor, splits: Sequence[int], given: Tensor | Sequence[int] | None) -> None:
        """``splits`` are the rows for each rank; ``given`` how the user said it: the answer lies where that does."""
        self._tensor = traveller(tensor)
        self._given = given
        self.splits = list(splits)
        self.received: list[int] = []
        """How many rows came from each rank, once it is done."""

    def __call__(self, execution: Execution) -> tuple[Tensor, Tensor]:
        self.received = [own[execution.group.rank] for own in execution.owns]
        row_bytes = _row_bytes(self._tensor)
        rows = plain(self._tensor[: sum(self.splits)])
        sent = [count * row_bytes for count in self.splits]
        parts = execution.group.all_to_all(
            as_bytes(rows), sent, [count * row_bytes for count in self.received], execution.what
        )
        output = _joined(parts, self._tensor, self.received)
        device = self._given.device if isinstance(self._given, Tensor) else "cpu"
        return output, torch.tensor(self.received, dtype=torch.int32, device=device)


def start_allgather(
    kind: str, body: AllGather, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> Handle:
    """All-gather one tensor, or a group of them as one operation."""
    same = signature(tensors, is_group=kind == "grouped_allgather", any_first=True)
    return submit(Request(kind, name, same, own=body.own()), process_set, tensors, body)


def start_alltoall(body: AllToAll, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Handle:
    """Give each rank its rows."""
    same = signature([tensor], is_group=False, any_first=True)
    return submit(Request("alltoall", name, same, own=body.splits), process_set, [tensor], body)


def start_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> Handle:
    """Give the tensor of the root, a global rank, to all ranks."""
    what = title("broadcast", name)
    group = group_of(process_set, what)
    root = group.place_of_root(root_rank, what)
    if in_place:
        check_writable(tensor, what)
    source = traveller(tensor)

    def body(execution: Execution) -> Tensor:
        if source.numel() == 0:
            return tensor if in_place else torch.empty_like(source)
        if in_place and is_plain(source):
            execution.group.broadcast(source, root, execution.what).wait()
            mark_written([source])
            return tensor
        is_root = execution.group.rank == root
        wire = plain(source) if is_root else torch.empty(source.shape, dtype=source.dtype, device=source.device)
        if is_root and not in_place and wire.data_ptr() == source.data_ptr():
            wire = wire.clone()
        execution.group.broadcast(wire, root, execution.what).wait()
        if not in_place:
            return wire
        if not is_root:
            source.copy_(wire)
        return tensor

    same = {**signature([source], is_group=False), "root_rank": group.ranks[root]}
    return submit(Request("broadcast", name, same), process_set, [source], body)


def start_barrier(process_set: ProcessSet) -> Handle:
    """Wait for all ranks, which is all that there is to it: a turn comes when they have asked."""
    # Something of its own to tell, so that even a controller that does not ask makes the ranks meet.
    return submit(Request("barrier", own=0), process_set, [], lambda execution: None)


def start_sparse(tensor: Tensor, reduction: Reduction, name: str | None, process_set: ProcessSet) -> Handle:
    """Join the indices and the values of sparse tensors; divide them, where it is an average."""
    with torch._C.DisableTorchFunctionSubclass():
        mine = tensor.detach()
        parts = [mine._indices().t(), mine._values()]
    for part in parts:
        check_travels(part, title("sparse_allreduce", name))

    def body(execution: Execution) -> Tensor:
        indices = AllGather(parts, is_group=True)
        joined, values = indices(
            Execution(execution.group, execution.what, [[own, own] for own in execution.owns], execution.divisor)
        )
        if reduction.op is Average:
            average(values, execution.divisor)
        return torch.sparse_coo_tensor(joined.t(), values, mine.shape, check_invariants=False)

    same = {**signature([mine], is_group=False), "op": reduction.op.name, "sparse_dim": mine.sparse_dim()}
    return submit(Request("sparse_allreduce", name, same, own=mine._nnz()), process_set, [mine], body)


def check_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int, name: str | None) -> list[int]:
    """How many rows each rank gets; a ValueError, in Horovod's words, where that does not come out."""
    what = title("alltoall", name)
    if tensor.dim() == 0:
        raise UnsupportedError(f"{what}: a scalar has no rows to distribute: pass a tensor of at least one dimension")
    if splits is None:
        if len(tensor) % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of "
                f"workers. ({what}: {len(tensor)} rows for {size} ranks)"
            )
        return [len(tensor) // size] * size
    if isinstance(splits, Tensor):
        check_travels(splits, f"{what}: splits")
    given = splits if isinstance(splits, Tensor) else _splits_of_list(splits, what)
    if given.dim() != 1:
        raise ValueError(f"alltoall expects a 1D splits tensor ({what}: it has {given.dim()} dimensions)")
    if isinstance(splits, Tensor) and splits.dtype is not torch.int32:
        raise ValueError(
            f"alltoall expects splits to contain 32-bit integer elements. ({what}: {splits.dtype}; a plain list of "
            "ints will do)"
        )
    counts: list[int] = given.tolist()
    if len(counts) != size:
        raise ValueError(
            f"Number of entries in splits does not equal number of workers. ({what}: {len(counts)} for {size} ranks)"
        )
    if any(count < 0 for count in counts):
        raise ValueError(f"{what}: splits={counts} has a number of rows below 0")
    if sum(counts) > len(tensor):
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor. ({what}: {sum(counts)} of "
            f"{len(tensor)} rows)"
        )
    return counts


def _splits_of_list(splits: Sequence[int], what: str) -> Tensor:
    try:
        given = torch.tensor(splits, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        given = None
    if given is not None and given.is_floating_point() and torch.equal(given, given.trunc()):
        # So is an empty list.
        given = given.long()
    if given is None or given.dtype not in _WHOLE:
        raise ValueError(f"{what}: splits={shown(splits)} are not whole numbers of rows: pass a list of ints")
    return given


def all_gather_rows(group: Group, tensor: Tensor, what: str) -> Tensor:
    """The rows of all ranks of a group that calls it in the same order, joined; outside of any turn."""
    body = AllGather([tensor], is_group=False)
    return body(Execution(group, what, group.all_gather_json(body.own(), what), group.size))  # type: ignore[no-any-return]  # a lone tensor


def _row_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape[1:]) * tensor.element_size()


def _joined(parts: Sequence[Tensor], like: Tensor, rows: Sequence[int]) -> Tensor:
    """Parts as bytes, made to rows of the other's shape and dtype, one after the other."""
    output = torch.empty((sum(rows), *like.shape[1:]), dtype=like.dtype, device=like.device)
    for place, part in zip(pieces_of(output, rows), parts, strict=True):
        as_bytes(place).copy_(part)
    return output
