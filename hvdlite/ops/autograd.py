"""
Gradients of the collectives: what Horovod says they are, to the letter.

    allreduce        the same all-reduce of the gradients: op, factors and compression as forward
    reducescatter    gathered; times the number of ranks for a sum, and times both factors
    allgather        averaged over the ranks; of that, this rank's rows
    broadcast        averaged over the ranks, on the root; zeros elsewhere
    alltoall         sent back

Ranks are those of the process set. Where parameters' gradients are averaged over them afterwards, they are those of the
mean of all ranks' losses for a sum, an average and an all-to-all; a part of that, one in the number of ranks, for an
all-gather and a broadcast, and that number of times as much for a reduce-scatter. Those of Min, Max, Product and Adasum
are no derivatives at all. All of them are what programs that were written for Horovod have been trained with.

Every rank must go backward through what it went forward through; the collectives of the backward pass have the
forward's name with ``.gradient`` behind it. They can be differentiated again, by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from ..comm.reduce_op import Average, Sum
from ..compression.casts import CastCompression
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import group_of
from .combining import start_allreduce, start_reducescatter
from .moving import AllGather, AllToAll, start_allgather, start_alltoall, start_broadcast
from .reduction import Reduction
from .submission import title

_PLAIN_AVERAGE = Reduction(Average)


def allreduce(
    kind: str, tensors: Sequence[Tensor], reduction: Reduction, name: str | None, process_set: ProcessSet
) -> tuple[Tensor, ...]:
    """All-reduce as one operation of this kind, ``allreduce`` of one tensor or ``grouped_allreduce``."""
    return _apply(_Allreduce, kind, reduction, name, process_set, *tensors)  # type: ignore[no-any-return]  # a tuple


def reducescatter(
    kind: str,
    tensors: Sequence[Tensor],
    reduction: Reduction,
    name: str | None,
    process_set: ProcessSet,
    rows: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, ...]:
    """Reduce-scatter as one operation of this kind; ``rows`` as `combining.start_reducescatter` has it."""
    arguments = (kind, reduction, name, process_set, rows)
    return _apply(_Reducescatter, *arguments, *tensors)  # type: ignore[no-any-return]  # a tuple


def allgather(kind: str, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> tuple[Tensor, ...]:
    """All-gather as one operation of this kind."""
    return _apply(_Allgather, kind, name, process_set, *tensors)  # type: ignore[no-any-return]  # a tuple


def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Broadcast."""
    return _apply(_Broadcast, tensor, root_rank, name, process_set)  # type: ignore[no-any-return]  # a tensor


def alltoall(
    tensor: Tensor,
    counts: Sequence[int],
    given: Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Tensor | tuple[Tensor, Tensor]:
    """All-to-all; the arguments are those of `moving.AllToAll`."""
    return _apply(_Alltoall, tensor, counts, given, name, process_set)  # type: ignore[no-any-return]  # one of these


def _apply(function: type[Function], *arguments: Any) -> Any:
    # Not typed in every version of torch.
    untyped: Any = function
    return untyped.apply(*arguments)


class _Allreduce(Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, reduction: Reduction, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        result = start_allreduce(kind, tensors, reduction, name, process_set).wait()
        ctx.kind, ctx.reduction, ctx.name, ctx.process_set = kind, reduction, name, process_set
        ctx.members = _differentiable(tensors)
        return _as_tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        mine = [grads[number] for number in ctx.members]
        results = allreduce(ctx.kind, mine, ctx.reduction, _derived(ctx.name), ctx.process_set)
        return (None, None, None, None, *_in_places(results, ctx.members, len(grads)))


class _Reducescatter(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        rows: Sequence[Sequence[int]] | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        result = start_reducescatter(kind, tensors, reduction, name, process_set, rows).wait()
        ctx.kind, ctx.reduction, ctx.name, ctx.process_set = kind, reduction, name, process_set
        ctx.members = _differentiable(tensors)
        return _as_tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        reduction: Reduction = ctx.reduction
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op is Sum:
            factor *= group_of(ctx.process_set).size
        mine = [grads[number] for number in ctx.members]
        wires = [_compressed(grad, reduction) * factor for grad in mine]
        gathered = allgather(ctx.kind.replace("reducescatter", "allgather"), wires, _derived(ctx.name), ctx.process_set)
        results = [result.to(grad.dtype) for result, grad in zip(gathered, mine, strict=True)]
        return (None, None, None, None, None, *_in_places(results, ctx.members, len(grads)))


class _Allgather(Function):
    @staticmethod
    def forward(ctx: Any, kind: str, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        body = AllGather(tensors, is_group=kind == "grouped_allgather")
        result = start_allgather(kind, body, tensors, name, process_set).wait()
        ctx.kind, ctx.name, ctx.process_set = kind, name, process_set
        ctx.members = _differentiable(tensors)
        ctx.rows = [body.rows[number] for number in ctx.members]
        ctx.shapes = [tensors[number].shape for number in ctx.members]
        return _as_tuple(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kind, name = ctx.kind.replace("allgather", "reducescatter"), _derived(ctx.name)
        mine = [grads[number] for number in ctx.members]
        parts = reducescatter(kind, mine, _PLAIN_AVERAGE, name, ctx.process_set, ctx.rows)
        results = [part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        return (None, None, None, *_in_places(results, ctx.members, len(grads)))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return _as_own(start_broadcast(tensor, root_rank, name, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (average,) = allreduce("allreduce", grads, _PLAIN_AVERAGE, _derived(ctx.name), ctx.process_set)
        group = group_of(ctx.process_set)
        is_root = group.rank == group.place_of_root(ctx.root_rank, title("broadcast", ctx.name))
        if not is_root:
            # Not zeros that have come from nowhere: a second backward pass has to come through here on every rank.
            average = average.masked_fill(torch.ones((), dtype=torch.bool, device=average.device), 0)
        return average, None, None, None


class _Alltoall(Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        counts: Sequence[int],
        given: Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Tensor | tuple[Tensor, Tensor]:
        body = AllToAll(tensor, counts, given)
        output, received = start_alltoall(body, tensor, name, process_set).wait()
        ctx.name, ctx.process_set = name, process_set
        ctx.received, ctx.kept_rows = body.received, len(tensor) - sum(counts)
        if given is None:
            return _as_own(output)
        ctx.mark_non_differentiable(received)
        return _as_own(output), received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0]
        result = alltoall(grad, ctx.received, None, _derived(ctx.name), ctx.process_set)
        assert isinstance(result, Tensor), "nobody asked for the splits"
        if ctx.kept_rows:
            result = torch.cat([result, result.new_zeros(ctx.kept_rows, *result.shape[1:])])
        return result, None, None, None, None


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(_as_own(output) for output in ((result,) if isinstance(result, Tensor) else result))


def _as_own(output: Tensor) -> Tensor:
    """The same memory as no view of another tensor: views that a Function returns may not be changed in place."""
    if not output._is_view():
        return output
    own = torch.empty(0, dtype=output.dtype, device=output.device)
    return own.set_(output.untyped_storage(), output.storage_offset(), output.size(), output.stride())


def _compressed(grad: Tensor, reduction: Reduction) -> Tensor:
    """A gradient as it travels; it cannot where a compression of the user's own makes something to be summed of it."""
    compression = reduction.compression
    if isinstance(compression, CastCompression) and grad.is_floating_point() and compression.casts(grad.dtype):
        return grad.to(compression.dtype)
    return grad


def _differentiable(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of those that can have a gradient: the same on all ranks, whoever wants one."""
    return [number for number, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]


def _in_places(results: Sequence[Tensor], members: Sequence[int], count: int) -> list[Tensor | None]:
    by_number = dict(zip(members, results, strict=True))
    return [by_number.get(number) for number in range(count)]


def _derived(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"
