"""
The public functions `allreduce`, `allgather`, ...: up to four forms of each `base.Collective`.

    operation(tensor)         waits for its result, on the tensor's device; gradients flow through it
    operation_(tensor)        waits, and overwrites the tensor
    operation_async(tensor)   returns a Handle ── poll(handle) ── synchronize(handle) ── what operation(tensor) returns
    operation_async_(tensor)  ... and overwrites the tensor

For all of them:

- An asynchronous function returns at once. The operation runs when all ranks have called it, and reads its tensors
  then: do not change them before it has ended. The results of a grouped function are then a tuple.
- Every rank of ``process_set``, by default all ranks, must call the function. Calls of the same function with the same
  ``name`` pair up; calls without a name pair up in their order. Messages use ``name``.
- Tensors may have any number of dimensions, any lengths, including 0, and any layout in memory. Dtypes are uint8, int8
  to int64, bool, float16, bfloat16, float32, float64, complex64 and complex128; the functions without arithmetic take
  all others that PyTorch can copy. A tensor that cannot be sent (see `sendable`) is a TypeError or a ValueError before
  anything is sent.
- Results are contiguous, and bitwise equal on all ranks that get the same result. Gradients are Horovod's (see `base`);
  none flows through the asynchronous functions and those that overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls.handle import Handle
from ..calls.operation import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GROUPED_ALLGATHER,
    GROUPED_ALLREDUCE,
    GROUPED_REDUCESCATTER,
    REDUCESCATTER,
    SPARSE_ALLREDUCE,
    Kind,
    Operation,
)
from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.casts import AnyCompression, Compression
from ..errors import WrongTypeError
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set
from ..runtime.process_set import ProcessSet
from ..values import shown
from . import direct
from .allreduce import Allreduce, SparseAllreduce
from .base import check_tensors, submit, title
from .broadcast import Broadcast
from .reduction import make_reduction
from .rows import Allgather, Alltoall, Reducescatter, check_splits
from .sendable import layout_of


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combines the tensors of all ranks, of one shape and dtype: their average unless ``op`` says otherwise.

    ``op``: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum` (see `adasum`). ``average=`` is the form of older
    programs for Average or Sum. ``prescale_factor`` multiplies the inputs, ``postscale_factor`` the result. An average
    is the sum divided by the number of ranks; for integers it is truncated towards zero. Values sent in 16 bits are
    divided before the sum, so that it overflows no sooner than they do. ``compression`` is the form in which floats are
    sent.

    The gradient is the same operation on the gradients of all ranks' results, with ``op``, factors and ``compression``.
    """
    has_factors = not all(type(factor) is float and factor == 1.0 for factor in (prescale_factor, postscale_factor))
    is_plain = average is None and compression is Compression.none and not has_factors
    if is_plain and (result := direct.allreduce(tensor, name, op, process_set)) is not None:
        return result
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(ALLREDUCE, tensor, *arguments, compression).differentiable()[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Does `allreduce`, and overwrites the tensor with the result."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    _allreduce(ALLREDUCE, tensor, *arguments, in_place=True).start().wait()
    return tensor


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `allreduce`, and returns its handle."""
    return _allreduce(ALLREDUCE, tensor, average, name, op, prescale_factor, postscale_factor, process_set).start()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `allreduce_`, and returns its handle."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(ALLREDUCE, tensor, *arguments, in_place=True).start()


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Does `allreduce` of several tensors as one operation; returns a list. Dtypes and devices may be mixed."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return list(_allreduce(GROUPED_ALLREDUCE, tensors, *arguments, compression).differentiable())


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Does `grouped_allreduce`, and overwrites the tensors; returns them as a tuple."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    _allreduce(GROUPED_ALLREDUCE, tensors, *arguments, in_place=True).start().wait()
    return tuple(tensors)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `grouped_allreduce`, and returns its handle."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(GROUPED_ALLREDUCE, tensors, *arguments).start()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `grouped_allreduce_`, and returns its handle."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(GROUPED_ALLREDUCE, tensors, *arguments, in_place=True).start()


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins the sum or average of sparse COO tensors: all ranks' indices and values, joined and not coalesced.

    Ranks may have different numbers of values. As in Horovod the returned handle may be called; it may also be
    synchronized.
    """
    what = title(SPARSE_ALLREDUCE, name)
    layout = layout_of(tensor)
    if layout is not torch.sparse_coo:
        kind = layout or type(tensor).__name__
        raise TypeError(f"{what}: {kind} is not a sparse COO tensor: pass tensor.to_sparse(), or use hvd.allreduce")
    reduction = make_reduction(what, None, op, 1.0, 1.0)
    if reduction.op not in (Average, Sum):
        raise ValueError(
            f"{what}: op=hvd.{reduction.op.name} does not work for sparse tensors: use hvd.Average or hvd.Sum"
        )
    return SparseAllreduce(tensor, reduction, name, process_set).start()


def _allreduce(
    kind: Kind,
    tensors: Tensor | Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    compression: AnyCompression = Compression.none,
    *,
    in_place: bool = False,
) -> Allreduce:
    what = title(kind, name)
    members = check_tensors(kind, tensors, what)
    if in_place:
        # The results are the given tensors, including those of subclasses.
        members = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor, compression)
    return Allreduce(kind, members, name, process_set, reduction, in_place)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Returns this rank's rows of the average (or sum) of all ranks' tensors, of one shape and dtype.

    Rows are spread evenly over the ranks, in their order; if they do not divide evenly, the first ranks get one more.
    Other arguments are as for `allreduce`. The gradient is all ranks' gradients of their rows, joined, times both
    factors, and times the number of ranks for a sum.
    """
    collective = _reducescatter(
        REDUCESCATTER, tensor, name, op, process_set, prescale_factor, postscale_factor, compression
    )
    return collective.differentiable()[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Does `reducescatter` of several tensors as one operation; returns a list."""
    arguments = (name, op, process_set, prescale_factor, postscale_factor, compression)
    return list(_reducescatter(GROUPED_REDUCESCATTER, tensors, *arguments).differentiable())


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins `reducescatter`, and returns its handle."""
    return _reducescatter(REDUCESCATTER, tensor, name, op, process_set, prescale_factor, postscale_factor).start()


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begins `grouped_reducescatter`, and returns its handle."""
    return _reducescatter(
        GROUPED_REDUCESCATTER, tensors, name, op, process_set, prescale_factor, postscale_factor
    ).start()


def _reducescatter(
    kind: Kind,
    tensors: Tensor | Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    compression: AnyCompression = Compression.none,
) -> Reducescatter:
    what = title(kind, name)
    members = check_tensors(kind, tensors, what)
    reduction = make_reduction(what, None, op, prescale_factor, postscale_factor, compression)
    return Reducescatter(kind, members, name, process_set, reduction)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Joins the tensors of all ranks along the first dimension, in rank order.

    The first dimension may differ between ranks; the others and the dtype must be equal. A scalar counts as a tensor of
    one element. The gradient of a rank's rows is the average of all ranks' gradients of these rows.
    """
    if (result := direct.allgather(tensor, name, process_set)) is not None:
        return result
    return _allgather(ALLGATHER, tensor, name, process_set).differentiable()[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Does `allgather` of several tensors as one operation; returns a tuple."""
    return _allgather(GROUPED_ALLGATHER, tensors, name, process_set).differentiable()


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begins `allgather`, and returns its handle."""
    return _allgather(ALLGATHER, tensor, name, process_set).start()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins `grouped_allgather`, and returns its handle."""
    return _allgather(GROUPED_ALLGATHER, tensors, name, process_set).start()


def _allgather(kind: Kind, tensors: Tensor | Sequence[Tensor], name: str | None, process_set: ProcessSet) -> Allgather:
    return Allgather(kind, check_tensors(kind, tensors, title(kind, name)), name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the root's tensor on every rank. Every rank passes a tensor of the same shape and dtype.

    ``root_rank`` is the root's global rank, also in a process set. The gradient is the average of all ranks' gradients
    on the root, and zeros on the others.
    """
    if (result := direct.broadcast(tensor, root_rank, name, process_set)) is not None:
        return result
    return _broadcast(tensor, root_rank, name, process_set).differentiable()[0]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Does `broadcast`, and overwrites the tensor with the result."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins `broadcast`, and returns its handle."""
    return _broadcast(tensor, root_rank, name, process_set).start()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begins `broadcast_`, and returns its handle."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True).start()


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> Broadcast:
    (member,) = check_tensors(BROADCAST, tensor, title(BROADCAST, name))
    return Broadcast(BROADCAST, [tensor if in_place else member], name, process_set, root_rank, in_place)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends rows of this rank's tensor to every rank, in rank order; joins the rows that it receives in rank order.

    ``splits`` are the numbers of rows for each rank, as a list or a one-dimensional int32 tensor; rows left over are
    not sent. With splits the result is a pair: the tensor, and the number of rows received from each rank, as an int32
    tensor. Without them every rank gets the same number of rows. The gradients of the received rows are sent back.
    """
    output, received = _alltoall(tensor, splits, name, process_set).differentiable()
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins `alltoall`, and returns its handle; as in Horovod the result is a pair also without ``splits``."""
    return _alltoall(tensor, splits, name, process_set).start()


def _alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Alltoall:
    what = title(ALLTOALL, name)
    (member,) = check_tensors(ALLTOALL, tensor, what)
    counts = check_splits(member, splits, process_set, what)
    answer_on = splits.device if isinstance(splits, Tensor) else "cpu"
    return Alltoall(ALLTOALL, [member], name, process_set, counts, answer_on)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    # A value for `own`, so that the controller of HVDLITE_CHECK=0 exchanges values and thereby waits for all ranks.
    operation = Operation(BARRIER, lambda execution: True, own=0)
    if not direct.barrier(operation, process_set):
        submit(operation, process_set, []).wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, at once."""
    known = _known(handle, "poll")
    known.refuse_in_child()
    return known.is_ended()


def synchronize(handle: Handle | None) -> Any:
    """Waits, without using the CPU, for the operation of an asynchronous function; returns its result.

    It may be called repeatedly. Raises the operation's error if it failed. Returns None for None, as in Horovod.
    """
    return None if handle is None else _known(handle, "synchronize").wait()


def _known(handle: object, asker: str) -> Handle:
    if not isinstance(handle, Handle):
        raise WrongTypeError(
            f"{asker}({shown(handle)}): this is not a handle: pass the result of hvd.allreduce_async or another "
            "function with _async in its name"
        )
    return handle


keep_outside_graphs(globals())
