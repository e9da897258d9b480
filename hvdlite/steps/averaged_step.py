"""
`AveragedStep`: averages gradients over the ranks, in the buckets of a `GradientPlan`.

    launch ── full buckets, in plan order: exchange.begin ──┐                                       inside backward
    finish ── the rest ── wait, in plan order ── exchange.finish ── param.grad                      inside step
           └─ gradients only other ranks have ── buckets of parameters unfrozen since ── sparse gradients

`WrappingStep` is the base of the kinds that have one, and do more: `outer_step` and `surviving_step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..buckets.bucket import Bucket
from ..buckets.exchange import Exchange
from ..buckets.flags import RankAndSize
from ..buckets.gradient_state import GradientState, InPlaceHome
from ..buckets.plan import Description
from ..errors import GradientError, MismatchError
from ..faults import point
from ..ops.base import raise_together
from .gradient_plan import GradientPlan
from .step import Arrived, Step
from .step_world import Added, CarriedOver, StepPhase, StepWorld


class AveragedStep(Step):
    def __init__(
        self,
        world: StepWorld,
        exchange: Exchange,
        ranks: RankAndSize,
        carried: CarriedOver,
        *,
        always_takes_back: bool = False,
    ) -> None:
        """``ranks`` are those that average gradients. ``always_takes_back``: any step may be averaged again."""
        staying = InPlaceHome() if world.settings.leaves_gradients(ranks.size) else None
        super().__init__(GradientPlan(world, exchange, ranks, carried, staying), world)
        self._state = world.state
        self._always_takes_back = always_takes_back
        # Whether the current step is the first, which plans buckets and allocates memory before the engine is open.
        self._is_provisional = False

    # -- parameters

    def add(self, added: Added) -> Description:
        """Adds parameters; in the middle of a step their buckets are sent behind the others."""
        there = len(self.plan.layout.buckets)
        description = super().add(added)
        if self._state.is_in_step:
            # Their gradients were computed before there were hooks.
            self.plan.queue.add(self.plan.layout.buckets[there:])
        return description

    # -- the engine

    def opened(self, cap_bytes: int | None) -> None:
        """Plans the buckets for good; in the middle of a step, at its end."""
        if cap_bytes is not None:
            self.plan.cap_bytes = cap_bytes
        if not self._state.is_in_step:
            self._settle()

    def _settle(self) -> None:
        self._is_provisional = False
        self.plan.settle()

    @property
    def is_sending(self) -> bool:
        return self._state.is_in_step

    # -- inside backward

    def begin(self) -> None:
        # Without another optimizer no gradients are surplus, and no step is taken back.
        has_several = self._world.reducers.has_several
        if self._always_takes_back or has_several:
            self.plan.exchange.begin_step()
        self._is_provisional = self._world.engine.links is None
        self._state.phase = StepPhase.COLLECTING
        self.plan.layout.expect()
        self.plan.queue.begin(self.plan.layout.buckets, holds_last=has_several)

    def launch(self) -> None:
        if (links := self._world.engine.links_for_backward) is not None:
            self.plan.queue.launch_full(links)
            point("backward")

    def spoil(self) -> None:
        self._state.phase = StepPhase.SPOILT
        self.plan.layout.give_up()

    # -- the end of a step

    def finish(self, update: Arrived | None, arrived: Arrived | None) -> None:
        try:
            self.attempt(update, arrived)
        finally:
            self.plan.exchange.end_step()

    def attempt(self, update: Arrived | None, arrived: Arrived | None) -> None:
        """Does what `finish` does, and leaves what the exchange has changed to be taken back."""
        # Buckets that are not full are launched here and not at the end of backward. In between, ranks may wait for
        # each other in other collectives, and only some of them may have full buckets.
        state, layout = self._state, self.plan.layout
        try:
            with self._world.trace.synchronizing():
                if state.phase is StepPhase.SPOILT:
                    self._finish_buckets(None, None)
                elif self._is_provisional and (changed := layout.allow_change()) is not None:
                    # In any other step the buckets would be sent by now. Send them, so that no other rank hangs.
                    self._finish_buckets(None, None)
                    raise changed
                else:
                    layout.require_same()
                    self._finish_buckets(update, arrived)
        finally:
            self.end()
            self.plan.weights.end_step()
        if state.phase is StepPhase.IDLE:
            state.phase = StepPhase.AVERAGED

    def _finish_buckets(self, update: Arrived | None, arrived: Arrived | None) -> None:
        world, plan = self._world, self.plan
        links = world.engine.connected()
        point("synchronize")
        failure: Exception | None = None
        queue, sparse, weights = plan.queue, plan.sparse, plan.weights
        for bucket in queue.finish_all(links):
            assert queue.count is not None, "it comes with the first bucket"
            try:
                if bucket.weights is not None:
                    bucket.weights.read(bucket.memory.weights, queue.count, links.all.describe_rank)
            except MismatchError as error:
                failure = error
            if weights.correction != 1.0:
                bucket.memory.gradients.mul_(weights.correction)
            # What may get a further round is not averaged yet.
            pending = [*sparse.settle(bucket), *bucket.frozen]
            if bucket.home is not bucket or queue.is_dropped_by_some:
                continue
            if update is not None and failure is None and queue.failure is None:
                failure = self._update(bucket, pending, update)
            elif arrived is not None:
                arrived([state.param for state in bucket.states if state not in pending])
        self._require_alike()
        optimizer = world.trace.optimizer
        if plan.exchange.tells_failures:
            raise_together(links.all, queue.failure, f"the averaging of gradients ({optimizer})")
        sparse.average(links.all, optimizer, queue.count)
        if plan.ranks.size == 1 and not plan.layout.buckets:
            weights.read_alone()
        if weights.correction != 1.0:
            plan.layout.correct(weights.correction)
        if failure is not None:
            raise failure
        if update is not None:
            self._update_frozen(update)
        point("vote")

    def _update(self, bucket: Bucket, pending: Sequence[GradientState], update: Arrived) -> Exception | None:
        """Calls ``update`` for a bucket but those ``pending``. Returns an error: other ranks wait for the rest."""
        try:
            with self._world.clock.stepping():
                update([state.param for state in bucket.states if state not in pending])
        except Exception as error:  # noqa: BLE001 - raised once all buckets are sent
            return error
        bucket.drop(pending)
        return None

    def _update_frozen(self, update: Arrived) -> None:
        """Calls ``update`` with those parameters, frozen on all ranks before, that have gradients in this step."""
        frozen = [state.param for bucket in self.plan.layout.buckets for state in bucket.frozen]
        if late := [param for param in frozen if param.grad is not None]:
            with self._world.clock.stepping():
                update(late)
            for param in late:
                param.grad = None

    def end(self) -> None:
        """Ends or gives up the step. Collectives that still run are not waited for, and keep their buckets' memory."""
        self._state.end()
        self.plan.queue.end()
        self.plan.weights.drop()
        self.plan.sparse.forget()
        self.plan.layout.forget()
        if self._is_provisional and self._world.engine.links is not None:
            self._settle()

    def leave(self) -> None:
        """Does the same, and makes final what the exchange has changed."""
        self.plan.exchange.end_step()
        self.end()

    def leave_world(self) -> None:
        self.leave()

    # -- a step whose averages all ranks drop

    def drop(self) -> None:
        with self.dropping():
            self.finish_dropped()
            # Nor does the exchange keep a part of what is dropped.
            self.plan.exchange.take_step_back()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """A context for a step whose averages are dropped. It ends the step."""
        self.plan.layout.give_up()
        # Gradients that the program has set, or the next pass computes, belong to the next step. So do averages of the
        # last one, which lie in the bucket that is sent.
        stay = [
            (state.param, state.param.grad.clone() if state.param.grad is state.view else state.param.grad)
            for state in self.plan.layout.states.values()
            if not state.ready and state.param.grad is not None
        ]
        for param, _ in stay:
            param.grad = None
        try:
            yield
        finally:
            self.leave()
            self._state.backwards.clear()
            for param, grad in stay:
                param.grad = grad

    def finish_dropped(self) -> None:
        self.plan.layout.drop_averages()
        for _ in self.plan.queue.finish_all(self._world.engine.connected()):
            pass
        self._require_alike()

    def _require_alike(self) -> None:
        """Raises GradientError, on all ranks, if some have dropped gradients which others averaged with their own."""
        if not self.plan.queue.is_dropped_by_some:
            return
        self._state.phase = StepPhase.SPOILT
        raise GradientError(
            f"some ranks have dropped gradients of {self._world.trace.optimizer} that another optimizer's backward "
            "pass had left there, as a GAN's generator does in its discriminator, and others had none to drop: "
            "gradients of different steps were averaged. Such a pass must reach this optimizer's parameters on all "
            "ranks or on none: freeze them during it, by requires_grad_(False), and call zero_grad() on every rank to "
            "go on"
        )

    # -- around the optimizer's own step

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """With ``outer=``, returns whether GradScaler has found all gradients finite, and divides them by its scale."""
        if self._world.settings.outer is None or found_inf is None:
            return True
        if found_inf.item() > 0:
            return False
        if grad_scale is not None:
            inverse = 1.0 / float(grad_scale)
            for state in self.plan.layout.states.values():
                if state.param.grad is not None:
                    state.param.grad.mul_(inverse)
        return True

    def why_no_join(self) -> str:
        shard = self._world.settings.shard
        if shard is None or self.plan.sharers.size == 1:
            return ""
        return (
            f"hvd.join() does not work with shard={shard.scope!r}: each rank updates its part of the parameters, and "
            "one that has joined would not come to the steps of the others. Give every rank as many batches, for "
            "example with drop_last=True in its sampler"
        )

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in a step of the other ranks, with the gradients that are complete, or with zeros."""
        layout, queue = self.plan.layout, self.plan.queue
        if layout.ready():
            self.finish(None, None)
            return True
        layout.drop_gradients()
        for bucket in layout.buckets:
            bucket.sit_out(average_of_active)
        try:
            self._finish_buckets(None, None)
            assert queue.count is not None, "something has come back"
            active = queue.count.active
        finally:
            self.leave()
        self.plan.layout.drop_gradients()
        return active > 0


class WrappingStep(Step):
    """The base of the kinds of step that wrap an `AveragedStep`: it hands each call on, unless they override that."""

    def __init__(self, inner: AveragedStep, world: StepWorld) -> None:
        super().__init__(inner.plan, world)
        self._inner = inner

    def add(self, added: Added) -> Description:
        return self._inner.add(added)

    def opened(self, cap_bytes: int | None) -> None:
        self._inner.opened(cap_bytes)

    @property
    def is_sending(self) -> bool:
        return self._inner.is_sending

    def begin(self) -> None:
        self._inner.begin()

    def launch(self) -> None:
        self._inner.launch()

    def spoil(self) -> None:
        self._inner.spoil()

    def finish(self, update: Arrived | None, arrived: Arrived | None) -> None:
        self._inner.finish(update, arrived)

    def drop(self) -> None:
        self._inner.drop()

    def leave(self) -> None:
        self._inner.leave()

    def leave_world(self) -> None:
        self._inner.leave_world()

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        return self._inner.agree_to_step(grad_scale, found_inf)

    def sit_out(self, average_of_active: bool) -> bool:
        return self._inner.sit_out(average_of_active)

    def why_no_join(self) -> str:
        return self._inner.why_no_join()
