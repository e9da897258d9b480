"""
`SurvivingStep`: wraps a step that averages gradients, and finishes it with the ranks that are left where one is lost.

    backward ── keep ── finish: averages ── vote ── used by all ranks                                   (``--survive``)
                                 └─ a rank is lost ── Survival.go_on ── this rank has all averages: used by all ranks
                                                      ├─ averaged again, from the gradients that were kept
                                                      └─ discarded on all ranks

`runtime.survival` connects to the ranks that are left, and decides with their reports which of the three it is. They
are in a new world then, where the `Reducer`, the step's `Owner`, makes a new `SurvivingStep`: `finish` of the
old one has that finish the step, and returns when all ranks have used it, or discarded it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..buckets.plan import Description
from ..buckets.step_trace import captures
from ..errors import CommunicationError, GradientError, PeerLostError, list_names
from ..log import log
from ..runtime.survival import Outcome, Survival
from .averaged_step import AveragedStep, WrappingStep
from .step import Arrived, KeptGradients, Owner
from .step_world import Added, Buffers, CarriedOver, KnownLosses, StepMark, StepPhase, StepWorld


class SurvivingStep(WrappingStep):
    """Steps of one optimizer, in one world, that no loss of a rank ends."""

    def __init__(
        self, inner: AveragedStep, survival: Survival, owner: Owner, world: StepWorld, losses: KnownLosses | None
    ) -> None:
        """``losses`` are what the step of the world before knew, or None if there was none that survived."""
        super().__init__(inner, world)
        self.kept = KeptGradients()
        self._survival = survival
        self._owner = owner
        # By type of device, what cannot average gradients again where a rank is lost: see `Engine.cannot_repeat`.
        self._cannot_repeat = world.ranks.engine.cannot_repeat
        # Which of it has gradients of this optimizer, so that none are kept, and the step is discarded.
        self._obstacle: str | None = None
        self._devices: set[torch.device] = set()
        # The error of a rank that was lost in this step's backward, so that no more buckets are sent in this world.
        self._broken_by: CommunicationError | None = None
        lost = survival.lost_ranks
        self._losses = KnownLosses(len(lost), False) if losses is None else losses
        self._tell_of_lost_residuals(lost[self._losses.told :])

    def _tell_of_lost_residuals(self, lost: list[str]) -> None:
        """Says, on one rank, that these ranks were lost before they had sent all of their gradients."""
        if lost and self._world.ranks.rank == 0 and self._losses.had_residuals:
            log.warning(
                "survive: the residual of %s is lost: what compression=%r had not sent yet of its gradients (%s)",
                list_names(lost, len(lost)), self._world.settings.codec, self._world.trace.optimizer,
            )  # fmt: skip
        self._losses = self._losses._replace(told=len(self._survival.lost_ranks))

    def add(self, added: Added) -> Description:
        """Adds parameters. Those on some devices cannot be averaged again: then no gradients are kept."""
        for param in added.params.values():
            if param.device.type in self._cannot_repeat:
                self._obstacle, self.kept = self._cannot_repeat[param.device.type], None
                self._devices.add(param.device)
        return self._inner.add(added)

    # -- in the order of a step

    def launch(self) -> None:
        """Sends full buckets during backward, unless a rank was lost, or this step will be discarded."""
        number = self._world.engine.number
        if self._broken_by is not None or (number is not None and self._survival.discards(number)):
            return
        try:
            self._inner.launch()
        except CommunicationError as error:
            # The rest of backward is needed all the same: `finish` averages the gradients again.
            self._broken_by = error
            log.info("survive: a rank was lost during backward: %s", error)

    def finish(self, update: Arrived | None, arrived: Arrived | None) -> None:
        """Ends the step with those that are left, which use its averages, or discard it: gradients are zeros then."""
        if any(captures(device) for device in self._devices):
            raise GradientError(
                "a CUDA graph captures optimizer.step() or synchronize(), in which ranks vote with hvdlite-run "
                "--survive, or hvd.init(survive=True), and a replay would not: leave out one of them"
            )
        number, optimizer, kept = self._world.engine.taken_number(), self._world.trace.optimizer, self.kept
        self._survival.come_to_end_of_step()
        states = self.plan.layout.states
        having = [state.param for state in states.values() if kept is None and state.param.grad is not None]
        if kept is not None:
            kept.keep_rest(states)
        try:
            has_averages = self._finish_among_those_left(update, arrived, number, optimizer)
        finally:
            if kept is not None:
                kept.forget()
            # All ranks use this step, or it has failed otherwise than by a loss; else it has been taken back.
            self._owner.step.plan.exchange.end_step()
        if has_averages:
            self._survival.note_passed(number)
            return
        why = f"{self._obstacle or 'another rank'} cannot average gradients again"
        self._survival.note_discarded(number, f"a step of {optimizer}", why)
        for param in having:
            # Not None, which a GradScaler takes for a mistake of the program.
            param.grad = torch.zeros_like(param)

    def _finish_among_those_left(
        self, update: Arrived | None, arrived: Arrived | None, number: int, optimizer: str
    ) -> bool:
        """Returns False if all ranks discard the step."""
        step, survival, kept, mark = self, self._survival, self.kept, self._mark()
        while not survival.discards(number):
            buffers, is_complete = step.plan.layout.buffers(), False
            if step.is_replaced:
                if kept is None:
                    break
                step = step._begin_again(mark, kept, buffers)
            try:
                if (lost := step._broken_by) is not None:
                    raise PeerLostError(f"a rank was lost during backward ({optimizer}): {lost}") from lost
                try:
                    step._inner.attempt(update, arrived)
                finally:
                    step._end_attempt()
                what = f"the end of a step ({optimizer})"
                links = step._world.engine.connected()
                if kept is None:
                    # So far only the stream waits for the averages.
                    links.all.require_ended(what)
                is_complete = True
                links.all.all_reduce(torch.ones(1, dtype=torch.int32, device="cpu"), what).wait()
            except CommunicationError as error:
                exchange = step.plan.exchange
                mark_now, exchange_now = step._mark(), exchange.state_dict() if is_complete else {}
                exchange.take_step_back()
                # Functions that adapt to the new world may already make the owner follow it.
                outcome = survival.go_on(error, number, can_repeat=kept is not None)
                if outcome is Outcome.DISCARD:
                    break
                if outcome is Outcome.HAS_AVERAGES and is_complete:
                    # The averages are in the gradients.
                    step = self._follow(mark_now, buffers)
                    self._world.state.phase = mark_now.phase
                    step.plan.exchange.load_state_dict(exchange_now)
                    return True
                assert kept is not None, "a rank that keeps none says so, and then nobody repeats the step"
                step = step._begin_again(mark, kept, buffers)
            else:
                return True
        step.plan.exchange.take_step_back()
        self._discard(mark)
        return False

    def _end_attempt(self) -> None:
        """Ends or gives up an attempt to finish the step; gradients are kept until `finish` returns."""
        self._broken_by = None
        if self.kept is not None:
            self.kept.begin()

    def drop(self) -> None:
        """Finishes a step that all ranks drop. Where a rank is lost, nobody does so again, and there is no vote."""
        number = self._world.engine.taken_number()
        with self._inner.dropping():
            self._survival.come_to_end_of_step()
            try:
                self._inner.finish_dropped()
                self.plan.exchange.take_step_back()
            except CommunicationError as error:
                self.plan.exchange.take_step_back()
                self._survival.go_on(error, number)
            finally:
                if self.kept is not None:
                    self.kept.forget()
                self._end_attempt()

    def leave(self) -> None:
        self._inner.leave()
        self._end_attempt()

    def leave_world(self) -> None:
        """Gives up the step. The exchange has the state before it, for the next world."""
        self.plan.exchange.take_step_back()
        self.leave()

    # -- in another world

    @property
    def is_replaced(self) -> bool:
        """Whether another optimizer has gone on in a new world since gradients of this step were sent."""
        return self._world.state.is_in_step and self._world.engine.is_world_closed

    def _mark(self) -> StepMark:
        return self._world.state.mark(self.plan.weights.state)

    def _follow(self, mark: StepMark, buffers: Buffers = ()) -> SurvivingStep:
        """Returns the step of the current world, with the passes and the weights of this one."""
        self._owner.follow_world(buffers)
        step = self._owner.step
        assert isinstance(step, SurvivingStep), "a world that ranks enter within a step lets steps survive"
        self._world.state.backwards |= mark.backwards
        step.plan.weights.state = mark.weights
        return step

    def _begin_again(self, mark: StepMark, kept: KeptGradients, buffers: Buffers) -> SurvivingStep:
        """Begins the step in the current world, with the gradients that were kept. Returns the step there."""
        step = self._follow(mark, buffers)
        self._owner.begin_step()
        kept.put_back(step.plan.layout.states.values())
        self._world.state.phase = mark.phase
        if mark.phase is StepPhase.SPOILT:
            step.plan.layout.give_up()
        step.kept = kept
        return step

    def _discard(self, mark: StepMark) -> None:
        """Ends the step in the current world, as one that no rank uses."""
        step = self._follow(mark)
        state = self._world.state
        if state.is_in_step:
            step.leave()
        state.phase = StepPhase.DROPPED if mark.phase is StepPhase.SPOILT else StepPhase.DISCARDED
        step.plan.weights.state = mark.weights
        step.plan.weights.end_step()

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in a step of the other ranks. The loss of a rank in it is an error."""
        try:
            return self._inner.sit_out(average_of_active)
        finally:
            self._end_attempt()

    def carried_over(self, *, goes_on: bool) -> CarriedOver:
        """Returns what the wrapped step carries over, and the losses that were told of."""
        had_residuals = self._losses.had_residuals or self.plan.exchange.has_residuals
        return replace(
            self._inner.carried_over(goes_on=goes_on), losses=self._losses._replace(had_residuals=had_residuals)
        )
