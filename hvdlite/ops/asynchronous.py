"""
The asynchronous functions: asked for now, carried out when all ranks have asked, waited for with `synchronize`.

    operation_async(tensor) ── Handle ── poll(handle) ── synchronize(handle) ── what operation(tensor) returns

Each returns at once and reads its tensors later: they must not be changed before the operation is over. Those whose
names end in ``_`` overwrite them. Gradients flow through none of these. What arguments and results are is said at the
functions of the same names, in `operations`; the results of a group are a tuple.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp, Sum
from ..control.handle import Handle
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import global_process_set, group_of
from .combining import start_allreduce, start_reducescatter
from .moving import AllGather, AllToAll, check_splits, start_allgather, start_alltoall, start_broadcast, start_sparse
from .reduction import make_reduction
from .submission import check_tensors, title
from .travel import check_travels, layout_of


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce` in the background."""
    what = title("allreduce", name)
    tensor = check_travels(tensor, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor)
    return start_allreduce("allreduce", [tensor], reduction, name, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`allreduce_` in the background."""
    what = title("allreduce", name)
    check_travels(tensor, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor)
    return start_allreduce("allreduce", [tensor], reduction, name, process_set, in_place=True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce` in the background."""
    what = title("grouped_allreduce", name)
    members = check_tensors(tensors, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor)
    return start_allreduce("grouped_allreduce", members, reduction, name, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`grouped_allreduce_` in the background."""
    what = title("grouped_allreduce", name)
    check_tensors(tensors, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor)
    return start_allreduce("grouped_allreduce", tensors, reduction, name, process_set, in_place=True)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter` in the background."""
    what = title("reducescatter", name)
    tensor = check_travels(tensor, what)
    reduction = make_reduction(what, None, op, prescale_factor, postscale_factor)
    return start_reducescatter("reducescatter", [tensor], reduction, name, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`grouped_reducescatter` in the background."""
    what = title("grouped_reducescatter", name)
    members = check_tensors(tensors, what)
    reduction = make_reduction(what, None, op, prescale_factor, postscale_factor)
    return start_reducescatter("grouped_reducescatter", members, reduction, name, process_set)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Handle:
    """The sum or the average of sparse COO tensors: all ranks' indices and values, joined and not coalesced.

    Ranks may have different numbers of values. The handle may be called, as Horovod's result, or synchronized.
    """
    what = title("sparse_allreduce", name)
    layout = layout_of(tensor)
    if layout is not torch.sparse_coo:
        kind = layout or type(tensor).__name__
        raise TypeError(f"{what}: {kind} is not a sparse COO tensor: pass tensor.to_sparse(), or use hvd.allreduce")
    reduction = make_reduction(what, None, op, 1.0, 1.0)
    if reduction.op not in (Average, Sum):
        raise ValueError(f"{what}: op=hvd.{reduction.op.name} is not for sparse tensors: use hvd.Average or hvd.Sum")
    return start_sparse(tensor, reduction, name, process_set)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """`allgather` in the background."""
    tensor = check_travels(tensor, title("allgather", name))
    return start_allgather("allgather", AllGather([tensor], is_group=False), [tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`grouped_allgather` in the background."""
    members = check_tensors(tensors, title("grouped_allgather", name))
    return start_allgather("grouped_allgather", AllGather(members, is_group=True), members, name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast` in the background."""
    tensor = check_travels(tensor, title("broadcast", name))
    return start_broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast_` in the background."""
    check_travels(tensor, title("broadcast", name))
    return start_broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`alltoall` in the background; the result is a pair without ``splits`` too, as in Horovod."""
    tensor = check_travels(tensor, title("alltoall", name))
    counts = check_splits(tensor, splits, group_of(process_set, title("alltoall", name)).size, name)
    return start_alltoall(AllToAll(tensor, counts, splits), tensor, name, process_set)
