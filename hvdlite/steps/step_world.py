"""
`StepState`: how far an optimizer's step is, in all worlds. `StepWorld`: what a step works with in one world.

    IDLE ── first gradient ── COLLECTING ── finish ── AVERAGED ── the optimizer's own step ── IDLE
                              └─ one pass too many ── SPOILT ── finish ── DROPPED ── zero_grad ── IDLE

    hvd.init ── Connection ── StepWorld ──┐
    the step of the world before ── CarriedOver ── a step of this world (`step_choice`)

The `Reducer` makes all of them. `Added` has the parameters, which are the same in all worlds.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.flags import WeightState
from ..buckets.parameter_check import ParameterCheck
from ..buckets.plan import BucketPlan
from ..buckets.settings import Settings
from ..buckets.step_trace import StepTrace
from ..calls.generation import ReducerRegistry
from ..comm.group import Group
from ..comm.step_clock import StepClock
from ..errors import GradientError

# The memory of buckets, which those of the next world use again.
Buffers = Iterable[tuple[BucketPlan, Tensor]]


class StepPhase(enum.Enum):
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
        return StepMark(self.phase, frozenset(self.backwards), weights)

    def require_sound(self) -> None:
        """Raises GradientError if too many backward passes have spoilt the gradients, until `zero_grad` drops them."""
        if self.phase in (StepPhase.SPOILT, StepPhase.DROPPED):
            raise GradientError(
                "step() was called after gradients were computed more than backward_passes_per_step times, which has "
                "spoilt them: call optimizer.synchronize() and optimizer.zero_grad() on every rank to drop them"
            )


def too_many_passes(name: str, passes_per_step: int) -> GradientError:
    # The first two sentences are Horovod's.
    return GradientError(
        "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
        f"backward_passes_per_step to accumulate gradients locally. (The first: those of {name!r}, with "
        f"backward_passes_per_step={passes_per_step}. Or wrap all backward passes but the last in `with "
        "optimizer.no_sync():`)"
    )


class OptimizerEngine(Protocol):
    """The optimizer's own engine, as a step uses it. It is `optim.own_engine.OwnEngine`."""

    @property
    def links(self) -> Links | None:
        """The links to the other ranks, once they are open."""

    @property
    def links_for_backward(self) -> Links | None:
        """The same while something may be sent in backward: None if the ranks must first compare their models."""

    @property
    def number(self) -> int | None:
        """The optimizer's number among those of these ranks, once it has one."""

    @property
    def is_world_closed(self) -> bool:
        """Whether the world has been shut down."""

    def connected(self) -> Links:
        """Returns the links. The first call opens them: every rank must call it, and waits for all."""

    def taken_number(self) -> int:
        """Returns the optimizer's number, which it takes now if it has none."""

    def require_own(self, what: str) -> None:
        """Raises a NotInitializedError in a forked child, which names ``what``."""

    def require_usable(self) -> None:
        """Raises GradientError if the optimizer was closed, or can take no more steps."""


@dataclass(frozen=True, slots=True)
class StepWorld:
    """The ranks of one world, and what an optimizer's step has there, whatever its kind.

    ``settings`` have the cap that autotune has chosen. ``ranks`` are those of the optimizer. ``compares``: the first
    step compares the parameters of all ranks. ``worlds`` counts those that the optimizer was in before.
    """

    settings: Settings
    ranks: Group
    engine: OptimizerEngine
    trace: StepTrace
    check: ParameterCheck
    clock: StepClock
    reducers: ReducerRegistry
    state: StepState
    compares: bool = False
    worlds: int = 0


@dataclass(frozen=True, slots=True)
class Added:
    """Parameters that were added together, by name; the names that share a bucket, and those that were not frozen.

    The last are kept, since a new world may begin within a step, in which ranks have frozen some for a moment.
    """

    params: dict[str, Tensor]
    groups: list[list[str]]
    trainable: frozenset[str]

    def without(self, names: Collection[str]) -> Added:
        params = {name: param for name, param in self.params.items() if name not in names}
        return replace(self, params=params, groups=[[n for n in group if n not in names] for group in self.groups])


class KnownLosses(NamedTuple):
    """How many of `Survival.lost_ranks` a step has told of, and whether ranks had kept something of gradients."""

    told: int
    had_residuals: bool


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """What a step of a new world takes over from the one before.

    ``weights`` are those of its losses, where all ranks come from the same step, else None. ``losses`` is None unless
    steps survived. The state of the exchange is moved by `ExchangeState`, which also has it in checkpoints.
    """

    added: tuple[Added, ...] = ()
    weights: WeightState | None = None
    losses: KnownLosses | None = None
