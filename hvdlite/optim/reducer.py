"""
`Reducer`: takes an optimizer's gradients during backward, and writes their averages into ``param.grad`` for the step.

    hook(param) ── slice of a bucket ── full buckets, in plan order: launched ──┐                inside backward
    step        ── synchronize: the step's `finish` ── averages in param.grad ──┘                inside step()

    Reducer ── StepState: phase, backward passes                    for all worlds
            ├─ OwnEngine: links to the other ranks ─┐
            └─ Step: what happens to gradients ─────┴─ StepWorld    new ones in each world

`averaging_optimizer` calls it, and autograd its hooks. A gradient is a *slice* of a *bucket*. A parameter is *ready*
when its gradient is complete for this step, which is after `backward_passes_per_step` backward passes. What is done
with gradients is the step's (`steps.step`); the `Reducer` counts their passes, begins and ends steps, and raises an
error if the user's calls come in an order that would lose gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .. import forks
from ..buckets.exchange import Exchange
from ..buckets.parameter_check import ParameterCheck
from ..buckets.plan import can_have_gradient
from ..buckets.settings import Settings
from ..buckets.step_trace import StepTrace
from ..comm import deferred_close
from ..comm.flat_bytes import give_back_free_memory
from ..comm.group import Group
from ..comm.reduce_op import Sum
from ..errors import GradientError, NotInitializedError
from ..exchanges.exchange_state import ExchangeState
from ..faults import point
from ..outside_graphs import keep_outside_graphs
from ..steps.step import Arrived, Step
from ..steps.step_choice import step_of
from ..steps.step_world import UNDER_WAY, Added, Buffers, CarriedOver, StepPhase, StepState, StepWorld
from .own_engine import Arguments, Connection, EnginePlan, OwnEngine
from .surplus import PendingKind, SurplusGradients

# Returns, for a world's settings and exchange, the arguments that ranks compare; and autotune, a function of the ranks
# and of ``named``, the parameters, or None.
Describe = Callable[[Settings, Exchange], tuple[Arguments, Callable[..., int] | None]]

# Returns autograd's number of the current backward pass. A global, since it is called for every gradient.
number_of_backward = torch._C._current_graph_task_id

# Has autograd call a function at the end of the current backward pass. DDP uses it too.
_when_backward_ends = torch.autograd.Variable._execution_engine.queue_callback

# In the second step gradients lie in the engine's memory: those of the first are free, and as large as the model.
_STEP_IN_OWN_MEMORY = 2
_MANY_BYTES = 2**25


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group. All must call `synchronize` equally often.

    Between two calls the ranks may differ in which parameters they use, and in the order of the gradients. In a new
    world the next gradient, step or `zero_grad` makes a new step, with new buckets.
    """

    step: Step
    """What happens to gradients in the current world."""
    engine: OwnEngine
    """The engine between the ranks of the current world."""

    def __init__(self, connect: Callable[[], Connection], describe: Describe, backward_passes_per_step: int) -> None:
        """``connect`` returns the ranks of the current world, or raises NotInitializedError if there is none."""
        self._connect = connect
        self.state = StepState(backward_passes_per_step)
        """How far the current step is."""
        # Held while a hook handles a gradient. Reentrant, since the same thread may run another backward pass inside.
        self._lock = threading.RLock()
        # Autograd's hooks on the parameters.
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._has_all_averages = False
        self._describe = describe
        # The hosts of the ranks that autotune has last chosen the cap for.
        self._tuned_for: tuple[str, ...] | None = None
        self._enter(connect(), CarriedOver())
        self.exchange_state = ExchangeState(self.step.plan.exchange)
        """What the exchange keeps of gradients, in all worlds."""
        forks.when_forked(self)

    def leave_to_parent(self) -> None:
        """Makes gradients the child's own: autograd calls no hook, and the parent's collectives are not waited for."""
        if forks.parent is None:
            # No rank has been forked, but a process that may become one, as its child may.
            return
        self.engine.leave_to_parent()
        self._stop_hearing(list(self._hooks))
        self._lock = threading.RLock()
        self.state.clear()

    # -- worlds

    def _enter(self, connection: Connection, carried: CarriedOver, earlier: OwnEngine | None = None) -> None:
        """Makes an engine and a step, without parameters, for the connection's ranks. ``earlier``: the last engine."""
        survival, generation = connection.survival, connection.generation
        worlds = 0 if earlier is None else self._world.worlds + 1
        # Keep the cap that autotune has chosen.
        cap_bytes = connection.settings.cap_bytes if earlier is None else self.settings.cap_bytes
        self.settings: Settings = replace(connection.settings, cap_bytes=cap_bytes)
        """The arguments by which gradients are combined, with autotune's cap."""
        # How many worlds have begun otherwise than with the ranks that were left of the one before, in one step.
        self._beginnings = None if survival is None else survival.beginnings
        self.engine = OwnEngine(connection, self, earlier)
        # Then all ranks finish that step first, and their parameters are equal only after it.
        is_in_step = worlds > 0 and survival is not None and survival.all_are_in_step
        checks = connection.check_parameters
        self._world: StepWorld = StepWorld(
            self.settings,
            connection.group,
            self.engine,
            StepTrace(generation.recorder),
            ParameterCheck(connection.group, checks, spares_first=is_in_step),
            generation.watch.clock,
            generation.reducers,
            self.state,
            compares=checks is not False,
            worlds=worlds,
        )
        self.step = step_of(self._world, survival, self, carried)
        self.surplus = SurplusGradients(self.step, self._world)
        """Which gradients another optimizer's backward pass has left."""
        # What the ranks of this world compare, and autotune: a rank that was outside the process set may be in it now.
        self._arguments, self._tune = self._describe(connection.settings, self.step.plan.exchange)

    def follow_world(self, buffers: Buffers = ()) -> None:
        """Connects to the current world, if the old one has been shut down. Waits for no other rank.

        Gradients that were being averaged in the old world are dropped; the state of the exchange is kept. The new
        buckets use these ``buffers`` of the old ones, if their memory was kept.
        """
        if not self.engine.is_world_closed:
            return
        try:
            connection = self._connect()
        except NotInitializedError:
            # The next collective raises an error that says so.
            return
        # Whether ranks were only lost since this world: none has come, and all left it within one step.
        goes_on = connection.survival is not None and connection.survival.beginnings == self._beginnings
        if is_in_step := self.state.is_in_step:
            self.step.leave_world()
        if is_in_step or not goes_on:
            self.state.clear()
        carried = self.step.carried_over(goes_on=goes_on)
        self._enter(connection, carried, self.engine)
        self.exchange_state.move_to(self.step.plan.exchange)
        for added in carried.added:
            self._take_in(added)
        self.step.plan.take_over(buffers, connection.group.engine)

    def engine_plan(self) -> EnginePlan:
        """Returns what is to be done with the engine when it opens."""
        named = [pair for added in self.step.plan.added for pair in added.params.items()]
        tune = None
        if self._tune is not None:
            known = self.settings.cap_bytes if self._tuned_for == self.engine.ranks.hosts else None
            tune = partial(_cap, known, partial(self._tune, named=named))
        gpu = next((param.device for _, param in named if param.is_cuda), None)
        return EnginePlan(self._arguments, self.step.open_links, tune, gpu)

    @property
    def is_still_to_tune(self) -> bool:
        """Whether autotune is on and has not chosen a cap yet."""
        return self._tune is not None and self._tuned_for is None

    def opened(self, cap_bytes: int | None) -> None:
        """Uses the engine, which is open now; ``cap_bytes`` is autotune's choice, or None."""
        if cap_bytes is not None:
            self._tuned_for = self.engine.ranks.hosts
            self.settings = replace(self.settings, cap_bytes=cap_bytes)
        self.step.opened(cap_bytes)

    def connect(self) -> Group:
        """Returns the ranks of the current world with the optimizer's own engine; see `OwnEngine.connect`."""
        self.follow_world()
        return self.engine.connect()

    # -- parameters

    def add_params(
        self,
        named_params: Iterable[tuple[str, Tensor]],
        groups: Iterable[Iterable[str]] = (),
        *,
        are_new: bool = False,
    ) -> None:
        """Adds parameters: plans their buckets behind the existing ones, and hooks their gradients.

        ``are_new``: in their first step their bucket is sent even if they are frozen. They may have gradients already.
        """
        self.follow_world()
        params = dict(named_params)
        trainable = frozenset(name for name, param in params.items() if param.requires_grad or are_new)
        self._take_in(Added(params, [list(group) for group in groups], trainable))
        self._hear(params.values())

    def _take_in(self, added: Added) -> None:
        for param in added.params.values():
            self._world.clock.follow(param.device)
        description = self.step.add(added)
        # Their shapes at the next `connect`, their values in the next step.
        self._world.check.add(added.params.items())
        self.engine.compare_later(description)

    def drop_params(self, names: Collection[str]) -> None:
        """Lets go of parameters, between two steps. Every rank must call it, with the same names; it waits for none."""
        self.follow_world()
        known = {name: param for added in self.step.plan.added for name, param in added.params.items()}
        dropped = [known[name] for name in names if name in known]
        self.step.drop_params(names)
        self._stop_hearing(dropped)
        self._world.reducers.note_averaged(dropped)
        self._world.check.drop(names)
        self.engine.compare_later([(name, "left optimizer.param_groups") for name in sorted(names)])
        self.exchange_state.forget(names)

    def _hear(self, params: Collection[Tensor]) -> None:
        """Hooks parameters, and closes earlier reducers of theirs: gradients averaged twice would be too small."""
        if forks.parent is not None:
            return
        deferred_close.prepare()
        for param in params:
            for earlier in _reducers_of(param):
                earlier.close()
        self._hooks |= {param: self._hook(param) for param in params if can_have_gradient(param.dtype)}

    def _hook(self, param: Tensor) -> RemovableHandle:
        # PyTorch hooks only parameters that require a gradient, but a frozen one may be unfrozen later.
        frozen = not param.requires_grad
        if frozen:
            param.requires_grad_(True)
        handle = param.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]
        if frozen:
            param.requires_grad_(False)
        assert isinstance(handle, RemovableHandle), "torch returns what removes the hook"
        return handle

    def _stop_hearing(self, params: Iterable[Tensor]) -> None:
        for param in params:
            if (hook := self._hooks.pop(param, None)) is not None:
                hook.remove()

    def require_own_gradients(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raises GradientError if another optimizer averages, or has averaged, a gradient of these in this step."""
        for name, param in named:
            others = [each for each in _reducers_of(param) if each is not self]
            if self._world.reducers.has_averaged(param) or any(each.has_gradient_of(param) for each in others):
                raise GradientError(
                    f"{name!r} has come to the groups of {self._world.trace.optimizer} from those of another "
                    "DistributedOptimizer, which averages its gradient in this step: call zero_grad() of that one and "
                    "then of this one between such a change and the backward pass. In this step, call step() of that "
                    "one first, and set the gradient to None before the step of this one"
                )

    def has_gradient_of(self, param: Tensor) -> bool:
        """Whether this averages a gradient of the parameter in the current step."""
        state = self.step.plan.layout.states.get(id(param))
        if state is None or param.grad is None:
            return False
        return self.state.has_ended or (self.state.is_in_step and (state.ready or state.passes > 0))

    # -- inside backward

    def on_gradient(self, param: Tensor) -> None:
        """Handles an addition to ``param.grad`` by autograd, which calls it as a bound method."""
        # Autograd has one thread per device, so several may call this at once.
        with self._lock:
            # This runs for every parameter in every pass, so it does as little as possible.
            if self.engine.is_closed:
                # The hooks are removed soon (see `abandon`), and no step will use this gradient.
                return
            if param.grad is None:
                # Autograd calls hooks also where a function's backward has returned None.
                return
            current = self.state
            if current.phase not in UNDER_WAY and not self.step.steps_first:
                point("begin")
                # This may replace the step, if there is a new world.
                self.begin_step()
            backward = number_of_backward()
            if backward not in current.backwards:
                self._begin_backward(backward, param)
            step = self.step
            try:
                # There may be a new world, or other parameters.
                state = step.plan.layout.states[id(param)]
            except KeyError:
                # It has left the optimizer.
                return
            if state.ready:
                raise self.surplus.error_of_addition(state, backward)
            if param.grad is not state.held:
                # Autograd made a new gradient, so the user has dropped the sum of earlier passes.
                state.passes = 0
            last_pass = False
            if not current.is_accumulating:
                state.passes += 1
                last_pass = state.passes >= current.passes_per_step
            if last_pass and step.kept is not None:
                step.kept.keep(state)
            if state.home.take(state, last_pass):
                step.launch()

    def _begin_backward(self, backward: int, param: Tensor) -> None:
        """Notes the first gradient of a backward pass, ``param``'s, by autograd's number of it."""
        if self.surplus.are_dropped_before(param):
            # This gradient belongs to the step that begins now, and not to the one that all ranks drop.
            # A copy, since it may be a view of a bucket that is sent with what all drop.
            grad, param.grad = None if param.grad is None else param.grad.clone(), None
            if self.step.is_replaced:
                # No rank sends in the new world what all drop.
                self.follow_world()
            elif not self.engine.is_world_closed:
                self.step.drop()
            param.grad = grad
            self.begin_step()
        self.state.backwards.add(backward)
        clock = self._world.clock
        if clock.is_on:
            clock.begin_backward()
            _when_backward_ends(clock.end_backward)
        self.step.plan.weights.begin_backward()

    def begin_step(self) -> None:
        self.follow_world()
        self.engine.ranks.require_open("averaging gradients")
        weights = self.step.plan.weights
        self.exchange_state.begin_step(weights.state.reference, weights.of_step)
        self._has_all_averages = False
        self.step.begin()

    def weigh(self, n: int) -> float:
        """Adds n to this rank's weight in this step. Returns what the loss must be multiplied by."""
        if not self.state.is_in_step:
            self.follow_world()
        return self.step.plan.weights.add(n)

    # -- between backward and step

    def synchronize(self, update: Arrived | None = None, arrived: Arrived | None = None) -> None:
        """Waits for all ranks, and leaves the averages in ``param.grad``. Does nothing if that is done already.

        ``update`` is called with some parameters as soon as their averages arrive, while others are still being sent;
        then these gradients are set to None. ``arrived`` is called likewise, and the gradients stay. Neither is called
        for sparse gradients, nor if there are no buckets. A parameter that no rank used keeps ``grad = None``; of one
        that some ranks used, the others count as zero. After too many backward passes gradients are unusable: see
        `require_sound`.
        """
        if not self.state.is_in_step:
            self.follow_world()
        if self.step.steps_first:
            return
        self.engine.require_usable()
        if self.state.has_ended:
            return
        with self._world.clock.waiting():
            if self.state.phase is StepPhase.IDLE:
                self.begin_step()
            self.step.finish(update, arrived)
            point("voted")

    def gather_averages(self) -> None:
        """Leaves all averages in ``param.grad``, also of others' parts. Every rank must call it after `synchronize`."""
        if self.state.phase is StepPhase.AVERAGED and not self._has_all_averages:
            self._has_all_averages = True
            self.step.plan.gather_averages(self.engine.connected().all)

    @property
    def name(self) -> str:
        return self._world.trace.optimizer

    def require_nothing_pending(self, action: str, way_out: str) -> None:
        """Raises GradientError if this action would lose complete gradients that are not synchronized.

        Surplus gradients (see `surplus`) are no error: this waits for them and drops them, as it drops those of a world
        that has been shut down. Gradients that have not had all their backward passes stay, and count their passes
        anew.
        """
        self.follow_world()
        pending = self.surplus.pending(action, way_out)
        self._leave_step(drops=pending is not PendingKind.NOTHING)

    def settle(self, action: str, way_out: str) -> None:
        """Does as `require_nothing_pending` for an action that leaves gradients where they are.

        Every rank must call it, and waits for all. All average surplus gradients: the next step combines them once
        more. Raises GradientError on all ranks if one has others pending.
        """
        self.follow_world()
        agreed = self.surplus.agreed(self.engine.ranks, action, way_out)
        if agreed is PendingKind.SURPLUS:
            self.synchronize()
            self.gather_averages()
            plan = self.step.plan
            if self.settings.op is Sum:
                # The sum of these over all ranks, in the next step, is the sum that they are now.
                for state in plan.layout.states.values():
                    if state.param.grad is not None:
                        state.param.grad.div_(plan.ranks.size)
            # Some ranks may run another pass before the step, and others not: all come to it alike.
            self.state.forget_averages()
            return
        if agreed is PendingKind.DROPPED:
            if not self.state.is_in_step:
                self.begin_step()
            self._leave_step(drops=True)
            return
        passes = frozenset(self.state.backwards)
        self._leave_step(drops=False)
        # The next step uses their gradients, and tells other optimizers so.
        self.state.backwards |= passes

    def _leave_step(self, *, drops: bool) -> None:
        """Ends a step that has no complete gradients, or of which all ranks drop them."""
        weights = self.step.plan.weights.state
        if drops:
            self.step.drop()
        elif self.state.is_in_step or self.step.steps_first:
            self.step.leave()
            # The next step averages them, so their numbers of samples count in it.
            self.step.plan.weights.state = weights
        self.state.clear()

    # -- the step

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Returns whether the ranks may step. Every rank must call it before `stepping`.

        With Adasum and outer steps no rank steps if GradScaler has found a gradient that is not finite (``found_inf``).
        Otherwise this divides the gradients by ``grad_scale``. Both are None without a GradScaler.
        """
        if not self.state.is_in_step:
            self.follow_world()
        may_step = self.step.agree_to_step(grad_scale, found_inf)
        if not may_step and not self.step.steps_first:
            # Outer steps count it too.
            with self.stepping():
                pass
        return may_step

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which the optimizer takes its step. With Adasum, combines the ranks' changes at the end."""
        with self._world.clock.stepping(), self.step.stepping():
            yield
        self._stepped()

    def _stepped(self) -> None:
        """Records that the optimizer has used the gradients."""
        world = self._world
        self.surplus.note_used_passes()
        self.state.stepped()
        world.trace.stepped()
        world.reducers.steps[world.trace.optimizer] = world.trace.step
        if world.trace.step == _STEP_IN_OWN_MEMORY and self.step.plan.layout.host_bytes >= _MANY_BYTES:
            give_back_free_memory()
        if world.ranks.size > 1:
            world.clock.stepped(world.ranks.set_id)
        point("stepped")

    # -- ranks that join

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in one step of the other ranks without gradients, for `join`. Returns False if all ranks sat out.

        Gradients that are complete already are averaged in that step, even if this reducer is closed by now. Otherwise
        no parameter has a gradient afterwards. With Adasum the parameters change as on the other ranks.
        """
        if why := self.step.why_no_join():
            raise GradientError(why)
        has_arrivals = bool(self.step.plan.layout.ready())
        if not has_arrivals and not self.step.steps_first:
            self.begin_step()
        is_stepping = self.step.sit_out(average_of_active)
        if has_arrivals:
            self._stepped()
        elif is_stepping:
            self._world.clock.sat_out(self._world.ranks.set_id)
        return is_stepping

    # -- closing

    def close(self) -> None:
        """Removes the hooks and closes the engine. Leaves the gradients, and waits for no collective."""
        self.engine.is_closed = True
        self._stop_hearing(list(self._hooks))
        self.engine.close()

    def abandon(self) -> None:
        """Closes in another thread, soon. For the garbage collector, which may run while this thread holds locks."""
        self.engine.is_closed = True
        deferred_close.close_later(self.close)


def _reducers_of(param: Tensor) -> list[Reducer]:
    """Returns what averages the parameter: at most one, unless an earlier one is about to be closed."""
    bound = [getattr(hook, "__self__", None) for hook in (param._post_accumulate_grad_hooks or {}).values()]
    return [each for each in bound if isinstance(each, Reducer)]


def _cap(known: int | None, measure: Callable[[Group], int], group: Group) -> int:
    """Returns autotune's cap in bytes: the one that was known before, if it is equal on all ranks, else a new one.

    A rank that was not in the earlier world knows None. Every rank must call it; it waits for all.
    """
    if group.size > 1 and group.agree(known, "autotune") is not None:
        known = None
    return measure(group) if known is None else known


keep_outside_graphs(globals())
