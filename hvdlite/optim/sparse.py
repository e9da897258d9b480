"""
Sparse gradients: gathered row by row instead of summed as a whole.

    param.grad (indices, values) ── all-gather from every rank ── joined in rank order, coalesced ── param.grad

A parameter comes here once some rank has shown a sparse gradient for it; until then it is in a bucket
like any other. See `in_flight` for how the ranks learn it together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.group import Group
from ..errors import GradientError, MismatchError
from ..ops.gather_scatter import all_gather_rows
from .scaling import Scaling
from .slot import Slot


class SparseHome:
    """Where the gradient of one such parameter is kept between backward and step: in ``param.grad`` itself."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradient's values, real where they are complex."""
        return self.slot.param.dtype.to_real()

    def take(self, slot: Slot, last_pass: bool) -> bool:
        """Check that the gradient is still of the kind that all ranks gather."""
        grad = slot.param.grad
        if grad is not None and grad.layout == torch.strided:
            raise GradientError(
                f"parameter {slot.name!r} had sparse gradients in earlier steps and has a dense one now: keep "
                "it one or the other, or wrap the optimizer with sparse_as_dense=True"
            )
        if last_pass:
            slot.arrived = True
        return False

    def reduce(self, group: Group, scaling: Scaling, count: int, optimizer: str) -> None:
        """Join the rows of all ranks, summed, or averaged over ``count`` of them.

        Where no rank has one the gradient is None.

        ``optimizer`` is its name, by which errors and stalls tell it from others.
        Every rank must call it, for the same parameters in the same order.
        """
        param, name = self.slot.param, self.slot.name
        what = f"the all-gather of the sparse gradient of {name} ({optimizer})"
        grad = param.grad
        mine = None if grad is None else grad.coalesce()
        dims = group.all_gather_json(None if mine is None else mine.sparse_dim(), what)
        known = {dim for dim in dims if dim is not None}
        if not known:
            return
        if len(known) > 1:
            raise MismatchError(f"parameter {name!r} has gradients of {sorted(known)} sparse dimensions on the ranks")
        rows = mine if mine is not None else _no_rows(param, known.pop())
        indices = all_gather_rows(group, rows.indices().t(), what).t()
        mine_scaled = rows.values() if scaling.before == 1.0 else rows.values() * scaling.before
        values = all_gather_rows(group, mine_scaled, what)
        joined = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False).coalesce()
        # Those of one row have been added up by now.
        total = joined._values()
        scaling.finish((torch.view_as_real(total) if total.is_complex() else total).view(-1), count)
        param.grad = joined


def _no_rows(param: Tensor, sparse_dim: int) -> Tensor:
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=param.device)
    values = torch.empty(0, *param.shape[sparse_dim:], dtype=param.dtype, device=param.device)
    empty = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
    return empty.coalesce()
