"""
`LowRankExchange`: averages gradients between hosts as products of thin matrices, PowerSGD (arXiv 1905.13727).

    this host's sum ── P, and what is not a matrix ── summed ── Q ── summed ── P Qᵀ

Each of a host's ranks has some of a bucket's parameters, whole. All its matrices are sent in one all-reduce for P,
which has the other gradients too, and one for Q. `between_hosts` has what comes before and after;
`compression.approximations` the mathematics. What P and a host's own part of Q do not hold of its sum, it adds to its
next.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.plan import BucketPlan
from ..buckets.settings import Settings
from ..comm.reduce_op import Max
from ..comm.work import Work
from ..compression.approximations import LowRank, orthonormal, products, rows_at_a_time, seeded, times_matrix
from ..compression.codecs import working_dtype
from ..log import log
from .between_hosts import Beside, BetweenHosts, BucketShard
from .residuals import OWN, reals, spans

# What stands for a rank that has no say.
_SILENT = torch.iinfo(torch.int64).min


class LowRankExchange(BetweenHosts):
    """Averages or sums a bucket by low-rank products between hosts, and in its own dtype within each.

    All hosts must have the same Q, and have made as many steps. So beside each bucket they compare both. Where they
    differ, as after ranks have joined, they begin with new Q, and go on with the highest number of steps.
    """

    def __init__(self, settings: Settings, form: LowRank) -> None:
        super().__init__(settings, form)
        self._form: LowRank = form
        # By the parameter's name: Qᵀ, of shape (rank, cols), and the number of steps in which it was averaged.
        self._q: dict[str, Tensor] = {}
        self._steps: dict[str, int] = {}
        # By the parameter's name: its first Q.
        self._seeds: dict[str, Tensor] = {}
        # By the first name of a shard: a digest of its Q when they were loaded, or 0. Where it is equal and as many
        # steps were made since, all Q are.
        self._marks: dict[str, int] = {}
        # These three at the begin of a step, if its changes can be taken back. Their values never change.
        self._before: tuple[dict[str, Tensor], dict[str, int], dict[str, int]] | None = None

    def state_dict(self) -> dict[str, Any]:
        if not self._steps:
            return {}
        q = {name: each.clone() for name, each in self._q.items()}
        residuals = self._residuals.state_dict()
        return {**self._state(residuals, self._numels(self._steps)), "q": q, "steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._q = {name: each.clone() for name, each in state.get("q", {}).items()}
        self._steps = dict(state.get("steps", {}))
        self._marks.clear()
        self._before = None

    @property
    def has_residuals(self) -> bool:
        # A rank that has no parameters in its shards has no count.
        made = max(self._steps.values(), default=None)
        return super().has_residuals and (made is None or made > self._form.start_step)

    def begin_step(self) -> None:
        super().begin_step()
        self._before = dict(self._q), dict(self._steps), dict(self._marks)

    def end_step(self) -> None:
        super().end_step()
        self._before = None

    def take_step_back(self) -> None:
        super().take_step_back()
        if self._before is not None:
            (self._q, self._steps, self._marks), self._before = self._before, None

    def consolidate(self, plans: Sequence[BucketPlan], links: Links) -> dict[str, Any]:
        state = super().consolidate(plans, links)
        within, is_first = (0, 1), links.all.rank == 0
        if links.legs:
            leg = links.legs[0]
            within, is_first = (leg.within.rank, leg.within.size), leg.across.rank == 0
        q: dict[str, Tensor] = {}
        steps: dict[str, int] = {}
        for plan in plans:
            what = f"the Q of the {plan.describe()}"
            bounds = self._bounds(plan, within[1])
            mine = {each.name for each in self._parameters(plan, bounds[within[0]], bounds[within[0] + 1])}
            made = torch.tensor(
                [self._steps.get(piece.spec.name, 0) for piece in plan.slices], dtype=torch.int64, device="cpu"
            )
            links.all.all_reduce(made, what, Max).wait()
            steps.update({piece.spec.name: int(n) for piece, n in zip(plan.slices, made.tolist(), strict=True) if n})
            for each in self._parameters(plan, 0, bounds[-1]):
                known = self._q.get(each.name)
                shape = each.rank, each.cols
                total = torch.zeros(shape, dtype=working_dtype(plan.dtype.to_real()), device=plan.device)
                if is_first and each.name in mine and known is not None:
                    total.copy_(known)
                if each.rank:
                    links.all.all_reduce(total, what).wait()
                if total.any():
                    q[each.name] = total
        if not steps:
            return {}
        return {**self._state({}, self._numels(steps)), **state, "q": q, "steps": steps}

    def _bounds(self, plan: BucketPlan, parts: int) -> list[int]:
        """Returns bounds at which parameters begin, so that each rank has whole ones."""
        total = plan.grad_numel * reals(plan)
        begins = [first for first, _ in spans(plan)] or [0]
        bounds = [min(begins, key=lambda begin: abs(begin - total * part // parts)) for part in range(parts)]
        return [0, *bounds[1:], total]

    def _launch_beside(self, plan: BucketPlan, links: Links, what: str) -> Beside:
        """Asks whether all hosts have made as many steps and have equal Q, separately for each local rank."""
        within = links.legs[0].within
        bounds = self._bounds(plan, within.size)
        own = self._parameters(plan, bounds[within.rank], bounds[within.rank + 1])
        asked = torch.full((within.size, 4), _SILENT, device=plan.device, dtype=torch.int64)
        if own:
            first = own[0].name
            if first not in self._marks:
                known = [self._q[each.name] for each in own if each.name in self._q]
                self._marks[first] = zlib.crc32(
                    b"".join(bytes(each.view(-1).view(torch.uint8).tolist()) for each in known)
                )
            step, mark = self._steps.get(first, 0), self._marks[first]
            asked[within.rank] = torch.tensor([step, -step, mark, -mark], dtype=torch.int64, device="cpu")
        return Beside(asked, links.all.all_reduce(asked, f"the steps of {what}", Max))

    def _between(self, shard: BucketShard, links: Links, what: str) -> Iterator[Work]:
        assert shard.beside is not None, "it was launched"
        beside, over = shard.beside.work, links.legs[0]
        own = self._parameters(shard.plan, shard.start, shard.start + shard.values.numel())
        yield beside
        step = 0
        if own:
            step = self._agreed(own, *shard.beside.values[over.within.rank].tolist())
        matrices = [each for each in own if each.rank] if step >= self._form.start_step else []
        if matrices:
            yield from self._products(matrices, shard, links, what)
        else:
            # Every shard has equally many stages, so that all ranks launch each in the order of the buckets.
            yield over.across.all_reduce(shard.values, what) if own else beside
            yield beside
            factor = shard.factor()
            if factor != 1.0:
                shard.values.mul_(factor)
        self._steps.update((each.name, step + 1) for each in own)

    def _agreed(self, own: Sequence[_Parameter], step: int, least: int, mark: int, least_mark: int) -> int:
        """Returns the number of steps that all hosts have made, from the maxima of them and of their negatives."""
        if step != -least or mark != -least_mark:
            log.info(
                "%r begins anew with %r and others: not all ranks had the same state of it", self._form, own[0].name
            )
            self._marks[own[0].name] = 0
            for each in own:
                self._q.pop(each.name, None)
        return step

    def _products(self, matrices: Sequence[_Parameter], shard: BucketShard, links: Links, what: str) -> Iterator[Work]:
        first, second = (leg.across for leg in links.legs)
        values, used = shard.values, shard.missing(shard.values)
        residual = shard.residual(OWN, values)
        wanted = values.to(residual.dtype)
        # What nobody on this host has used stays zero, and keeps its residual for when it is used again.
        missing = [any(part.start <= each.start < part.stop for part in used) for each in matrices]
        for each, is_missing in zip(matrices, missing, strict=True):
            if not is_missing:
                each.of(wanted).add_(each.of(residual))
        before = [self._q_of(each, wanted) for each in matrices]
        rest = _others(matrices, values.numel())
        wire = torch.cat(
            [
                *(values[part].to(wanted.dtype) for part in rest),
                *(
                    torch.mm(q, each.of(wanted).t()).view(-1)
                    for each, q in zip(matrices, orthonormal(before), strict=True)
                ),
            ]
        )
        yield first.all_reduce(wire, what)
        at = 0
        for part in rest:
            values[part].copy_(wire[at : at + part.stop - part.start])
            at += part.stop - part.start
        # Equal on all ranks, like the sums. Where one is not finite, also one that is sent as it is, such as a bias,
        # nothing is changed but the gradients: a GradScaler skips the step of all of them.
        is_finite = wire.isfinite().all()
        sums = [
            part.view(each.rank, each.rows)
            for part, each in zip(
                torch.split(wire[at:], [each.rank * each.rows for each in matrices]), matrices, strict=True
            )
        ]
        ps = orthonormal([torch.where(is_finite, total, 0.0) for total in sums])
        parts = [times_matrix(p, each.of(wanted)) for p, each in zip(ps, matrices, strict=True)]
        wire = torch.cat([part.view(-1) for part in parts])
        yield second.all_reduce(wire, what)
        is_finite = is_finite & wire.isfinite().all()
        factor = shard.factor()
        for part in rest if factor != 1.0 else []:
            values[part].mul_(factor)
        qs = [
            part.view(each.rank, each.cols)
            for part, each in zip(
                torch.split(wire, [each.rank * each.cols for each in matrices]), matrices, strict=True
            )
        ]
        for each, p, part, q, old, is_missing in zip(matrices, ps, parts, qs, before, missing, strict=True):
            # Each host subtracts what it has sent itself. With a share of the sum instead, residuals would be right
            # only together, and a host that has not used the parameter, or is lost, adds none in the next step. It
            # comes before the product is written, since that may be in the memory of ``wanted``.
            if not is_missing:
                _write_residual(p, part, each.of(wanted), each.of(residual), is_finite)
            _write_product(p, q, each.of(values), factor, is_finite)
            # Where no host has a gradient, Q stays for when one has.
            self._q[each.name] = torch.where(is_finite & p.any(), q, old)

    def _q_of(self, matrix: _Parameter, like: Tensor) -> Tensor:
        """Returns the Q of the step before; rows that have become zero, and all of them at first, from the seed."""
        seed = self._seeds.get(matrix.name)
        if seed is None:
            seed = self._seeds[matrix.name] = seeded(matrix.name, matrix.rank, matrix.cols).to(like)
        known = self._q.get(matrix.name)
        return seed if known is None else torch.where(known.any(1, keepdim=True), known.to(like), seed)

    def _parameters(self, plan: BucketPlan, start: int, stop: int) -> list[_Parameter]:
        found = []
        for piece, (first, last) in zip(plan.slices, spans(plan), strict=True):
            if start <= first < stop:
                shape, stride = piece.spec.shape, piece.spec.stride
                # The outermost dimension in memory, so that the gradient is such a matrix as it lies there.
                rows = shape[stride.index(max(stride))] if len(shape) > 1 and last > first else 1
                cols = (last - first) // rows
                rank = self._form.rank_of(rows, cols) if len(shape) > 1 else 0
                found.append(_Parameter(piece.spec.name, first - start, rows, cols, rank))
        return found


class _Parameter(NamedTuple):
    """A parameter's gradient in a shard, as a matrix, and the rank of its product; 0 if it is sent as it is."""

    name: str
    start: int
    rows: int
    cols: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.cols].view(self.rows, self.cols)


def _write_residual(p: Tensor, q: Tensor, wanted: Tensor, kept: Tensor, is_finite: Tensor) -> None:
    """Writes ``wanted`` less P Qᵀ into ``kept``, if all is finite. Only on a CPU may the program look whether it is."""
    if kept.is_cuda:
        kept.copy_(torch.where(is_finite, _less_product(wanted, p, q), kept))
    elif is_finite:
        each_piece = (
            torch.split(matrix, rows_at_a_time(p, q), dim) for matrix, dim in ((wanted, 0), (p, 1), (kept, 0))
        )
        for of_wanted, of_p, of_kept in zip(*each_piece, strict=True):
            _less_product(of_wanted, of_p, q, of_kept)


def _less_product(matrix: Tensor, p: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns ``matrix`` less P Qᵀ. A matrix product may be one of TF32, and what it rounds away would be lost."""
    for row, col in zip(p.unsqueeze(2), q, strict=True):
        matrix = torch.addcmul(matrix, row, col, value=-1, out=out)
    return matrix


def _write_product(p: Tensor, q: Tensor, out: Tensor, factor: float, is_finite: Tensor) -> None:
    """Writes ``factor`` times P Qᵀ into ``out``, or NaN where not all is finite."""
    if not out.is_cuda and not is_finite:
        out.fill_(math.nan)
        return
    for piece, of_out in zip(products(p, q), torch.split(out, rows_at_a_time(p, q)), strict=True):
        if out.is_cuda:
            of_out.copy_(torch.where(is_finite, piece, math.nan).mul_(factor))
        else:
            torch.mul(piece, factor, out=of_out)


def _others(matrices: Sequence[_Parameter], numel: int) -> list[slice]:
    """Returns the parts of a shard that are not in these matrices, which are in the order of the shard."""
    bounds = [0]
    for each in matrices:
        bounds += [each.start, each.start + each.rows * each.cols]
    bounds.append(numel)
    return [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
