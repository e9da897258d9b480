"""
`Layout`: an optimizer's buckets in plan order, and the parameters whose sparse gradients are gathered instead.

    named parameters ── plan ── buckets ── first sparse gradient of a parameter ── move_out
                     └─ no buckets, if gradients stay in param.grad (a single rank, or Adasum)

`gradient_plan` owns a `Layout`; `sparse_gather` moves parameters out of buckets. Collectives follow the order of both
lists, so it must always be the same on every rank. The lists therefore change only by information that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import GradientError
from .bucket import Bucket, BucketOptions
from .flags import Weights
from .gradient_state import GatheredHome, GradientState, Home, require_same
from .plan import BucketPlan, Description, ParamSpec
from .shares import Planner


class Layout:
    """The buckets and other homes of one optimizer's gradients."""

    def __init__(self, options: BucketOptions, planner: Planner, staying: Home | None, weights: Weights) -> None:
        """With ``staying`` there are no buckets: it is the home of all gradients, which stay in ``param.grad``.

        ``weights`` are sent with the first bucket.
        """
        self.buckets: list[Bucket] = []
        self.sparse: list[GatheredHome] = []
        # By the parameter's `id`, which hashes faster than a tensor: this is looked up for every gradient.
        self.states: dict[int, GradientState] = {}
        self.planner = planner
        self._options = options
        self._staying = staying
        self._weights = weights

    def add(
        self, params: dict[str, Tensor], groups: Iterable[Iterable[str]], trainable: Container[str]
    ) -> tuple[Description, Sequence[BucketPlan]]:
        """Plans buckets for more parameters. Returns what ranks compare of these, and the plans."""
        specs = [ParamSpec.of(name, param, trainable=name in trainable) for name, param in params.items()]
        plans = self.planner.plan(specs, groups)
        if self._staying is not None:
            states = [
                GradientState(self._staying, piece, params[piece.spec.name]) for plan in plans for piece in plan.slices
            ]
            self._enter(states)
        else:
            first = bool(plans) and not self.buckets
            if first:
                plans = (replace(plans[0], weight_slots=self._weights.slots), *plans[1:])
            buckets = [self._make_bucket(plan, [params[piece.spec.name] for piece in plan.slices]) for plan in plans]
            if first:
                buckets[0].is_first, buckets[0].weights = True, self._weights
            self.buckets += buckets
        return [(spec.name, spec.describe()) for spec in specs], plans

    def ready(self) -> list[GradientState]:
        return [state for state in self.states.values() if state.ready]

    def passes(self) -> dict[Tensor, int]:
        """Returns the number of backward passes in this step of each parameter that has had one."""
        return {state.param: state.passes for state in self.states.values() if state.passes}

    def numels(self) -> dict[str, int]:
        """Returns the number of reals in each parameter's gradient, by name."""
        specs = [state.piece.spec for state in self.states.values()]
        return {spec.name: spec.numel * (1 + spec.dtype.is_complex) for spec in specs}

    def buffers(self) -> list[tuple[BucketPlan, Tensor]]:
        return [(bucket.plan, bucket.flat) for bucket in self.buckets if bucket.flat is not None]

    def take_over(self, buffers: Iterable[tuple[BucketPlan, Tensor]], is_usable: Callable[[Tensor], bool]) -> None:
        """Uses buffers of an earlier layout for the buckets that have the same gradients; its flags may be more."""
        flats = {(plan.slices, plan.dtype, plan.device): flat for plan, flat in buffers if is_usable(flat)}
        for bucket in self.buckets:
            plan = bucket.plan
            flat = flats.get((plan.slices, plan.dtype, plan.device))
            if flat is not None and flat.numel() >= plan.numel:
                bucket.take_over(flat[: plan.numel])

    def expect(self) -> None:
        for bucket in self.buckets:
            bucket.expect()

    def correct(self, factor: float) -> None:
        """Multiplies the gradients that are in no bucket: sparse ones, or all of a single rank."""
        states = self.states.values() if self._staying is not None else [home.state for home in self.sparse]
        with torch.no_grad():
            for state in states:
                if state.param.grad is not None:
                    state.param.grad.mul_(factor)

    def give_up(self) -> None:
        """Lets the user change gradients in this step, because its averages will be dropped."""
        for bucket in self.buckets:
            bucket.allow_changes()

    def drop_averages(self) -> None:
        """Does what `give_up` does, and tells the other ranks so in the buckets that are still to be sent."""
        for bucket in self.buckets:
            bucket.drop_averages()

    def require_same(self) -> None:
        """Raises GradientError if gradients stay in ``param.grad`` and the user has changed a complete one."""
        if self._staying is not None:
            require_same(self.states.values())

    def allow_change(self) -> GradientError | None:
        """Returns the first error about a gradient that the user has changed, if any. All buckets can still be sent."""
        changed: GradientError | None = None
        for bucket in self.buckets:
            try:
                bucket.require_same()
            except GradientError as error:
                changed = changed or error
                bucket.unguard()
        return changed

    def forget(self) -> None:
        for state in self.states.values():
            state.passes = 0
            state.ready = state.sparse = state.scaled = state.fresh = state.late = False
            # If the user drops a gradient, this must not keep its memory.
            state.held = None

    @property
    def host_bytes(self) -> int:
        plans = [bucket.plan for bucket in self.buckets if bucket.plan.device.type == "cpu"]
        return sum(plan.numel * plan.dtype.itemsize for plan in plans)

    def drop_gradients(self) -> None:
        for state in self.states.values():
            state.param.grad = None

    def move_out(self, bucket: Bucket, states: Sequence[GradientState]) -> None:
        """Moves gradients out of their bucket, to be gathered from now on, and replans the bucket without them."""
        index = self.buckets.index(bucket)
        kept = [state.param for state in bucket.states if state not in states]
        plan = bucket.plan.without({state.name for state in states})
        smaller = self._make_bucket(plan, kept)
        smaller.freeze({state.name for state in bucket.frozen})
        smaller.is_first, smaller.weights = bucket.is_first, bucket.weights
        # A bucket without slices is kept for the flags in its tail.
        self.buckets[index] = smaller
        for state in states:
            state.home, state.view = GatheredHome(state), None
            self.sparse.append(state.home)

    def _make_bucket(self, plan: BucketPlan, params: Sequence[Tensor]) -> Bucket:
        bucket = Bucket(plan, params, self._options)
        self._enter(bucket.states)
        return bucket

    def _enter(self, states: Iterable[GradientState]) -> None:
        self.states.update({id(state.param): state for state in states})
