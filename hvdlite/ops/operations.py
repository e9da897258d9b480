"""
Collectives on tensors, as users call them: these wait for their result, and gradients flow through them.

    operation(tensor) ── the same on every rank of the process set ── result, on the tensor's device

For values of the user's own; gradients of a `DistributedOptimizer` take the way of `optim`. What holds for all:

- Every rank of ``process_set``, which may be all, must call the function; those that have called the
  same, with the same ``name``, pair up. ``name`` is what messages call it; without one, they pair up in the order of
  their calls.
- Tensors may have any number of dimensions, also none and of no length, any layout in memory, and dtypes from uint8,
  int8 to int64, bool, float16, bfloat16, float32, float64 to complex64 and complex128; the functions that do no
  arithmetic take all others that PyTorch can copy. What cannot travel (see `travel`) is a TypeError or a ValueError
  before anything is asked of the other ranks. Arguments are left alone but by the functions whose names end in ``_``,
  which overwrite them.
- Results are contiguous, and the same bits on every rank that gets the same.
- The gradient of each is Horovod's (see `autograd`); it does not flow through those that end in ``_``, nor through the
  asynchronous ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp
from ..compression.casts import AnyCompression, Compression
from ..control.handle import Handle
from ..errors import WrongTypeError
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import global_process_set, group_of
from ..values import shown
from . import autograd
from .combining import start_allreduce
from .moving import check_splits, start_barrier, start_broadcast
from .reduction import make_reduction
from .submission import check_tensors, title
from .travel import check_travels


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
    what = title("allreduce", name)
    tensor = check_travels(tensor, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor, compression)
    return autograd.allreduce("allreduce", [tensor], reduction, name, process_set)[0]


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
    what = title("allreduce", name)
    check_travels(tensor, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor)
    start_allreduce("allreduce", [tensor], reduction, name, process_set, in_place=True).wait()
    return tensor


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
    what = title("grouped_allreduce", name)
    members = check_tensors(tensors, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor, compression)
    return list(autograd.allreduce("grouped_allreduce", members, reduction, name, process_set))


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
    what = title("grouped_allreduce", name)
    check_tensors(tensors, what)
    reduction = make_reduction(what, average, op, prescale_factor, postscale_factor)
    start_allreduce("grouped_allreduce", tensors, reduction, name, process_set, in_place=True).wait()
    return tuple(tensors)


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
    what = title("reducescatter", name)
    tensor = check_travels(tensor, what)
    reduction = make_reduction(what, None, op, prescale_factor, postscale_factor, compression)
    return autograd.reducescatter("reducescatter", [tensor], reduction, name, process_set)[0]


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
    what = title("grouped_reducescatter", name)
    members = check_tensors(tensors, what)
    reduction = make_reduction(what, None, op, prescale_factor, postscale_factor, compression)
    return list(autograd.reducescatter("grouped_reducescatter", members, reduction, name, process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, joined along the first dimension in rank order.

    The first dimension may differ between ranks, the others and the dtype may not. A scalar counts as a
    tensor of one element. The gradient of a rank's rows is the average of what all ranks have for them.
    """
    tensor = check_travels(tensor, title("allgather", name))
    return autograd.allgather("allgather", [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """`allgather` of several tensors as one operation; a tuple of results."""
    members = check_tensors(tensors, title("grouped_allgather", name))
    return tuple(autograd.allgather("grouped_allgather", members, name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, on every rank. Every rank passes one of the same shape and dtype.

    ``root_rank`` is the root's rank among all, in a process set too. The gradient is the average of all ranks' on the
    root, and zeros elsewhere.
    """
    tensor = check_travels(tensor, title("broadcast", name))
    return autograd.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast`, into the tensor itself."""
    check_travels(tensor, title("broadcast", name))
    start_broadcast(tensor, root_rank, name, process_set, in_place=True).wait()
    return tensor


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
    tensor = check_travels(tensor, title("alltoall", name))
    counts = check_splits(tensor, splits, group_of(process_set, title("alltoall", name)).size, name)
    return autograd.alltoall(tensor, counts, splits, name, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    start_barrier(process_set).wait()


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
