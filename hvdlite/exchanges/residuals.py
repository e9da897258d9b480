"""
`Residuals`: what a rank could not send of its gradients, by the names of parameters, until it is added to later ones.

`host_sums` and `low_rank_exchange` take those of a bucket, or of a part, and change them in place. Where a step may be
taken back (``--survive``), they are copied before that.

A rank has residuals of what it sends between hosts: with several ranks on each host, of its shard of each bucket. When
the ranks change, shards are cut anew. Residuals of elements outside of a rank's new shard are its *rest*:
`between_hosts` adds it to the gradients before they are summed within the host, so that it comes to the rank that sends
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..buckets.plan import BucketPlan
from ..comm.group import Group
from ..compression.codecs import working_dtype

# Which rounding a residual is of: this rank's own gradients, or a part of the sum over hosts. In a consolidated state:
# the mean over all ranks of both. With other ranks than before: what this rank has of the shards of others.
OWN, SUM, MEAN, REST = "own", "sum", "mean", "rest"


class _KeptPart(NamedTuple):
    """A part of one gradient's residual: its first element, the factor that it contains, and its values."""

    start: int
    scale: float
    values: Tensor


class _Residual(NamedTuple):
    plan: BucketPlan
    start: int
    scale: float
    values: Tensor


class _Before(NamedTuple):
    """The residuals at the begin of a step. The values of those that the step changes are copied before."""

    of: dict[tuple[str, str], _Residual]
    loaded: dict[tuple[str, str], _KeptPart]


class Rest(NamedTuple):
    """What `Residuals.add_rest` has added to the gradient of one parameter, at ``span`` of its bucket."""

    name: str
    span: tuple[int, int]
    kept: _KeptPart


class Residuals:
    """What wires could not hold, for each bucket, until it is added to the next step's gradients."""

    def __init__(self) -> None:
        # By the kind, and the bucket's first parameter.
        self._of: dict[tuple[str, str], _Residual] = {}
        # By the parameter's name and the kind; for buckets that are yet to come.
        self._loaded: dict[tuple[str, str], _KeptPart] = {}
        # Where the step in progress may be taken back: the residuals before it, copies of those that it has changed,
        # and memory for such copies.
        self._before: _Before | None = None
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._free: dict[tuple[str, str], Tensor] = {}

    # -- a step that may be taken back

    def begin_step(self) -> None:
        """Lets what `take` and `add_rest` change from now on be taken back."""
        self.end_step()
        self._before = _Before(dict(self._of), dict(self._loaded))

    def end_step(self) -> None:
        self._free |= self._copies
        self._before, self._copies = None, {}

    def take_step_back(self) -> None:
        """Undoes the changes since `begin_step`, unless they are final."""
        if self._before is None:
            return
        of, self._loaded = self._before
        self._of = {key: each._replace(values=self._copies.get(key, each.values)) for key, each in of.items()}
        self._before, self._copies = None, {}

    def _copy(self, key: tuple[str, str], known: _Residual) -> None:
        """Copies a residual before it is changed, if it was there before the step."""
        if self._before is None or self._before.of.get(key) is not known or key in self._copies:
            return
        values, copy = known.values, self._free.pop(key, None)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (values.shape, values.dtype, values.device):
            copy = torch.empty_like(values)
        self._copies[key] = copy.copy_(values)

    # -- the residuals of a bucket

    def take(
        self,
        kind: str,
        plan: BucketPlan,
        start: int,
        values: Tensor,
        scale: float,
        ranks: int,
        sums: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """Returns the residual of ``values``, which begin at ``start`` of a bucket; zeros at first. Change it there.

        ``values`` are gradients times ``scale``, summed over ``ranks`` ranks of this host. ``sums`` is the part of the
        bucket for which this rank encodes the sum over hosts too. Residuals of other sums, from when there were other
        hosts, are added to those of the rank's own gradients.
        """
        key = kind, plan.slices[0].spec.name
        known = self._of.get(key)
        if known is not None and known[:3] == (plan, start, scale) and len(known.values) == len(values):
            self._copy(key, known)
            return known.values
        self._unload(plan, key)
        made = torch.zeros(len(values), dtype=working_dtype(values.dtype), device=values.device)
        for piece, span in zip(plan.slices, spans(plan), strict=True):
            self._fill(made, start, span, self._loaded.pop((piece.spec.name, kind), None), scale)
            if kind == OWN:
                self._fill(made, start, span, self._loaded.pop((piece.spec.name, MEAN), None), scale * ranks)
                of_sum = self._loaded.get((piece.spec.name, SUM))
                if of_sum is not None:
                    begin = span[0] + of_sum.start
                    if not sums[0] <= begin <= begin + len(of_sum.values) <= sums[1]:
                        self._fill(made, start, span, self._loaded.pop((piece.spec.name, SUM)), scale)
        self._of[key] = _Residual(plan, start, scale, made)
        return made

    def _unload(self, plan: BucketPlan, replaced: tuple[str, str] | None = None) -> None:
        """Puts residuals of this plan's parameters in other plans, and those at ``replaced``, with what was loaded."""
        names = {piece.spec.name for piece in plan.slices}
        for key, known in list(self._of.items()):
            is_of_other = known.plan != plan and not names.isdisjoint(piece.spec.name for piece in known.plan.slices)
            if key == replaced or is_of_other:
                del self._of[key]
                self._loaded |= {(name, key[0]): kept for name, kept in _parts(known)}

    def _fill(self, made: Tensor, start: int, span: tuple[int, int], kept: _KeptPart | None, scale: float) -> None:
        """Adds what was loaded for the parameter at ``span`` of a bucket to a residual that begins at ``start``."""
        if kept is None:
            return
        first, last = span
        offset, old_scale, old = kept
        begin, end = max(first + offset, start), min(first + offset + len(old), last, start + len(made))
        if begin < end:
            part = old[begin - first - offset : end - first - offset]
            made[begin - start : end - start].add_(part if scale == old_scale else part * (scale / old_scale))

    def set_rest_apart(self, plan: BucketPlan, start: int, stop: int) -> None:
        """Makes what was loaded or kept for a bucket's parameters outside of this rank's shard its rest."""
        known = self._of.get((OWN, plan.slices[0].spec.name))
        if known is None or known.plan != plan:
            self._unload(plan)
        if not self._loaded:
            return
        for piece, (first, _) in zip(plan.slices, spans(plan), strict=True):
            for kind in (OWN, SUM):
                key = piece.spec.name, kind
                kept = self._loaded.get(key)
                if kept is None:
                    continue
                begin, count = first + kept.start, len(kept.values)
                own = slice(min(max(start - begin, 0), count), max(min(stop - begin, count), 0))
                if own == slice(0, count):
                    continue
                del self._loaded[key]
                others = kept.values.clone()
                if own.start < own.stop:
                    others[own].zero_()
                    self._loaded[key] = kept._replace(start=kept.start + own.start, values=kept.values[own].clone())
                self._keep_rest(piece.spec.name, kept._replace(values=others))

    def _keep_rest(self, name: str, more: _KeptPart) -> None:
        rest = self._loaded.get((name, REST))
        if rest is not None:
            start = min(rest.start, more.start)
            stop = max(rest.start + len(rest.values), more.start + len(more.values))
            total = more.values.new_zeros(stop - start)
            for each in (rest, more):
                begin = each.start - start
                factor = 1.0 if each.scale == more.scale else more.scale / each.scale
                total[begin : begin + len(each.values)].add_(each.values, alpha=factor)
            more = more._replace(start=start, values=total)
        self._loaded[name, REST] = more

    def add_rest(
        self, plan: BucketPlan, flat: Tensor, scale: float, unused: Sequence[tuple[int, int]]
    ) -> Sequence[Rest]:
        """Adds this rank's rest, but for ``unused`` spans, to its gradients in ``flat``. Returns what was added."""
        added: list[Rest] = []
        if not self._loaded:
            return added
        for piece, span in zip(plan.slices, spans(plan), strict=True):
            key = piece.spec.name, REST
            if span not in unused and (kept := self._loaded.pop(key, None)) is not None:
                self._fill(flat, 0, span, kept, scale)
                added.append(Rest(piece.spec.name, span, kept))
        return added

    def keep_where_not_finite(self, added: Sequence[Rest], flat: Tensor) -> None:
        """Keeps a rest that `add_rest` has added, for the next step, where the averages in ``flat`` are not finite."""
        for name, (first, _), kept in added:
            begin = first + kept.start
            is_finite = flat[begin : begin + len(kept.values)].isfinite()
            if not is_finite.all():
                # The finite ones, such as those in the shard of another rank, have been sent or are in its residual.
                self._keep_rest(name, kept._replace(values=kept.values.masked_fill(is_finite, 0.0)))

    # -- all residuals

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals by a factor that the next gradients have, and these had not."""
        for residual in self._of.values():
            residual.values.mul_(factor)
        for kept in self._loaded.values():
            kept.values.mul_(factor)

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
        """Returns the residuals by name and kind, as plain tuples of a `_KeptPart` each, with copies of the values."""
        found: dict[str, dict[str, tuple[int, float, Tensor]]] = {}
        for (name, kind), (start, scale, values) in self._loaded.items():
            found.setdefault(name, {})[kind] = start, scale, values.clone()
        for (kind, _), known in self._of.items():
            for name, kept in _parts(known):
                found.setdefault(name, {})[kind] = kept.start, kept.scale, kept.values
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, tuple[int, float, Tensor]]]) -> None:
        self.end_step()
        self._free.clear()
        self._of.clear()
        self._loaded = {
            (name, kind): _KeptPart(start, scale, values.clone())
            for name, kinds in state.items()
            for kind, (start, scale, values) in kinds.items()
        }


def replace_if_finite(residual: Tensor, left: Tensor, sums: Tensor) -> None:
    """Sets ``residual`` to what is ``left`` once all ``sums`` are finite. If some are not, makes all of them NaN.

    ``sums`` are equal on all ranks that have sent for them, so these ranks do the same. It waits for no GPU.
    """
    is_finite = sums.isfinite().all()
    if sums.is_cuda:
        residual.copy_(torch.where(is_finite, left, residual))
        sums.copy_(torch.where(is_finite, sums, math.nan))
    elif is_finite:
        residual.copy_(left)
    else:
        sums.fill_(math.nan)


def _parts(residual: _Residual) -> Iterator[tuple[str, _KeptPart]]:
    """Yields a copy of what a bucket's residual has of each parameter, with the parameter's name."""
    plan, start, scale, values = residual
    for piece, (first, last) in zip(plan.slices, spans(plan), strict=True):
        begin, end = max(first, start), min(last, start + len(values))
        if begin < end:
            yield piece.spec.name, _KeptPart(begin - first, scale, values[begin - start : end - start].clone())


def spans(plan: BucketPlan) -> list[tuple[int, int]]:
    """Returns the first and last real numbers of each gradient in a bucket."""
    each = reals(plan)
    return [(piece.start * each, piece.stop * each) for piece in plan.slices]


def gaps(plan: BucketPlan) -> list[tuple[int, int]]:
    """Returns the first and last real numbers of each gap between and behind the gradients of a bucket."""
    bounds = [0, *chain.from_iterable(spans(plan)), plan.grad_numel * reals(plan)]
    return [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]


def reals(plan: BucketPlan) -> int:
    return 2 if plan.dtype.is_complex else 1
