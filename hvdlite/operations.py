"""
Collectives on single tensors, as users call them: `allreduce`, `allgather`, `broadcast`, `barrier`.

For values of the user's own, such as a loss to print; gradients take the way of `reducer`. Each function
must be called by all ranks in the same order, waits for all of them, leaves its argument alone and
returns a new tensor on the same device. Any layout and any number of dimensions will do. Gradients do
not flow through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .collective import Average, Group, ReduceOp
from .world import current_world


def allreduce(tensor: Tensor, *, name: str | None = None, op: ReduceOp = Average) -> Tensor:
    """The average (or sum) of a tensor over all ranks, in its own dtype.

    Every rank passes the same shape and dtype. Floating-point averages are scaled before they are summed,
    so that they overflow no sooner than the values themselves; integer ones are rounded towards zero.
    ``name`` is what messages call it.
    """
    group = current_world().group
    what = _title("allreduce", name)
    _check_tensor(tensor, what)
    try:
        op = ReduceOp(op)
    except ValueError:
        raise ValueError(f"{what}: op={op!r} is not hvd.Average or hvd.Sum") from None
    signature = (name, tuple(tensor.shape), str(tensor.dtype), tensor.device.type, op.name)
    group.require_agreement(signature, what, "(name, shape, dtype, device, op)")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    divides_exactly = not (tensor.is_floating_point() or tensor.is_complex())
    if op is Average and not divides_exactly:
        result.mul_(1.0 / group.size)
    wire = _as_summable(result)
    group.all_reduce(wire, what).wait()
    if wire.data_ptr() != result.data_ptr():
        result.copy_(wire)
    if op is Average and divides_exactly:
        result = wire.div(group.size, rounding_mode="trunc").to(tensor.dtype)
    return result


def allgather(tensor: Tensor, *, name: str | None = None) -> Tensor:
    """The tensors of all ranks, joined along the first dimension in rank order.

    The first dimension may differ between ranks, the others and the dtype may not. A scalar counts as a
    tensor of one element.
    """
    group = current_world().group
    what = _title("allgather", name)
    _check_tensor(tensor, what)
    return all_gather_rows(group, tensor, what)


def broadcast(tensor: Tensor, root_rank: int, *, name: str | None = None) -> Tensor:
    """The root's tensor, on every rank. Every rank passes one of the same shape and dtype."""
    group = current_world().group
    what = _title("broadcast", name)
    _check_tensor(tensor, what)
    root = root_place(root_rank, group, what)
    signature = (name, tuple(tensor.shape), str(tensor.dtype), tensor.device.type, root_rank)
    group.require_agreement(signature, what, "(name, shape, dtype, device, root_rank)")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    group.broadcast(result, root, what).wait()
    return result


def barrier() -> None:
    """Return when every rank has called it."""
    current_world().group.agree(None, "barrier")


def all_gather_rows(group: Group, tensor: Tensor, what: str) -> Tensor:
    """`allgather` among the ranks of a group."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    row_shape = tuple(rows.shape[1:])
    group.require_agreement(
        (row_shape, str(rows.dtype), rows.device.type), what, "(shape after the first dimension, dtype, device)"
    )
    row_counts = group.all_gather_object(len(rows), what)
    parts = group.all_gather(rows, what)
    return torch.cat(
        [
            part.clone().view(rows.dtype).reshape(count, *row_shape)
            for part, count in zip(parts, row_counts, strict=True)
        ]
    )


def root_place(root_rank: int, group: Group, what: str) -> int:
    """The place in the group of the global rank ``root_rank``; a ValueError if it has none."""
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or root_rank not in group.ranks:
        if group.set_id == 0:
            whose = f"the {group.size} ranks, 0 to {group.size - 1}"
        else:
            whose = f"the process set's ranks, which are the global ones {list(group.ranks)}"
        raise ValueError(f"{what}: root_rank={root_rank!r} is not one of {whose}")
    return group.ranks.index(root_rank)


def _check_tensor(tensor: object, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: {type(tensor).__name__} is not a tensor: wrap it, as torch.tensor(value)")
    if tensor.layout != torch.strided:
        raise TypeError(f"{what}: the tensor is {tensor.layout}: pass a dense one, as tensor.to_dense()")


def _as_summable(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that every engine adds; the same memory where it has one already."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in (torch.int16, torch.bool):
        return tensor.to(torch.int32)
    return tensor


def _title(operation: str, name: str | None) -> str:
    return operation if name is None else f"{operation} of {name!r}"
