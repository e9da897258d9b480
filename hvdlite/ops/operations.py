"""
The public functions `allreduce`, `allgather`, ...: up to four forms of each `base.Collective`.

    operation(tensor)         waits for its result, on the tensor's device; gradients flow through it
    operation_(tensor)        waits, and overwrites the tensor
    operation_async(tensor)   returns a Handle ── poll(handle) ── synchronize(handle) ── what operation(tensor) returns
    operation_async_(tensor)  ... and overwrites the tensor

For values of the user's own; gradients of a `DistributedOptimizer` take the way of `optim`. What holds for all:

- What is asynchronous is asked for now, carried out when all ranks have asked, and reads its tensors later: they must
  not be changed before it is over. The results of a group are a tuple then.
- Every rank of ``process_set``, which may be all, must call the function; those that have called the
  same, with the same ``name``, pair up. ``name`` is what messages call it; without one, they pair up in the order of
  their calls.
- Tensors may have any number of dimensions, also none and of no length, any layout in memory, and dtypes from uint8,
  int8 to int64, bool, float16, bfloat16, float32, float64 to complex64 and complex128; the functions that do no
  arithmetic take all others that PyTorch can copy. What cannot travel (see `sendable`) is a TypeError or a ValueError
  before anything is asked of the other ranks. Arguments are left alone but by the functions whose names end in ``_``,
  which overwrite them.
- Results are contiguous, and the same bits on every rank that gets the same.
- The gradient of each is Horovod's (see `base`); it does not flow through those that end in ``_``, nor through the
  asynchronous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.casts import AnyCompression, Compression
from ..control.handle import Handle
from ..control.operation import (
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
from ..errors import WrongTypeError
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import global_process_set
from ..values import shown
from .allgather_reducescatter import Allgather, Reducescatter
from .allreduce import Allreduce, SparseAllreduce
from .alltoall import Alltoall, check_splits
from .base import check_tensors, submit, title
from .broadcast import Broadcast
from .reduction import make_reduction
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
    """One tensor of all ranks', of the same shape and dtype: their average unless ``op`` says otherwise.

    ``op``: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum` (see `adasum`). ``average=`` is how older programs
    say Average or Sum. ``prescale_factor`` multiplies what goes in, ``postscale_factor`` what comes out. An
    average is the sum divided by the number of ranks, and truncated towards zero where it is of integers; what travels
    in 16 bits is divided before it is summed, so that it overflows no sooner than the values. ``compression`` is how
    floats travel.

    The gradient is the same operation on the gradients of all ranks' results: ``op``, factors and ``compression``.
    """
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
    """`allreduce`, into the tensor itself."""
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
    """`allreduce` in the background."""
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
    """`allreduce_` in the background."""
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
    """`allreduce` of several tensors as one operation; a list of results. Dtypes and devices may be mixed."""
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
    """`grouped_allreduce`, into the tensors themselves; these, as a tuple."""
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
    """`grouped_allreduce` in the background."""
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
    """`grouped_allreduce_` in the background."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    return _allreduce(GROUPED_ALLREDUCE, tensors, *arguments, in_place=True).start()


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReduceOp, process_set: ProcessSet = global_process_set
) -> Handle:
    """The sum or the average of sparse COO tensors: all ranks' indices and values, joined and not coalesced.

    Ranks may have different numbers of values. The handle may be called, as Horovod's result, or synchronized.
    """
    what = title(SPARSE_ALLREDUCE, name)
    layout = layout_of(tensor)
    if layout is not torch.sparse_coo:
        kind = layout or type(tensor).__name__
        raise TypeError(f"{what}: {kind} is not a sparse COO tensor: pass tensor.to_sparse(), or use hvd.allreduce")
    reduction = make_reduction(what, None, op, 1.0, 1.0)
    if reduction.op not in (Average, Sum):
        raise ValueError(f"{what}: op=hvd.{reduction.op.name} is not for sparse tensors: use hvd.Average or hvd.Sum")
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
        # The results are the given ones, subclasses included.
        members = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor, compression)
    return Allreduce(kind, members, reduction, name, process_set, in_place=in_place)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: AnyCompression = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the average (or sum) of all ranks' tensors, of the same shape and dtype.

    Rows are spread evenly over the ranks, in their order; where that does not come out, the first ones get one more.
    Other arguments are as for `allreduce`. The gradient is what all ranks have for their rows, joined, times both
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
    """`reducescatter` of several tensors as one operation; a list of results."""
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
    """`reducescatter` in the background."""
    return _reducescatter(REDUCESCATTER, tensor, name, op, process_set, prescale_factor, postscale_factor).start()


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`grouped_reducescatter` in the background."""
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
    return Reducescatter(kind, members, reduction, name, process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, joined along the first dimension in rank order.

    The first dimension may differ between ranks, the others and the dtype may not. A scalar counts as a
    tensor of one element. The gradient of a rank's rows is the average of what all ranks have for them.
    """
    return _allgather(ALLGATHER, tensor, name, process_set).differentiable()[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """`allgather` of several tensors as one operation; a tuple of results."""
    return _allgather(GROUPED_ALLGATHER, tensors, name, process_set).differentiable()


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """`allgather` in the background."""
    return _allgather(ALLGATHER, tensor, name, process_set).start()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`grouped_allgather` in the background."""
    return _allgather(GROUPED_ALLGATHER, tensors, name, process_set).start()


def _allgather(kind: Kind, tensors: Tensor | Sequence[Tensor], name: str | None, process_set: ProcessSet) -> Allgather:
    return Allgather(kind, check_tensors(kind, tensors, title(kind, name)), name, process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, on every rank. Every rank passes one of the same shape and dtype.

    ``root_rank`` is the root's rank among all, in a process set too. The gradient is the average of all ranks' on the
    root, and zeros elsewhere.
    """
    return _broadcast(tensor, root_rank, name, process_set).differentiable()[0]


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast`, into the tensor itself."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast` in the background."""
    return _broadcast(tensor, root_rank, name, process_set).start()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """`broadcast_` in the background."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True).start()


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool = False
) -> Broadcast:
    (member,) = check_tensors(BROADCAST, tensor, title(BROADCAST, name))
    return Broadcast(tensor if in_place else member, root_rank, name, process_set, in_place=in_place)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows of this rank's tensor to every rank, in rank order; what it gets in turn, joined in rank order.

    ``splits`` are how many rows go to each rank, as a list or a one-dimensional int32 tensor; rows that are left over
    go nowhere. With splits the result is a pair: the tensor, and how many rows came from each rank, as an int32 tensor.
    Without them all ranks get as many. The gradient is what comes back of the rows, sent back.
    """
    output, received = _alltoall(tensor, splits, name, process_set).differentiable()
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """`alltoall` in the background; the result is a pair without ``splits`` too, as in Horovod."""
    return _alltoall(tensor, splits, name, process_set).start()


def _alltoall(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Alltoall:
    what = title(ALLTOALL, name)
    (member,) = check_tensors(ALLTOALL, tensor, what)
    counts = check_splits(member, splits, process_set, what)
    answer_on = splits.device if isinstance(splits, Tensor) else "cpu"
    return Alltoall(member, counts, name, process_set, answer_on)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    # Something of its own to tell, so that even a controller that does not ask makes the ranks meet.
    submit(Operation(BARRIER, lambda execution: None, own=0), process_set, []).wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return, or raise, at once."""
    return _known(handle, "poll").is_ended()


def synchronize(handle: Handle | None) -> Any:
    """Wait, without burning a core, for what an asynchronous function has begun; its result, as often as one asks.

    Raises what went wrong with it. None for None, as in Horovod: there is nothing to wait for.
    """
    return None if handle is None else _known(handle, "synchronize").wait()


def _known(handle: object, asker: str) -> Handle:
    if not isinstance(handle, Handle):
        raise WrongTypeError(
            f"{asker}({shown(handle)}): this is not a handle: pass what hvd.allreduce_async, or another function whose "
            "name has _async in it, has returned"
        )
    return handle
