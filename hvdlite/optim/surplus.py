"""
`SurplusGradients`: gradients that another optimizer's backward pass has left in this one's parameters.

    a GAN's generator ── backward through the discriminator ── its own step
                                     └─ gradients of the discriminator, which no step has asked for: surplus

They are surplus if other optimizers have stepped with all backward passes of the current step. They may be averaged by
now, so all ranks must do the same with them, and the program decides by what it does first:

    step()                                      averages and uses them, as any others
    zero_grad(), or sets to None and backward   all ranks drop them, and end the step that has begun with them
    backward on top of them                     an error, since the sum would depend on how far the average was
"""

from __future__ import annotations

import enum

from torch import Tensor

from ..buckets.gradient_state import GradientState
from ..comm.group import Group
from ..errors import GradientError
from ..ops.base import compare
from ..steps.step import Step
from ..steps.step_world import StepWorld, too_many_passes


class PendingKind(enum.Enum):
    """The complete gradients of a rank that are not synchronized."""

    NOTHING = 0
    SURPLUS = 1
    """Those that another optimizer's step has left."""
    DROPPED = 2
    """The same, which the program has dropped or replaced."""
    PARTLY_DROPPED = 3
    OWN = 4


class SurplusGradients:
    """Tells which complete gradients of an optimizer in one world are surplus, and which of these the program drops."""

    def __init__(self, step: Step, world: StepWorld) -> None:
        self._step = step
        self._state = world.state
        # Knows the passes that other optimizers have used.
        self._registry = world.reducers
        self._optimizer = world.trace.optimizer
        self._engine = world.engine

    def note_used_passes(self) -> None:
        """Tells other optimizers that this one has used the step's backward passes: what they have left is surplus."""
        known = set(self._registry.stepped_backwards)
        self._registry.stepped_backwards.extend(self._state.backwards - known)

    @property
    def _is_all(self) -> bool:
        """Whether other optimizers have already stepped with all backward passes of this step."""
        passes = self._state.backwards
        return bool(passes) and passes <= set(self._registry.stepped_backwards)

    def _kept_of(self, ready: list[GradientState]) -> list[GradientState]:
        """Returns those whose gradient is still in ``param.grad``: the program has neither dropped nor replaced it."""
        return [state for state in ready if state.param.grad is state.held]

    # -- a backward pass begins

    def are_dropped_before(self, param: Tensor) -> bool:
        """Whether a new backward pass finds surplus gradients, which the user has dropped or replaced.

        ``param`` has the pass's first gradient, to which it must not have been added. Raises GradientError if the user
        has dropped some of them and not all: those that are left may be averages by now.
        """
        if not self._state.backwards:
            return False
        is_replaced = self._step.is_replaced
        if not (is_replaced or self._is_all):
            return False
        layout = self._step.plan.layout
        ready = layout.ready()
        kept = self._kept_of(ready)
        own = layout.states.get(id(param))
        if len(kept) == len(ready) or own in kept:
            return False
        if kept and not is_replaced:
            self._step.spoil()
            raise GradientError(
                "a backward pass came after some of the gradients that another optimizer's backward pass had left in "
                f"{self._optimizer} were dropped or replaced, and others not (the first: {kept[0].name!r}): call "
                "zero_grad() of this optimizer before the pass, on every rank"
            )
        return True

    def error_of_addition(self, state: GradientState, backward: int) -> GradientError:
        """Gives up the step, and returns the error of the pass ``backward`` that has added to a complete gradient."""
        is_replaced = self._step.is_replaced
        if self._engine.is_world_closed and not is_replaced:
            return GradientError(
                f"the gradient of {state.name!r} was computed again, and an earlier one was still being averaged when "
                "hvd.shutdown() was called: call optimizer.zero_grad() after hvd.init(), before the first backward pass"
            )
        # This pass makes no gradients that a step will use.
        self._state.backwards.discard(backward)
        is_surplus = is_replaced or self._is_all
        self._step.spoil()
        if not is_surplus:
            return too_many_passes(state.name, self._state.passes_per_step)
        # The sum would depend on how far the average was.
        return GradientError(
            f"the gradient of {state.name!r} was added to gradients that another optimizer's backward pass has left "
            "there, as a GAN's generator does in its discriminator: call zero_grad() of this optimizer or model before "
            "its backward pass, or freeze its parameters during the other one"
        )

    # -- the program drops gradients, or changes what has them

    def pending(self, action: str, way_out: str) -> PendingKind:
        """Returns which gradients an action would lose. Raises GradientError if they are the program's own."""
        found = self._found()
        if found is PendingKind.OWN:
            raise self._own_are_pending(action, way_out)
        return found

    def agreed(self, ranks: Group, action: str, way_out: str) -> PendingKind:
        """Returns what all ranks do with theirs: nothing, average them, or drop them. Every rank must call it.

        Raises GradientError on all ranks if one has others pending.
        """
        own = self._found()
        everyone = compare(ranks, own.value, "looking for gradients that are being averaged")
        found = [own] if everyone is None else [PendingKind(value) for value in everyone]
        if own is PendingKind.OWN:
            raise self._own_are_pending(action, way_out)
        if PendingKind.OWN in found:
            rank = ranks.describe_rank(found.index(PendingKind.OWN))
            raise GradientError(f"{action} while gradients of {rank} are being averaged: {way_out} on every rank")
        if PendingKind.PARTLY_DROPPED in found or {PendingKind.SURPLUS, PendingKind.DROPPED} <= set(found):
            raise GradientError(
                f"{action} after some gradients of {self._optimizer} that another optimizer's backward pass had "
                "left there were dropped, and others not: call zero_grad() on every rank before"
            )
        return next((each for each in found if each is not PendingKind.NOTHING), PendingKind.NOTHING)

    def _found(self) -> PendingKind:
        ready = self._step.plan.layout.ready() if self._state.is_in_step else []
        if not ready:
            return PendingKind.NOTHING
        if not self._is_all:
            return PendingKind.OWN
        kept = self._kept_of(ready)
        if not kept:
            return PendingKind.DROPPED
        return PendingKind.SURPLUS if len(kept) == len(ready) else PendingKind.PARTLY_DROPPED

    def _own_are_pending(self, action: str, way_out: str) -> GradientError:
        name = self._step.plan.layout.ready()[0].name
        return GradientError(f"{action} while gradients are being averaged (the first: {name!r}): {way_out}")
