"""
`Layout`: an optimizer's buckets in plan order, and its sparse gradients, which are gathered instead.

    named parameters ── plan ── buckets, some asleep ── a sparse gradient shows itself ── one moves out
                     └─ where they stay, on a rank that is alone and compresses nothing

The order of both lists is the same on every rank at all times, since collectives follow it: they change
only by what all ranks know together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .bucket import Bucket, Memory
from .flags import RankAndSize
from .homes import SparseHome, StayingHome, require_same
from .plan import BucketPlan, Description, ParamSpec, plan_buckets
from .slot import Slot


class Layout:
    """The homes of the gradients of one optimizer's parameters."""

    def __init__(
        self,
        *,
        ranks: RankAndSize,
        cap_bytes: int,
        scale_of: Callable[[torch.dtype], float],
        densify: bool,
        memory: Memory,
        stays: bool,
        aligned: bool,
    ) -> None:
        """``scale_of`` is by what gradients of a dtype are multiplied before they travel.

        ``memory`` is where buckets take theirs when a first gradient comes; there are none where all ``stays``.
        ``aligned`` is as of `plan_buckets`.
        """
        self.buckets: list[Bucket] = []
        self.sparse: list[SparseHome] = []
        # By the parameter's `id`: to hash a tensor is a call of Python's, and this is looked up at every gradient.
        self.slots: dict[int, Slot] = {}
        # Where all gradients are kept if not in buckets.
        self._staying = StayingHome() if stays else None
        # Of what is planned from now on.
        self.cap_bytes = cap_bytes
        self._ranks = ranks
        self._scale_of = scale_of
        self._densify = densify
        self._memory = memory
        self._aligned = aligned

    def add(
        self, params: dict[str, Tensor], groups: Iterable[Iterable[str]]
    ) -> tuple[Description, Sequence[BucketPlan]]:
        """Plan buckets for more parameters, after those there are; what ranks are to compare of them, and the plans."""
        specs = [ParamSpec.of(name, param) for name, param in params.items()]
        plans = plan_buckets(
            specs,
            cap_bytes=self.cap_bytes,
            groups=groups,
            aligned=self._aligned,
            count_slots=self._ranks.count_slots,
        )
        if self._staying is not None:
            slots = [Slot(self._staying, piece, params[piece.spec.name]) for plan in plans for piece in plan.slices]
            self._enter(slots)
        else:
            buckets = [self._make_bucket(plan, [params[piece.spec.name] for piece in plan.slices]) for plan in plans]
            if buckets:
                # The first bucket's plan has room for their calls.
                buckets[0].sleepers = [bucket for bucket in buckets if bucket.asleep]
            self.buckets += buckets
        return [(spec.name, spec.describe()) for spec in specs], plans

    def expect(self) -> None:
        """Begin a step."""
        for bucket in self.buckets:
            bucket.expect()

    def give_up(self) -> None:
        """Discard this step's averages."""
        for bucket in self.buckets:
            bucket.give_up()

    def require_same(self) -> None:
        """Raise a GradientError if the user has changed a gradient that stays where it is, since it was complete."""
        if self._staying is not None:
            require_same(self.slots.values())

    def forget(self) -> None:
        """A step is over: nothing of the next one has been seen."""
        for slot in self.slots.values():
            slot.passes = 0
            slot.arrived = slot.sparse = slot.scaled = slot.fresh = False
        if self._staying is not None:
            # What the user drops is not to be held.
            for slot in self.slots.values():
                slot.view = None

    def drop_gradients(self) -> None:
        """Leave no parameter a gradient."""
        for slot in self.slots.values():
            slot.param.grad = None

    def move_out(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        """From now on these gradients are gathered; their bucket is planned again without them."""
        index = self.buckets.index(bucket)
        kept = [slot.param for slot in bucket.slots if slot not in slots]
        plan = bucket.plan.without({slot.name for slot in slots})
        smaller = self._make_bucket(plan, kept)
        smaller.sleepers = bucket.sleepers
        # Even without a slice it stays, for what its tail tells.
        self.buckets[index] = smaller
        for slot in slots:
            slot.home, slot.view = SparseHome(slot), None
            self.sparse.append(slot.home)

    def _make_bucket(self, plan: BucketPlan, params: Sequence[Tensor]) -> Bucket:
        scale = self._scale_of(plan.dtype)
        bucket = Bucket(plan, params, ranks=self._ranks, scale=scale, densify=self._densify, memory=self._memory)
        self._enter(bucket.slots)
        return bucket

    def _enter(self, slots: Iterable[Slot]) -> None:
        self.slots.update({id(slot.param): slot for slot in slots})
