"""
`StepWorld`: what every kind of step works with in one world. `CarriedOver`: what it takes over from the world before.

    hvd.init ── Connection ── StepWorld ──┐
    the step of the world before ── CarriedOver ── a step of this world (`step_choice`)

The `Reducer` makes both. `Added` has the parameters, which are the same in all worlds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.parameter_check import ParameterCheck
from ..buckets.plan import BucketPlan
from ..buckets.settings import Settings
from ..buckets.step_trace import StepTrace
from ..buckets.weights import WeightState
from ..calls.generation import ReducerRegistry
from ..comm.group import Group
from ..comm.step_clock import StepClock
from .step_state import StepState

# The memory of buckets, which those of the next world use again.
Buffers = Iterable[tuple[BucketPlan, Tensor]]


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
        """Returns the same without the parameters of these names."""
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
