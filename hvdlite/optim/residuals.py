"""
`Residuals`: what a rank could not send of its gradients, by the names of parameters, until it is added to later ones.

`encoded` and `low_rank_exchange` take those of a bucket, or of its part, and change them in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group
from ..compression.codecs import working_dtype
from .plan import BucketPlan

# Which rounding a residual is of: this rank's own gradients, or a part of the sum over hosts. In a consolidated state:
# the mean over all ranks of both.
OWN, SUM, MEAN = "own", "sum", "mean"


class _Kept(NamedTuple):
    """A part of one gradient's residual: its first element, the factor that it contains, and its values."""

    start: int
    scale: float
    values: Tensor


class _Residual(NamedTuple):
    plan: BucketPlan
    start: int
    scale: float
    values: Tensor


class Residuals:
    """What wires could not hold, for each bucket, until it is added to the next step's gradients."""

    def __init__(self) -> None:
        # By the kind, and the bucket's first parameter.
        self._of: dict[tuple[str, str], _Residual] = {}
        # By the parameter's name and the kind; for buckets that are yet to come.
        self._loaded: dict[tuple[str, str], _Kept] = {}

    def take(self, kind: str, plan: BucketPlan, start: int, values: Tensor, scale: float, ranks: int) -> Tensor:
        """Returns the residual of ``values``, which begin at ``start`` of a bucket; zeros at first. Change it there.

        ``values`` are gradients times ``scale``, summed over ``ranks`` ranks of this host.
        """
        key = kind, plan.slices[0].spec.name
        known = self._of.get(key)
        if known is not None and known[:3] == (plan, start, scale) and len(known.values) == len(values):
            return known.values
        if known is not None:
            # The buckets have been planned again.
            self.load_state_dict(self.state_dict())
        made = torch.zeros(len(values), dtype=working_dtype(values.dtype), device=values.device)
        for piece, span in zip(plan.slices, spans(plan), strict=True):
            self._fill(made, start, span, self._loaded.pop((piece.spec.name, kind), None), scale)
            if kind == OWN:
                self._fill(made, start, span, self._loaded.pop((piece.spec.name, MEAN), None), scale * ranks)
        self._of[key] = _Residual(plan, start, scale, made)
        return made

    def _fill(self, made: Tensor, start: int, span: tuple[int, int], kept: _Kept | None, scale: float) -> None:
        """Adds what was loaded for the parameter at ``span`` of a bucket to a residual that begins at ``start``."""
        if kept is None:
            return
        first, last = span
        offset, old_scale, old = kept
        begin, end = max(first + offset, start), min(first + offset + len(old), last, start + len(made))
        if begin < end:
            part = old[begin - first - offset : end - first - offset]
            made[begin - start : end - start].add_(part if scale == old_scale else part * (scale / old_scale))

    def means(self, plans: Sequence[BucketPlan], group: Group) -> dict[str, tuple[int, float, Tensor]]:
        """Returns the mean over the ranks of all residuals, by name and without their scales. It waits for all."""
        own = self.state_dict()
        means: dict[str, tuple[int, float, Tensor]] = {}
        for plan in plans:
            dtype = working_dtype(plan.dtype.to_real())
            total = torch.zeros(plan.grad_numel * reals(plan), dtype=dtype, device=plan.device)
            for piece, (first, _) in zip(plan.slices, spans(plan), strict=True):
                for start, scale, values in own.get(piece.spec.name, {}).values():
                    total[first + start : first + start + len(values)].add_(values.div(scale))
            group.all_reduce(total, f"the residuals of the {plan.describe()}").wait()
            total.div_(group.size)
            for piece, (first, last) in zip(plan.slices, spans(plan), strict=True):
                if total[first:last].any():
                    means[piece.spec.name] = 0, 1.0, total[first:last].clone()
        return means

    def state_dict(self) -> dict[str, dict[str, tuple[int, float, Tensor]]]:
        """Returns the residuals by name and kind, as plain tuples of a `_Kept` each, with copies of the values."""
        found: dict[str, dict[str, tuple[int, float, Tensor]]] = {}
        for (name, kind), (start, scale, values) in self._loaded.items():
            found.setdefault(name, {})[kind] = start, scale, values.clone()
        for (kind, _), known in self._of.items():
            for piece, (first, last) in zip(known.plan.slices, spans(known.plan), strict=True):
                begin, end = max(first, known.start), min(last, known.start + len(known.values))
                if begin < end:
                    values = known.values[begin - known.start : end - known.start].clone()
                    found.setdefault(piece.spec.name, {})[kind] = begin - first, known.scale, values
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, tuple[int, float, Tensor]]]) -> None:
        """Replaces all residuals by those of a dict that `state_dict` returned."""
        self._of.clear()
        self._loaded = {
            (name, kind): _Kept(start, scale, values.clone())
            for name, kinds in state.items()
            for kind, (start, scale, values) in kinds.items()
        }


def spans(plan: BucketPlan) -> list[tuple[int, int]]:
    """Returns the first and last real numbers of each gradient in a bucket."""
    each = reals(plan)
    return [(piece.start * each, piece.stop * each) for piece in plan.slices]


def reals(plan: BucketPlan) -> int:
    """Returns how many real numbers an element of a bucket is."""
    return 2 if plan.dtype.is_complex else 1
