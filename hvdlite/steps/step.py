"""
`Step`: what happens to an optimizer's gradients from backward to the end of its own step, in one world.

    backward ── begin ── launch, where a bucket is full ──┐
    step     ── finish: the averages are in param.grad ───┴── stepping: around the optimizer's own step

    averaged_step    averages the gradients               outer_step      wraps it: averages parameters between hosts
    adasum_step      combines what own steps change       surviving_step  wraps it: is finished though ranks are lost

The `Reducer` has one, which `step_choice` makes for the settings and the ranks of a world. A new world makes a new one.
`KeptGradients` has what a step can be averaged again from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.gradient_state import GradientState
from ..buckets.plan import Description
from ..comm.group import Group
from .gradient_plan import GradientPlan
from .step_world import Added, Buffers, CarriedOver, StepWorld

# Called with parameters whose averages have arrived.
Arrived = Callable[[list[Tensor]], None]


class Step:
    """The steps of one optimizer in one world. All ranks must call `finish`, `drop` and `stepping` equally often.

    The base class does nothing: it is a step that keeps nothing but its `plan`, and of which any rank may join.
    """

    steps_first: ClassVar[bool] = False
    """Whether each rank steps with its own gradients, and the changes are combined afterwards (Adasum).

    Then a step does not begin in backward: `begin`, `launch`, `finish` and `drop` are not called.
    """

    plan: GradientPlan
    """Where the gradients are."""

    kept: KeptGradients | None = None
    """Has complete gradients, before a bucket takes them. None: they are not kept, since no step is averaged again."""

    def __init__(self, plan: GradientPlan, world: StepWorld) -> None:
        self.plan = plan
        self._world = world

    # -- parameters

    def add(self, added: Added) -> Description:
        """Adds parameters, behind the existing ones. Returns what the ranks compare of them."""
        return self.plan.add(added)[0]

    def drop_params(self, names: Collection[str]) -> None:
        """Lets go of parameters, between two steps. Raises GradientError if this kind of step cannot."""
        self.plan.drop(names)

    # -- the engine

    @property
    def open_links(self) -> Callable[[Group], Links]:
        """A function that opens the links of the exchange over a new engine. It refers to no parameter."""
        return self.plan.exchange.open_links

    def opened(self, cap_bytes: int | None) -> None:
        """Uses the engine, which is open now. ``cap_bytes`` is autotune's choice, or None."""

    @property
    def is_sending(self) -> bool:
        """Whether collectives may be running."""
        return False

    # -- in the order of a step

    def begin(self) -> None:
        """Begins a step, before its first gradient is taken."""

    def launch(self) -> None:
        """Sends full buckets during backward."""

    def spoil(self) -> None:
        """Gives up the step's averages. It must still be finished together with the other ranks."""

    def finish(self, update: Arrived | None, arrived: Arrived | None) -> None:
        """Waits for all ranks, and leaves the averages in ``param.grad``; see `Reducer.synchronize`."""

    def drop(self) -> None:
        """Finishes the step on all ranks, and drops its averages."""

    def leave(self) -> None:
        """Ends the step, of which nothing is averaged, or gives it up."""
        self.plan.layout.forget()

    def leave_world(self) -> None:
        """Gives up the step, since its world has been shut down."""

    @property
    def is_replaced(self) -> bool:
        """Whether another optimizer has gone on in a new world since the step began."""
        return False

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Returns whether the ranks may step; see `Reducer.agree_to_step`."""
        return True

    def stepping(self) -> AbstractContextManager[None]:
        """Returns the context of the optimizer's own step; with Adasum the ranks combine what it has changed."""
        return nullcontext()

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in a step of the other ranks, which has begun. Returns False if all ranks sat out.

        Complete gradients are averaged in it. ``average_of_active``: otherwise this rank does not count in the divisor.
        """
        raise NotImplementedError

    def why_no_join(self) -> str:
        """Says why no rank of this optimizer may join, as the message of an error; empty if they may."""
        return ""

    # -- what outlives it

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the parameters are those that all hosts share."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of the state beside that of the exchange."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, or begins anew if it is empty.

        The base class raises ValueError for a state of outer steps, unless hosts have been lost since the first world.
        """
        if state and self._world.worlds == 0:
            has_outer = self._world.settings.outer is not None
            reason = "all ranks are on one host" if has_outer else "the optimizer has no outer="
            raise ValueError(
                f"the checkpoint has the state of outer={state['outer']}, and {reason}: make the optimizer as it was, "
                "or delete the key 'outer' of state_dict()['hvdlite'] on every rank"
            )

    def consolidate(self, *, keeps: bool) -> None:
        """Makes the next `state_dict` that of all ranks, where ``keeps``. Every rank must call it; it waits for all."""

    def carried_over(self, *, goes_on: bool) -> CarriedOver:
        """Returns what the step of the next world takes over.

        ``goes_on``: that has those of these ranks that are left, and no others.
        """
        # Losses may be weighted already, and other ranks may be a step further in the old world.
        return CarriedOver(tuple(self.plan.added), self.plan.weights.state if goes_on else None)


class Owner(Protocol):
    """The `Reducer`, as a step uses it that goes on in another world."""

    @property
    def step(self) -> Step:
        """The step of the current world."""

    def begin_step(self) -> None:
        """Begins a step in the current world."""

    def follow_world(self, buffers: Buffers = ()) -> None:
        """Makes a step for the world that there is now, if the old one has been shut down."""


class _Kept(NamedTuple):
    gradient: Tensor | None
    passes: int
    is_ready: bool


class KeptGradients:
    """Autograd's own gradients of a step on this rank, from which it can be averaged again if a rank is lost.

    A bucket copies each gradient into its buffer, and the sums of all ranks take its place there. Here are the tensors
    that autograd has made, which costs the memory of all gradients once more, and no copy. It copies only what
    autograd has added to in a bucket's buffer: after `zero_grad(set_to_none=False)`, or in the later of several passes.
    """

    def __init__(self) -> None:
        # By the parameter's `id`, as in `Layout.states`.
        self._gradients: dict[int, Tensor] = {}
        self._states: dict[int, _Kept] = {}

    def keep(self, state: GradientState) -> None:
        """Keeps ``param.grad``, before a bucket takes it."""
        grad = state.param.grad
        if grad is not None:
            self._gradients[id(state.param)] = grad.detach().clone() if grad is state.view else grad

    def keep_rest(self, states: Mapping[int, GradientState]) -> None:
        """Keeps incomplete gradients too, and how far each gradient is. Call it before the last buckets are sent."""
        for state in states.values():
            if not state.ready:
                self.keep(state)
        gradients = self._gradients
        self._states = {own: _Kept(gradients.get(own), state.passes, state.ready) for own, state in states.items()}

    def put_back(self, states: Iterable[GradientState]) -> None:
        """Gives the parameters the gradients that they had before the step was sent, and has new buckets take them."""
        for state in states:
            kept = self._states[id(state.param)]
            state.param.grad = kept.gradient
            state.passes = kept.passes
            if kept.is_ready:
                state.home.take(state, True)

    def begin(self) -> None:
        """Forgets what `keep` has kept, for the next step; `put_back` still has what `keep_rest` found."""
        self._gradients.clear()

    def forget(self) -> None:
        """Frees the gradients, since all ranks have the averages, or the step has failed."""
        self._gradients.clear()
        self._states.clear()
