"""
Gradients of the collectives: what a loss on any rank says about the tensors on all.

    y_r = f(x_0, ..., x_n)  ──  dL/dx_i = sum over r of (dy_r/dx_i)ᵀ dL_r/dy_r, where L is the sum of all ranks' losses

A sum goes back as a sum, rows that were gathered as sums of rows to those who gave them, a broadcast as a sum to its
root, rows that were exchanged as an exchange. (Horovod divides the latter by the number of ranks where it gathers or
broadcasts, which is the gradient of no function.) Every rank must go backward through what it went forward through;
the collectives of the backward pass have the forward's name with ``.gradient`` behind it. They can be differentiated
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from ..channels.reduce_op import Adasum, Average, Product, Sum
from ..errors import GradientError
from ..process_set import ProcessSet
from ..process_sets import group_of
from .combining import start_allreduce, start_reducescatter
from .moving import AllGather, AllToAll, start_allgather, start_alltoall, start_broadcast
from .reduction import Reduction
from .submission import title

_PLAIN_SUM = Reduction(Sum)


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
        outputs = _as_tuple(result)
        ctx.kind, ctx.reduction, ctx.name, ctx.process_set = kind, reduction, name, process_set
        ctx.members = _differentiable(tensors)
        if reduction.op not in (Average, Sum):
            mine = [_savable(tensors[number]) for number in ctx.members]
            ctx.save_for_backward(*mine, *[outputs[number] for number in ctx.members])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, members = ctx.reduction.op, ctx.members
        mine = [grads[number] for number in members]
        if op is Adasum:
            raise GradientError(
                f"{title(ctx.kind, ctx.name)}: op=hvd.Adasum has no gradient here: detach() the tensor, or use hvd.Sum"
            )
        if op in (Average, Sum):
            results = list(allreduce(ctx.kind, mine, ctx.reduction, _derived(ctx.name), ctx.process_set))
        elif op is Product:
            results = _backward_of_product(ctx, mine)
        else:
            results = _backward_of_extreme(ctx, mine)
        return (None, None, None, None, *_in_places(results, members, len(grads)))


def _backward_of_extreme(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    """To whoever had the minimum or maximum; in equal parts where several had it."""
    reduction: Reduction = ctx.reduction
    tensors, outputs = ctx.saved_tensors[: len(grads)], ctx.saved_tensors[len(grads) :]
    had_it = [(reduction.alone(x) == y).to(x.dtype) for x, y in zip(tensors, outputs, strict=True)]
    reduced = allreduce("grouped_allreduce", [*grads, *had_it], _PLAIN_SUM, _derived(ctx.name), ctx.process_set)
    totals, counts = reduced[: len(grads)], reduced[len(grads) :]
    factor = reduction.prescale_factor * reduction.postscale_factor
    return [
        total * mask / count.clamp(min=1) * factor for total, mask, count in zip(totals, had_it, counts, strict=True)
    ]


def _backward_of_product(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    """The product of the other ranks', which all have to be known: a quotient would not do for zeros."""
    reduction: Reduction = ctx.reduction
    tensors = [tensor.unsqueeze(0) for tensor in ctx.saved_tensors[: len(grads)]]
    name, me = _derived(ctx.name), group_of(ctx.process_set).rank
    totals = allreduce("grouped_allreduce", grads, _PLAIN_SUM, name, ctx.process_set)
    everybodys = allgather("grouped_allgather", tensors, name, ctx.process_set)
    results = []
    for total, all_of_them in zip(totals, everybodys, strict=True):
        others = torch.cat([all_of_them[:me], all_of_them[me + 1 :]]) * reduction.prescale_factor
        factor = reduction.prescale_factor * reduction.postscale_factor
        results.append(total * (others.prod(0) * factor).conj())
    return results


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
        if reduction.op is Average:
            factor /= group_of(ctx.process_set).size
        scaled = [grads[number] * factor for number in ctx.members]
        results = allgather(ctx.kind.replace("reducescatter", "allgather"), scaled, _derived(ctx.name), ctx.process_set)
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
        parts = reducescatter(kind, mine, _PLAIN_SUM, name, ctx.process_set, ctx.rows)
        results = [part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        return (None, None, None, *_in_places(results, ctx.members, len(grads)))


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        result: Tensor = start_broadcast(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (total,) = allreduce("allreduce", grads, _PLAIN_SUM, _derived(ctx.name), ctx.process_set)
        group = group_of(ctx.process_set)
        is_root = group.rank == group.place_of_root(ctx.root_rank, title("broadcast", ctx.name))
        return total if is_root else torch.zeros_like(total), None, None, None


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
        result: Tensor | tuple[Tensor, Tensor] = start_alltoall(body, tensor, name, process_set).wait()
        ctx.name, ctx.process_set = name, process_set
        ctx.received, ctx.kept_rows = body.received, len(tensor) - sum(counts)
        if isinstance(result, tuple):
            ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0]
        result = alltoall(grad, ctx.received, None, _derived(ctx.name), ctx.process_set)
        assert isinstance(result, Tensor), "nobody asked for the splits"
        if ctx.kept_rows:
            result = torch.cat([result, result.new_zeros(ctx.kept_rows, *result.shape[1:])])
        return result, None, None, None, None


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _savable(tensor: Tensor) -> Tensor:
    """What autograd may keep of it: it refuses tensors of inference mode outside of that."""
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def _differentiable(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of those that can have a gradient: the same on all ranks, whoever wants one."""
    return [number for number, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]


def _in_places(results: Sequence[Tensor], members: Sequence[int], count: int) -> list[Tensor | None]:
    by_number = dict(zip(members, results, strict=True))
    return [by_number.get(number) for number in range(count)]


def _derived(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"
