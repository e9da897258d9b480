"""
`StepState`: how far an optimizer's current step is: its phase, and the backward passes that belong to it.

    IDLE ── first gradient ── COLLECTING ── finish ── AVERAGED ── the optimizer's own step ── IDLE
                              └─ one pass too many ── SPOILT ── finish ── DROPPED ── zero_grad ── IDLE

The `Reducer` owns one for all worlds, and hands it to the step of each world, which moves it on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..buckets.weights import WeightState
from ..errors import GradientError


class StepPhase(enum.Enum):
    """The phase of a step."""

    IDLE = "no gradient of this step has arrived"
    COLLECTING = "gradients arrive, and full buckets are being averaged"
    SPOILT = "one backward pass too many has changed gradients that are being averaged: end the step and drop them"
    AVERAGED = "the averages are in the gradients, for the optimizer to use"
    DROPPED = "a spoilt step has ended: its gradients are invalid"
    DISCARDED = "a rank was lost, and all others have discarded the step: its gradients are zeros"


# The phases in which a step is in progress. A global, since it is read for every gradient.
UNDER_WAY = (StepPhase.COLLECTING, StepPhase.SPOILT)

_ENDED = (StepPhase.AVERAGED, StepPhase.DROPPED, StepPhase.DISCARDED)


class StepMark(NamedTuple):
    """What a step is besides its gradients, to begin it again or end it in another world."""

    phase: StepPhase
    # Autograd's numbers of its backward passes.
    backwards: frozenset[int]
    weights: WeightState


class StepState:
    """The phase and the backward passes of one optimizer's current step, in all its worlds."""

    def __init__(self, passes_per_step: int) -> None:
        self.passes_per_step = passes_per_step
        """How many backward passes add to a gradient before it is averaged."""
        self.phase = StepPhase.IDLE
        self.backwards: set[int] = set()
        """Autograd's numbers of the backward passes since the last step, those under `accumulating` among them."""
        self.is_accumulating = False
        """Whether backward passes only add to gradients: they are not counted, and nothing is sent."""
        self.is_unscaled = False
        """Whether a GradScaler has unscaled the step's averages. It does not call ``step()`` if it skips the step."""

    @property
    def is_in_step(self) -> bool:
        """Whether gradients of the current step have arrived, and its averages are not there yet."""
        return self.phase in UNDER_WAY

    @property
    def has_ended(self) -> bool:
        """Whether the step's averages are there, or all ranks have dropped them."""
        return self.phase in _ENDED

    @property
    def is_discarded(self) -> bool:
        """Whether a rank was lost in this step, and no rank uses it. The gradients are zeros then."""
        return self.phase is StepPhase.DISCARDED

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """A context in which backward passes add to gradients, without being counted and without communication."""
        earlier, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = earlier

    def end(self) -> None:
        """Ends or gives up the exchange of gradients."""
        self.phase = StepPhase.DROPPED if self.phase is StepPhase.SPOILT else StepPhase.IDLE

    def clear(self) -> None:
        """Forgets the step, and begins the next one."""
        self.phase = StepPhase.IDLE
        self.backwards.clear()
        self.is_unscaled = False

    def begin_after_skipped(self) -> None:
        """Begins the next step where a GradScaler has skipped the last."""
        if self.is_unscaled:
            self.is_unscaled = False
            self.forget_averages()

    def forget_averages(self) -> None:
        """Begins the next step, where the averages of the last are there and the program has not used them."""
        if self.phase in (StepPhase.AVERAGED, StepPhase.DISCARDED):
            self.clear()

    def stepped(self) -> None:
        """Begins the next step, since the optimizer has used the gradients of the last."""
        self.backwards.clear()
        self.is_unscaled = False
        if self.has_ended:
            self.phase = StepPhase.IDLE

    def mark(self, weights: WeightState) -> StepMark:
        """Returns what the step is, with its ``weights``."""
        return StepMark(self.phase, frozenset(self.backwards), weights)

    def require_sound(self) -> None:
        """Raises GradientError if too many backward passes have spoilt the gradients, until `zero_grad` drops them."""
        if self.phase in (StepPhase.SPOILT, StepPhase.DROPPED):
            raise GradientError(
                "step() was called after gradients were computed more than backward_passes_per_step times, which has "
                "spoilt them: call optimizer.synchronize() and optimizer.zero_grad() on every rank to drop them"
            )


def too_many_passes(name: str, passes_per_step: int) -> GradientError:
    """Returns the error for a gradient that gets more than ``passes_per_step`` backward passes."""
    # The first two sentences are Horovod's.
    return GradientError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. (The first: those of {name!r}, with "
        f"backward_passes_per_step={passes_per_step}. Or wrap all backward passes but the last in `with "
        "optimizer.no_sync():`)"
    )
