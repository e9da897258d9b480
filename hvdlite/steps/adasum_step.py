"""
`AdasumStep`: combines the changes that each rank's optimizer step has made, in place of gradients.

    parameters ── copied ── the optimizer's own step, with this rank's gradients ── difference: the delta
               ── exchange, one bucket after the other ── added to the copies ── parameters

(It is Horovod's delta optimizer.) Deltas have buckets like those of gradients. A bucket for which no rank has a
gradient is not exchanged. Deltas are dense even if gradients are sparse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, Gradients, Links
from ..buckets.flags import ParticipantCount, RankAndSize
from ..buckets.gradient_state import GradientState
from ..buckets.plan import BucketPlan, Description
from ..comm.flat_bytes import flat_of, pieces_of
from .gradient_plan import GradientPlan
from .step import Step
from .step_world import Added, CarriedOver, StepState, StepWorld, too_many_passes


class AdasumStep(Step):
    """Steps in which each rank uses its own gradients: nothing is sent before `stepping`, which waits for all ranks.

    If parameters are equal on all ranks before the first step, they stay equal.
    """

    steps_first: ClassVar[bool] = True

    def __init__(self, world: StepWorld, exchange: Exchange, ranks: RankAndSize, carried: CarriedOver) -> None:
        super().__init__(GradientPlan(world, exchange, ranks, carried, _CountedHome(world.state)), world)
        self._buckets: list[_Deltas] = []

    def add(self, added: Added) -> Description:
        description, plans = self.plan.add(added)
        self._buckets += _deltas_of(plans, added.params)
        return description

    def drop_params(self, names: Collection[str]) -> None:
        plans = self.plan.drop(names)
        self._buckets = _deltas_of(plans, {name: p for added in self.plan.added for name, p in added.params.items()})

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Divides the gradients by GradScaler's scale. Returns False if some rank has found one that is not finite."""
        self._world.engine.require_usable()
        self.plan.layout.forget()
        _, overflows = self._count([1, 0 if found_inf is None else int(found_inf.item() > 0)])
        if overflows:
            return False
        if grad_scale is not None:
            inverse = 1.0 / float(grad_scale)
            for bucket in self._buckets:
                for param in bucket.params:
                    if param.grad is not None:
                        param.grad.mul_(inverse)
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which each rank steps with its own gradients. At its end, combines the deltas of all ranks."""
        if self._world.ranks.size == 1:
            yield
        else:
            self._compare(takes_part=True)
            for bucket in self._buckets:
                bucket.remember()
            yield
            self._combine()
        # Passes of a closure, which came after `agree_to_step`.
        self.plan.layout.forget()

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in a step of the other ranks with deltas of zero: the parameters change like theirs."""
        active, overflows = self._count([0, 0])
        if active and not overflows:
            self._compare(takes_part=False)
            for bucket in self._buckets:
                for param in bucket.params:
                    param.grad = None
            self._combine()
        return active > 0

    def _compare(self, *, takes_part: bool) -> None:
        group = self._world.engine.connected().all
        self._world.check.begin(takes_part=takes_part)
        self._world.check.send(group)
        self._world.check.finish(group)

    def _combine(self) -> None:
        """Exchanges the deltas, and sets the parameters to their copies plus the result."""
        links = self._world.engine.connected()
        with self._world.trace.synchronizing():
            needed = self._count([bucket.has_gradients for bucket in self._buckets])
            for number, (bucket, count) in enumerate(zip(self._buckets, needed, strict=True)):
                if count:
                    with self._world.trace.combining(number, f"the {self.plan.exchange.word} of the {bucket.what}"):
                        bucket.combine(self.plan.exchange, links, self._world.trace.name_of(number))
                bucket.forget()

    def _count(self, own: Sequence[int]) -> list[int]:
        """Returns the element-wise sums over all ranks. Waits for them."""
        counts = torch.tensor(own, dtype=torch.int32, device="cpu")
        if self._world.ranks.size > 1:
            links = self._world.engine.connected()
            links.all.all_reduce(counts, f"an {self.plan.exchange.word} step of {self._world.trace.optimizer}").wait()
        return [int(count) for count in counts.tolist()]


class _CountedHome:
    """Counts the passes of gradients that stay in ``param.grad``, and may be changed there."""

    def __init__(self, state: StepState) -> None:
        self._step = state

    def take(self, state: GradientState, last_pass: bool) -> bool:
        state.held = state.param.grad
        if last_pass and state.passes > self._step.passes_per_step:
            raise too_many_passes(state.name, self._step.passes_per_step)
        return False


def _deltas_of(plans: Sequence[BucketPlan], params: Mapping[str, Tensor]) -> list[_Deltas]:
    return [_Deltas(plan, [params[piece.spec.name] for piece in plan.slices]) for plan in plans]


class _Deltas:
    """Parameters of one dtype and device whose deltas are sent together."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor]) -> None:
        self.params = params
        self.what = plan.describe().replace("gradients of", "deltas of", 1)
        self._plan = plan
        self._before: Tensor | None = None

    @property
    def has_gradients(self) -> bool:
        return any(param.grad is not None for param in self.params)

    def remember(self) -> None:
        """Copies the parameters, if a step may change them."""
        if any(param.requires_grad or param.grad is not None for param in self.params):
            self._before = flat_of(self.params)

    def forget(self) -> None:
        self._before = None

    @torch.no_grad()
    def combine(self, exchange: Exchange, links: Links, name: str) -> None:
        before = flat_of(self.params) if self._before is None else self._before
        delta = flat_of(self.params).sub_(before)
        deltas = Gradients(
            self._plan, delta, lambda: self._pieces(delta), what=f"{self.what} ({name})", ranks=links.all.size
        )
        begun = exchange.begin(deltas, links)
        begun.wait()
        begun.finish(ParticipantCount.of_all(links.all.size))
        for param, piece in zip(self.params, self._pieces(before.add_(delta)), strict=True):
            param.copy_(piece)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        pieces = pieces_of(flat, [param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]
