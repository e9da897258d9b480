"""
`SurvivingSteps`: finishes an optimizer's step with the ranks that are left where one is lost (``--survive``).

    backward ── keep ── finish: averages ── vote ── used by all ranks
                                 └─ a rank is lost ── Survival.go_on ── this rank has all averages: used by all ranks
                                                      ├─ averaged again, from the gradients that were kept
                                                      └─ discarded on all ranks

The `Reducer` has one if steps survive in its world, and is the `Restartable` that it works on. `runtime.survival`
connects to the ranks that are left, and decides with their reports which of the three it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, Links, TakesBackSteps
from ..buckets.gradient_state import GradientState
from ..buckets.in_flight import BucketQueue
from ..buckets.plan import BucketPlan
from ..buckets.step_trace import captures
from ..comm.engine import Engine
from ..errors import CommunicationError, GradientError, PeerLostError, list_names
from ..log import log
from ..runtime.survival import Outcome, Survival
from .kept_gradients import KeptGradients

# The memory of buckets, which those of the next world use again.
Buffers = Iterable[tuple[BucketPlan, Tensor]]

# What a step is besides its gradients: how far it is, its backward passes, and its weights.
Mark = TypeVar("Mark")


class Restartable(Protocol[Mark]):
    """A step that can begin again in another world."""

    @property
    def is_left_behind(self) -> bool:
        """Whether gradients of the step were sent in a world that has been shut down."""

    def gradient_states(self) -> Mapping[int, GradientState]:
        """Returns how far each gradient is, by the `id` of its parameter; others in each world."""

    def buffers(self) -> Buffers:
        """Returns the memory of the buckets."""

    def connected(self) -> Links:
        """Returns the links to the other ranks of the current world."""

    def mark(self) -> Mark:
        """Returns what `begin_again`, `go_on_from` and `discard` need."""

    def begin_again(self, mark: Mark, kept: KeptGradients, buffers: Buffers) -> None:
        """Begins the step in the current world, with the gradients that were kept."""

    def go_on_from(self, mark: Mark, buffers: Buffers) -> None:
        """Takes the step, whose averages are in the gradients, along into the current world."""

    def discard(self, mark: Mark) -> None:
        """Ends the step in the current world, as one that no rank uses."""


class SurvivingSteps:
    """The steps of one optimizer, over all worlds of its ranks."""

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        # How many of `Survival.lost_ranks` it knows.
        self._known_losses = len(survival.lost_ranks)
        # Whether ranks had kept something of their gradients in an earlier world.
        self._had_residuals = False
        self._exchange: Exchange | None = None
        self.kept: KeptGradients | None = None
        """The gradients of this step, before they are averaged. None if they cannot be averaged again."""

    def join(self, survival: Survival, exchange: Exchange, engine: Engine) -> None:
        """Goes on in another world, with its exchange and the engine of its ranks."""
        if (steps := self._steps) is not None:
            self._had_residuals |= steps.has_residuals
        self._survival, self._exchange = survival, exchange
        self.kept = KeptGradients()
        # By type of device, what cannot average gradients again where a rank is lost: see `Engine.cannot_repeat`.
        self._cannot_repeat = engine.cannot_repeat
        # Which of it has gradients of this optimizer, so that none are kept, and the step is discarded.
        self._obstacle: str | None = None
        self._devices: set[torch.device] = set()
        # The error of a rank that was lost in this step's backward, so that no more buckets are sent in this world.
        self._broken_by: CommunicationError | None = None

    def add(self, param: Tensor) -> None:
        """Adds a parameter in this world."""
        if param.device.type in self._cannot_repeat:
            self._obstacle, self.kept = self._cannot_repeat[param.device.type], None
            self._devices.add(param.device)

    @property
    def _steps(self) -> TakesBackSteps | None:
        """The exchange, if its state changes with each step."""
        return self._exchange if isinstance(self._exchange, TakesBackSteps) else None

    # -- in the order of a step

    def begin(self) -> None:
        """Begins a step, before its first gradient."""
        if (steps := self._steps) is not None:
            steps.begin_step()

    def keep(self, state: GradientState) -> None:
        """Keeps a gradient that is complete, before a bucket takes it."""
        if self.kept is not None:
            self.kept.keep(state)

    def launch_full(self, queue: BucketQueue, links: Links, number: int | None) -> None:
        """Sends full buckets during backward, unless a rank was lost, or this step will be discarded.

        ``number`` is the optimizer's, or None if it has none yet.
        """
        if self._broken_by is not None or (number is not None and self._survival.discards(number)):
            return
        try:
            queue.launch_full(links)
        except CommunicationError as error:
            # The rest of backward is needed all the same: `complete` averages the gradients again.
            self._broken_by = error
            log.info("survive: a rank was lost during backward: %s", error)

    def require_no_capture(self) -> None:
        """Raises GradientError if a CUDA graph captures this step."""
        if any(captures(device) for device in self._devices):
            raise GradientError(
                "a CUDA graph captures optimizer.step() or synchronize(), in which ranks vote with hvdlite-run "
                "--survive, or hvd.init(survive=True), and a replay would not: leave out one of them"
            )

    def complete(self, step: Restartable[Any], finish: Callable[[], None], number: int, optimizer: str) -> None:
        """Calls ``finish``, which ends the step with all ranks; where one is lost, again with those that are left.

        Returns once all ranks have the averages, or discard the step. ``number`` is the optimizer's, and ``optimizer``
        how messages call it.
        """
        self._survival.come_to_end_of_step()
        kept, obstacle = self.kept, self._obstacle
        if kept is not None:
            kept.keep_rest(step.gradient_states())
        try:
            has_averages = self._complete_among_those_left(step, finish, number, optimizer, kept)
        finally:
            if kept is not None:
                kept.forget()
            if (steps := self._steps) is not None:
                # All ranks use this step, or it has failed otherwise than by a loss; else it has been taken back.
                steps.end_step()
        if has_averages:
            self._survival.note_passed(number)
        else:
            why = f"{obstacle or 'another rank'} cannot average gradients again"
            self._survival.note_discarded(number, f"a step of {optimizer}", why)

    def drop(self, finish: Callable[[], None], number: int) -> None:
        """Calls ``finish``, which ends a step that all ranks drop. Where a rank is lost, nobody does so again.

        Ranks that another optimizer's step has taken into the new world do not come to the end of this one. There is no
        vote: it makes no difference who had come to it.
        """
        self._survival.come_to_end_of_step()
        try:
            finish()
            self.take_back()
        except CommunicationError as error:
            self.take_back()
            self._survival.go_on(error, number)
        finally:
            if self.kept is not None:
                self.kept.forget()

    def _complete_among_those_left(
        self,
        step: Restartable[Any],
        finish: Callable[[], None],
        number: int,
        optimizer: str,
        kept: KeptGradients | None,
    ) -> bool:
        """Returns False if all ranks discard the step."""
        survival, mark = self._survival, step.mark()
        while not survival.discards(number):
            is_complete, buffers = False, step.buffers()
            if step.is_left_behind:
                # Another optimizer has gone on in a new world since gradients of this one were sent.
                if kept is None:
                    break
                self._begin_again(step, mark, kept, buffers)
            try:
                self._require_whole(optimizer)
                finish()
                what = f"the end of a step ({optimizer})"
                links = step.connected()
                if kept is None:
                    # So far only the stream waits for the averages.
                    links.all.require_ended(what)
                is_complete = True
                links.all.all_reduce(torch.ones(1, dtype=torch.int32, device="cpu"), what).wait()
            except CommunicationError as error:
                # Functions that adapt to the new world may already connect to it.
                mark_now, exchange_now = step.mark(), self._state_of_exchange() if is_complete else {}
                self.take_back()
                outcome = survival.go_on(error, number, can_repeat=kept is not None)
                if outcome is Outcome.DISCARD:
                    break
                if outcome is Outcome.HAS_AVERAGES and is_complete:
                    step.go_on_from(mark_now, buffers)
                    if self._exchange is not None and self._steps is not None:
                        self._exchange.load_state_dict(exchange_now)
                    return True
                assert kept is not None, "a rank that keeps none says so, and then nobody repeats the step"
                self._begin_again(step, mark, kept, buffers)
            else:
                return True
        self.take_back()
        step.discard(mark)
        return False

    def _begin_again(self, step: Restartable[Any], mark: Any, kept: KeptGradients, buffers: Buffers) -> None:
        step.begin_again(mark, kept, buffers)
        # `join` has begun new ones.
        self.kept = kept

    def _state_of_exchange(self) -> dict[str, Any]:
        """Returns the exchange's state, which `take_back` changes; empty if steps do not change it."""
        return self._exchange.state_dict() if self._exchange is not None and self._steps is not None else {}

    def _require_whole(self, optimizer: str) -> None:
        if self._broken_by is not None:
            raise PeerLostError(
                f"a rank was lost during backward ({optimizer}): {self._broken_by}"
            ) from self._broken_by

    def take_back(self) -> None:
        """Gives the exchange the state before this step, which begins again or is given up."""
        if (steps := self._steps) is not None:
            steps.take_step_back()

    def end(self) -> None:
        """Ends or gives up an attempt to finish the step; gradients are kept until `complete` returns."""
        self._broken_by = None
        if self.kept is not None:
            self.kept.begin()

    # -- after a loss

    def tell_of_lost_residuals(self, is_first: bool, codec: object, optimizer: str) -> None:
        """Says once, on the rank that ``is_first``, which ranks were lost that had not sent all of their gradients."""
        lost, self._known_losses = self._survival.lost_ranks[self._known_losses :], len(self._survival.lost_ranks)
        if lost and is_first and self._had_residuals:
            log.warning(
                "survive: the residual of %s is lost: what compression=%r had not sent yet of its gradients (%s)",
                list_names(lost, len(lost)), codec, optimizer,
            )  # fmt: skip
