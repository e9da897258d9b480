"""
`EncodedExchange`: averages gradients between hosts in a format that cannot be summed, such as int8 with scales.

    bucket ── summed within the host ── encoded ── sent between hosts ── decoded and summed ── gathered within the host

A rank encodes only its shard of its host's sum. Two hosts send each other everything (an all-gather). Three or more
first send each host its part of the shard (an all-to-all), which sums it, encodes the sum, and sends it to all (an
all-gather), as ZeRO++ does (arXiv 2306.10209). On a single host nothing is encoded.

`builtin_exchanges` has the other exchanges; `compression.codecs` the formats; `stages` runs the stages of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.work import Work
from ..compression.codecs import Codec, add_decoded, encode_all, wire_bytes, working_dtype
from ..log import log
from .builtin_exchanges import AllReduce, as_real
from .exchange import Exchange, ExchangeWork, Gradients, Links
from .flags import ParticipantCount
from .plan import ALIGNMENT_BYTES, BucketPlan
from .settings import Settings
from .stages import StageRunner

# Which rounding a residual is of: this rank's own gradients, or a part of the sum over hosts. In a consolidated state:
# the mean over all ranks of both.
_OWN, _SUM, _MEAN = "own", "sum", "mean"


class EncodedExchange(Exchange):
    """Averages or sums a bucket by a `Codec` between hosts, and in its own dtype within each."""

    legs = 2
    aligned = True

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._settings = settings
        self._codec = codec
        self._residuals = _Residuals()
        self._runner = StageRunner()
        # For ranks of a single host.
        self._plain = AllReduce(replace(settings, codec=None))
        self._has_told = False

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """Returns the factor of gradients before they are summed, as in `Settings.scaling`."""
        return self._settings.scaling(dtype, size).before

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Starts the stages of one bucket; on a GPU launches all of them."""
        if not links.legs:
            if not self._has_told and links.all.rank == 0:
                log.info("%r has no effect: all ranks are on one host, so gradients are not encoded", self._codec)
            self._has_told = True
            return self._plain.begin(gradients, links)
        what = f"the {self.word} of the {gradients.what}"
        stages = self._stages(gradients, links, what)
        if gradients.plan.device.type == "cpu":
            return ExchangeWork([links.all.watched(self._runner.start(stages), what)])
        for work in stages:
            work.wait()
        return ExchangeWork()

    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Divides the sum where the result is an average."""
        if begun.kept is not None:
            self._plain.finish(gradients, begun, count)
        else:
            scaling = self._settings.scaling(gradients.plan.dtype, gradients.ranks)
            scaling.finish(as_real(gradients.flat), count)

    def state_dict(self) -> dict[str, Any]:
        """Returns what roundings have taken from this rank's gradients so far, by the names of parameters."""
        residuals = self._residuals.state_dict()
        return {"codec": repr(self._codec), "residuals": residuals} if residuals else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a dict that `state_dict` returned on this rank. Raises ValueError for one of another exchange."""
        if state and state.get("codec") != repr(self._codec):
            raise ValueError(
                f"the checkpoint has the state of {state.get('codec', 'another exchange')}, and the optimizer has "
                f"compression={self._codec!r}: make it with the same, or delete the key 'hvdlite' from the state_dict"
            )
        self._residuals.load_state_dict(state.get("residuals", {}))

    def consolidate(self, plans: Sequence[BucketPlan], group: Group) -> dict[str, Any]:
        """Returns the mean of all ranks' residuals, as a state."""
        means = {name: {_MEAN: kept} for name, kept in self._residuals.means(plans, group).items()}
        return {"codec": repr(self._codec), "residuals": means} if means else {}

    # -- the stages of a bucket

    def _stages(self, gradients: Gradients, links: Links, what: str) -> Iterator[Work]:
        first, second = links.legs
        # In `data` the writes of these stages are not counted as changes that the user has made.
        flat = as_real(gradients.flat.data)
        used = _Used.of(gradients)
        within = first.within
        bounds = _split(flat.numel(), within.size, ALIGNMENT_BYTES // flat.element_size())
        start, stop = bounds[within.rank], bounds[within.rank + 1]
        shard = flat
        if within.size > 1:
            counts = [stop - start for start, stop in pairwise(bounds)]
            shard = flat.new_empty(stop - start)
            yield within.reduce_scatter(shard, flat, counts, what)
        if first.across.size == 2:
            wire = self._encode(shard, gradients.plan, start, [0, shard.numel()], links, used)
            wires, work = first.across.begin_all_gather(wire, what, [wire.numel()] * 2)
            yield work
            add_decoded(self._codec, wires, shard)
        else:
            yield from self._two_legs(shard, gradients.plan, start, links, used, what)
        if within.size > 1:
            shards, work = second.within.begin_all_gather(shard, what, [n * flat.element_size() for n in counts])
            yield work
            for (start, stop), data in zip(pairwise(bounds), shards, strict=True):
                flat[start:stop].copy_(data.view(flat.dtype))

    def _two_legs(
        self, shard: Tensor, plan: BucketPlan, start: int, links: Links, used: _Used, what: str
    ) -> Iterator[Work]:
        first, second = (leg.across for leg in links.legs)
        codec = self._codec
        bounds = _split(shard.numel(), first.size, codec.block)
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        wire = self._encode(shard, plan, start, bounds, links, used)
        own = sizes[first.rank]
        wires, work = first.begin_all_to_all(wire, sizes, [own] * first.size, what)
        yield work
        begin, end = bounds[first.rank], bounds[first.rank + 1]
        total = torch.empty(end - begin, dtype=working_dtype(shard.dtype), device=shard.device)
        add_decoded(codec, wires, total)
        wire = torch.empty(own, dtype=torch.uint8, device=shard.device)
        residual = self._residual(_SUM, plan, start + begin, total, links)
        encode_all(codec, total, wire, residual)
        wires, work = second.begin_all_gather(wire, what, sizes)
        yield work
        for (begin, end), each in zip(pairwise(bounds), wires, strict=True):
            add_decoded(codec, [each], shard[begin:end])

    def _encode(
        self, shard: Tensor, plan: BucketPlan, start: int, bounds: Sequence[int], links: Links, used: _Used
    ) -> Tensor:
        """Returns the wire of a shard that begins at ``start`` of the bucket, with its parts one after the other."""
        codec = self._codec
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=shard.device)
        residual = self._residual(_OWN, plan, start, shard, links)
        # What nobody on this host has used stays zero, and keeps its residual for when it is used again.
        kept = [] if residual is None else [(part, residual[part].clone()) for part in used.missing(shard, start)]
        for part, _ in kept:
            assert residual is not None, "it has parts"
            residual[part].zero_()
        at = 0
        for (begin, end), size in zip(pairwise(bounds), sizes, strict=True):
            own = None if residual is None else residual[begin:end]
            encode_all(codec, shard[begin:end], wire[at : at + size], own)
            at += size
        for part, values in kept:
            assert residual is not None, "as above"
            residual[part].copy_(values)
        return wire

    def _residual(self, kind: str, plan: BucketPlan, start: int, values: Tensor, links: Links) -> Tensor | None:
        if not self._codec.error_feedback:
            return None
        scale = self.scale_before(plan.dtype, links.all.size)
        return self._residuals.take(kind, plan, start, values, scale, links.legs[0].within.size)


class _Used(NamedTuple):
    """The parameters of a bucket that this rank has not used in this step, as (start, stop) in its real numbers."""

    unused: list[tuple[int, int]]

    @classmethod
    def of(cls, gradients: Gradients) -> _Used:
        counts = as_real(gradients.counts)[:: _reals(gradients.plan)]
        flags = counts[: len(gradients.plan.slices)].tolist()
        return cls([span for span, flag in zip(_spans(gradients.plan), flags, strict=True) if flag == 0])

    def missing(self, shard: Tensor, start: int) -> list[slice]:
        """Returns the parts of a shard, which begins at ``start``, that no rank of the host has used."""
        found = []
        for first, last in self.unused:
            part = slice(max(first - start, 0), min(last - start, shard.numel()))
            if part.start < part.stop and not shard[part].any():
                found.append(part)
        return found


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


class _Residuals:
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
        for piece, span in zip(plan.slices, _spans(plan), strict=True):
            self._fill(made, start, span, self._loaded.pop((piece.spec.name, kind), None), scale)
            if kind == _OWN:
                self._fill(made, start, span, self._loaded.pop((piece.spec.name, _MEAN), None), scale * ranks)
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
            total = torch.zeros(plan.grad_numel * _reals(plan), dtype=dtype, device=plan.device)
            for piece, (first, _) in zip(plan.slices, _spans(plan), strict=True):
                for start, scale, values in own.get(piece.spec.name, {}).values():
                    total[first + start : first + start + len(values)].add_(values.div(scale))
            group.all_reduce(total, f"the residuals of the {plan.describe()}").wait()
            total.div_(group.size)
            for piece, (first, last) in zip(plan.slices, _spans(plan), strict=True):
                if total[first:last].any():
                    means[piece.spec.name] = 0, 1.0, total[first:last].clone()
        return means

    def state_dict(self) -> dict[str, dict[str, tuple[int, float, Tensor]]]:
        """Returns the residuals by name and kind, as plain tuples of a `_Kept` each, with copies of the values."""
        found: dict[str, dict[str, tuple[int, float, Tensor]]] = {}
        for (name, kind), (start, scale, values) in self._loaded.items():
            found.setdefault(name, {})[kind] = start, scale, values.clone()
        for (kind, _), known in self._of.items():
            for piece, (first, last) in zip(known.plan.slices, _spans(known.plan), strict=True):
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


def _spans(plan: BucketPlan) -> list[tuple[int, int]]:
    """Returns the first and last real numbers of each gradient in a bucket."""
    reals = _reals(plan)
    return [(piece.start * reals, piece.stop * reals) for piece in plan.slices]


def _reals(plan: BucketPlan) -> int:
    return 2 if plan.dtype.is_complex else 1


def _split(numel: int, count: int, multiple: int) -> list[int]:
    """Returns the bounds of ``count`` parts of about equal size, each a multiple of ``multiple`` but for the last."""
    each = -(-numel // (count * multiple)) * multiple
    return [min(number * each, numel) for number in range(count + 1)]
