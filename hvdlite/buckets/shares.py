"""
Which part of each bucket is whose, where ranks share the optimizer's work: ``hvd.DistributedOptimizer(shard=...)``.

    plan_buckets ── BucketPlan ── a Divide ── the same with `bounds`: where each rank's part begins
                                  ├─ by_slice     even parts, for optimizers that update each element by itself
                                  └─ ByParameter  whole parameters, to the rank that has had the least work so far

Pure values and functions: every rank computes the parts of all ranks from the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..comm.group import Group
from ..comm.hierarchy import host_groups_of
from .flags import RankAndSize
from .plan import ALIGNMENT_BYTES, BucketPlan, ParamSpec, lay_out, plan_buckets

# Returns the plans of one layout with bounds. Slices may have other places in them.
Divide = Callable[[Sequence[BucketPlan]], Sequence[BucketPlan]]

# Those of PyTorch that compute each element of a parameter from this element's gradient and state alone. Their
# subclasses may do otherwise.
_ELEMENTWISE = frozenset({
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.ASGD,
})  # fmt: skip


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which ``master=True`` updates parameters: float32 for half precision, else their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share an optimizer's work, equal on all ranks.

    ``scope`` is ``"world"``, for all ranks of the optimizer, or ``"host"``, for those of each host. ``slices``: parts
    of parameters may be updated alone. ``is_cubic``: the work of a matrix grows with its shorter side, too, as where
    it is multiplied with itself. ``master``: parameters of half precision are updated in float32.
    """

    scope: str
    slices: bool
    is_cubic: bool = False
    master: bool = False

    @classmethod
    def of(cls, scope: str, optimizer: torch.optim.Optimizer, *, master: bool) -> Sharing:
        """Returns how to share the work of this optimizer, by its class."""
        kind = type(optimizer)
        slices = kind in _ELEMENTWISE or getattr(kind, "updates_elementwise", False) is True
        # By name, since many programs have a Muon of their own. It decides about the balance alone.
        return cls(scope, slices, is_cubic=kind.__name__ == "Muon", master=master)

    def describe(self) -> str:
        """Returns it in words, for ranks to compare."""
        masters = ", with masters" if self.master else ""
        return f"{self.scope!r}, by {'slices' if self.slices else 'whole parameters'}{masters}"

    def sharers(self, group: Group) -> RankAndSize:
        """Returns this rank, and the number of ranks, among those that share; ``group`` are the optimizer's ranks."""
        if self.scope == "world" or len(set(group.hosts)) == 1:
            return RankAndSize(group.rank, group.size)
        host_groups = host_groups_of(group.rank, group.hosts)
        if host_groups is None:
            # One rank on each host; or different numbers of ranks, which do not have equal parts on all hosts.
            return RankAndSize()
        return RankAndSize(host_groups.within.index(group.rank), len(host_groups.within))

    def divider(self, size: int) -> Divide:
        """Returns what divides the plans of one layout among ``size`` ranks."""
        if self.slices:
            return partial(by_slice, size)
        return ByParameter(size, is_cubic=self.is_cubic).divide


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the buckets of one layout, as `plan_buckets` does, and divides them where ranks share the work."""

    cap_bytes: int
    aligned: bool
    count_slots: int
    divide: Divide | None = None

    def plan(self, specs: Sequence[ParamSpec], groups: Iterable[Iterable[str]]) -> Sequence[BucketPlan]:
        """Returns the buckets of more parameters."""
        plans = plan_buckets(
            specs, cap_bytes=self.cap_bytes, groups=groups, aligned=self.aligned, count_slots=self.count_slots
        )
        return plans if self.divide is None else self.divide(plans)


def by_slice(size: int, plans: Sequence[BucketPlan]) -> list[BucketPlan]:
    """Gives each of ``size`` ranks an equal part of every bucket.

    Where that cuts a parameter, its part before the cut is a multiple of `ALIGNMENT_BYTES`, so that vectorized code
    sees a part as it would see the whole: with the same elements in each vector, and in the same rest behind the last.
    """
    divided = []
    for plan in plans:
        step = max(1, ALIGNMENT_BYTES // plan.dtype.itemsize)
        lines = -(-plan.grad_numel // step)
        bounds = []
        for rank in range(size + 1):
            bound = min(lines * rank // size * step, plan.grad_numel)
            # Without gaps a parameter may begin anywhere.
            cut = next((piece for piece in plan.slices if piece.start < bound < piece.stop), None)
            bounds.append(bound if cut is None else bound - (bound - cut.start) % step)
        divided.append(replace(plan, bounds=tuple(bounds)))
    return divided


class ByParameter:
    """Gives each parameter to one rank, those with the most work first, and each to the rank with the least so far."""

    def __init__(self, size: int, *, is_cubic: bool) -> None:
        self._work = [0] * size
        self._is_cubic = is_cubic

    def divide(self, plans: Sequence[BucketPlan]) -> list[BucketPlan]:
        """Returns the plans with bounds, and their slices in the order of the ranks."""
        specs = [piece.spec for plan in plans for piece in plan.slices]
        owner_of = {}
        for spec in sorted(specs, key=self._work_of, reverse=True):
            owner = owner_of[spec.name] = self._work.index(min(self._work))
            self._work[owner] += self._work_of(spec)
        return [self._ordered(plan, owner_of) for plan in plans]

    def _work_of(self, spec: ParamSpec) -> int:
        shorter = min(spec.shape, default=1) if self._is_cubic else 1
        return spec.numel * max(1, shorter)

    def _ordered(self, plan: BucketPlan, owner_of: dict[str, int]) -> BucketPlan:
        specs = sorted((piece.spec for piece in plan.slices), key=lambda spec: owner_of[spec.name])
        plan = replace(plan, slices=lay_out(specs, plan.dtype, plan.aligned))
        bounds = [0]
        for rank in range(len(self._work)):
            after = (piece.start for piece in plan.slices if owner_of[piece.spec.name] > rank)
            bounds.append(next(after, plan.grad_numel))
        return replace(plan, bounds=tuple(bounds))
