"""
`GradientPlan`: where an optimizer's gradients lie in one world, and what combines them.

    parameters ── add ── layout: buckets ── queue: launches them ── exchange: combines them
                                         └─ sparse: gathers the rows of sparse gradients

    first step ── links open ── settle: buckets of autotune's cap, in the engine's memory

Each kind of step has one. `averaged_step` sends what is planned here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import torch
from hvdlite_wire.worker_status import StepStatus
from torch import Tensor

from ..buckets.bucket import BucketOptions, plain_memory
from ..buckets.exchange import Exchange
from ..buckets.flags import RankAndSize, Weights
from ..buckets.gradient_state import Home
from ..buckets.in_flight import BucketQueue
from ..buckets.layout import Layout
from ..buckets.plan import BucketPlan, Description
from ..buckets.shares import Planner
from ..comm.engine import Engine, HasMemory
from ..comm.group import Group
from ..exchanges.sparse_gather import SparseParameters
from .step_world import Added, Buffers, CarriedOver, StepPhase, StepWorld

# The most all-gathers of whole buckets at a time: engines other than shared memory's have memory of their own for each.
MOST_GATHERS = 2


class GradientPlan:
    """The buckets of an optimizer's gradients in one world, and their exchange."""

    def __init__(
        self, world: StepWorld, exchange: Exchange, ranks: RankAndSize, carried: CarriedOver, staying: Home | None
    ) -> None:
        """``ranks`` average gradients. ``staying`` is the home of all gradients if there are no buckets."""
        self.exchange = exchange
        self.ranks = ranks
        self.cap_bytes = world.settings.cap_bytes
        self.added: list[Added] = []
        self.weights = Weights(ranks)
        if carried.weights is not None:
            self.weights.state = carried.weights
        self._world = world
        self._staying = staying
        shard = world.settings.shard
        self.sharers = RankAndSize() if shard is None else shard.sharers(world.ranks)
        """This rank, and the number of ranks, among those that share the optimizer's work."""
        self._lay_out()

    def _lay_out(self) -> None:
        settings, size = self._world.settings, self.ranks.size
        divide = None if settings.shard is None else settings.shard.divider(self.sharers.size)
        planner = Planner(self.cap_bytes, self.exchange.aligned, self.ranks.count_slots, divide)
        options = BucketOptions(
            self.ranks,
            lambda dtype: self.exchange.scale_before(dtype, size),
            settings.sparse_as_dense,
            self._take_memory,
        )
        self.layout = Layout(options, planner, self._staying, self.weights)
        self.queue = BucketQueue(self.exchange, self._world.trace, self._world.check, size)
        self.sparse = SparseParameters(settings, self.layout, size)

    def add(self, added: Added) -> tuple[Description, Sequence[BucketPlan]]:
        self.added.append(added)
        return self.layout.add(added.params, added.groups, added.trainable)

    def drop(self, names: Collection[str]) -> list[BucketPlan]:
        """Lets go of parameters, between two steps. Returns the plans of all buckets, which are made anew."""
        self.added = [left for added in self.added if (left := added.without(names)).params]
        return self.lay_out_again()

    def lay_out_again(self) -> list[BucketPlan]:
        """Plans the buckets of all parameters anew, and returns the plans. Gradients move there in the next step."""
        self._lay_out()
        plans: list[BucketPlan] = []
        for added in self.added:
            plans += self.layout.add(added.params, added.groups, added.trainable)[1]
        return plans

    def settle(self) -> None:
        """Between steps: replans the buckets with autotune's cap, or moves them to the engine's memory."""
        links = self._world.engine.links
        if self.layout.planner.cap_bytes != self.cap_bytes:
            self.lay_out_again()
        elif links is not None and isinstance(engine := links.all.engine, HasMemory):
            for bucket in self.layout.buckets:
                if bucket.flat is not None and not engine.holds(bucket.flat):
                    bucket.renew()

    def take_over(self, buffers: Buffers, engine: Engine) -> None:
        """Uses buffers of an earlier world, if the engine of this one still holds them: see `shm.segment`."""
        if isinstance(engine, HasMemory):
            self.layout.take_over(buffers, engine.holds)

    def progress(self) -> StepStatus:
        """Returns how far the current step is; see `StepStatus`. Any thread may call it."""
        # Read while other threads may change it: a report may be a gradient late.
        trace, phase, waiting = self._world.trace, self._world.state.phase, self.queue.not_sent()
        buckets = sum(not bucket.asleep for bucket in self.layout.buckets)
        if phase is StepPhase.IDLE:
            # Those of the step before have all been sent.
            return StepStatus(trace.optimizer, trace.step, phase.value, buckets, 0, ())
        missing = () if not waiting else tuple(waiting[0].missing_names())
        return StepStatus(trace.optimizer, trace.step, phase.value, buckets, max(0, buckets - len(waiting)), missing)

    @property
    def has_passes(self) -> bool:
        """Whether gradients of backward passes outside of `StepState.accumulating` are not averaged yet."""
        states = self.layout.states.values()
        return self._world.state.is_in_step and any(state.passes or state.ready for state in states)

    def gather_averages(self, group: Group) -> None:
        """Leaves all averages of a finished step on each rank, if each has only its own part. It waits for all."""
        if not self.exchange.in_parts:
            return
        waits = deque[Callable[[], None]]()
        for number, bucket in enumerate(self.layout.buckets):
            if bucket.collect():
                if len(waits) == MOST_GATHERS:
                    waits.popleft()()
                flat, bounds = bucket.memory.gradients, bucket.plan.bounds
                others = [
                    (a, flat[a:b]) for rank, (a, b) in enumerate(pairwise(bounds)) if rank != group.rank and a < b
                ]
                what = f"the all-gather of the {bucket.plan.describe()} ({self._world.trace.name_of(number)})"
                waits.append(group.begin_all_gather_of_parts(flat, [b - a for a, b in pairwise(bounds)], others, what))
        while waits:
            waits.popleft()()

    def drop_gradients(self) -> None:
        """Sets all gradients to None, and frees the buckets' memory until the next gradient."""
        self.layout.drop_gradients()
        for bucket in self.layout.buckets:
            bucket.drop(())

    def _take_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # From the engine: if that has shared memory, gradients in it are summed without a copy. In the first step the
        # engine is not open yet.
        links = self._world.engine.links
        return plain_memory(numel, dtype, device) if links is None else links.all.zeros(numel, dtype, device)
