"""
`Reducer`: takes an optimizer's gradients during backward, and writes their averages into ``param.grad`` for the step.

    hook(param) ── slice of a bucket ── full buckets, in plan order: exchange.begin ──┐      inside backward
    step        ── the rest ── wait, in plan order ── exchange.finish ── param.grad ──┘      inside synchronize
                └─ gradients only other ranks have ── buckets of parameters unfrozen since ── sparse gradients

`averaging_optimizer` calls it, and autograd its hooks. A gradient is a *slice* of a *bucket*. A parameter is *ready*
when its gradient is complete for this step, which is after `backward_passes_per_step` backward passes. The `Reducer`
owns the buckets (`layout`), the queue that launches them (`in_flight`), and the exchange that combines them. It also
raises an error if the user's calls come in an order that would lose gradients. A reducer outlives its world: after
`hvd.shutdown` and `hvd.init` it connects to the ranks that there are then.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.engine import HasMemory
from ..comm.group import Group
from ..control.generation import Generation
from ..control.reducer_registry import Progress
from ..errors import CommunicationError, GradientError, NotInitializedError, PeerLostError
from ..faults import point
from ..log import log
from ..ops.failures import raise_together
from ..runtime.survival import Survival
from ..values import shown, whole_number
from .exchange import Exchange, Links
from .exchange_choice import exchange_of
from .flags import RankAndSize
from .gradient_hooks import GradientHooks, number_of_backward, too_many_passes
from .gradient_state import GradientState
from .in_flight import BucketQueue
from .kept_gradients import KeptGradients
from .layout import Layout
from .opening import Arguments, Opened, Opening, Submit, Tune
from .outer_steps import outer_steps_of
from .plan import Description
from .settings import Settings
from .sparse_gather import SparseParameters
from .step_deltas import StepDeltas


class Phase(enum.Enum):
    """The phase of a step."""

    IDLE = "no gradient of this step has arrived"
    COLLECTING = "gradients arrive, and full buckets are being averaged"
    SPOILT = "one backward pass too many has changed gradients that are being averaged: end the step and drop them"
    AVERAGED = "the averages are in the gradients, for the optimizer to use"
    DROPPED = "a spoilt step has ended: its gradients are invalid"


@dataclass(frozen=True, slots=True)
class Connection:
    """The ranks that gradients are averaged over, and the settings, while the world's group is open.

    ``check_parameters`` is as in `parameter_check.ParameterCheck`. ``world`` is the group of all ranks, and ``submit``
    the method of the world's controller. Both are None if there is no world. ``survival`` is the world's, and None
    unless a step goes on where a rank is lost.
    """

    group: Group
    generation: Generation
    settings: Settings
    check_parameters: bool | int = False
    world: Group | None = None
    submit: Submit | None = None
    survival: Survival | None = None


# The arguments that the ranks compare, and autotune's function that chooses the cap, or None.
Described = tuple[Arguments, Callable[[Group], int] | None]

# Called with parameters whose averages have arrived.
Arrived = Callable[[list[Tensor]], None]

# The phases in which a step is in progress. A global, since it is read for every gradient.
_UNDER_WAY = (Phase.COLLECTING, Phase.SPOILT)


class Reducer(GradientHooks):
    """Averages the gradients of some parameters over the ranks of a group.

    All ranks must call `synchronize` equally often. Between two calls the ranks may differ in which parameters they
    use, and in the order of the gradients.

    With an exchange that runs after the step (Adasum), gradients are not averaged, only counted. Instead `stepping`
    combines what the ranks' steps have changed.

    A reducer outlives its world. After `hvd.shutdown()` and `hvd.init()`, the next gradient, step or `zero_grad`
    connects to the ranks of the new world, however many there are, and plans the buckets again.
    """

    def __init__(self, connect: Callable[[], Connection], backward_passes_per_step: int = 1) -> None:
        """``connect`` returns the ranks of the current world. It may raise NotInitializedError if there is none."""
        connection = connect()
        super().__init__(
            connection.group,
            connection.generation,
            backward_passes_per_step,
            connection.check_parameters,
            connection.submit,
        )
        self._connect = connect
        self._arguments: Arguments | None = None
        self._describe: Callable[[Settings, Exchange], Described] | None = None
        # Autotune's function that chooses the cap, and the hosts of the ranks that it last chose one for.
        self._tune: Callable[[Group], int] | None = None
        self._tuned_for: tuple[str, ...] | None = None
        # The arguments of each `add_params`: parameters by name, and the names that share a bucket.
        self._added: list[tuple[dict[str, Tensor], list[list[str]]]] = []
        self._plan(connection)
        self._phase = Phase.IDLE
        # What `consolidate` has made for this rank's next checkpoint, until the next step.
        self._consolidated: dict[str, Any] = {}
        # Held while a hook handles a gradient. Reentrant, since the same thread may run another backward pass inside.
        self._lock = threading.RLock()

    # -- the plan

    def _plan(self, connection: Connection) -> None:
        """Creates the exchange and an empty layout, for the connection's settings and ranks."""
        settings, group = connection.settings, connection.group
        self.settings = settings
        self.outer = outer_steps_of(settings, group, self._trace, compares=connection.check_parameters is not False)
        # The ranks that average gradients in every step.
        self._inner = RankAndSize(group.rank, group.size) if self.outer is None else self.outer.inner
        self.exchange = exchange_of(settings, self._inner.size)
        self._world = connection.world
        self._survival = connection.survival
        self._kept = None if connection.survival is None else KeptGradients()
        # Whether a rank was lost in this step, so that no more buckets are sent in this world.
        self._is_broken = False
        self._links: Links | None = None
        # Whether the current step is the first, which plans buckets and allocates memory before the engine is open.
        self._is_provisional = False
        self._lay_out()
        self._deltas: StepDeltas | None = None
        if self.exchange.after_step:
            self._deltas = StepDeltas(self.exchange, self._trace, self._check, self._connected, group.size)

    def _lay_out(self) -> None:
        """Creates an empty layout, and the objects that work on it."""
        settings, size = self.settings, self._inner.size
        self._layout = Layout(
            ranks=self._inner,
            cap_bytes=settings.cap_bytes,
            scale_of=lambda dtype: self.exchange.scale_before(dtype, size),
            densify=settings.sparse_as_dense,
            memory=self._take_memory,
            stays=self.exchange.after_step or settings.leaves_gradients(size),
            aligned=self.exchange.aligned,
        )
        self._queue = BucketQueue(self.exchange, self._trace, self._check, size)
        self._sparse = SparseParameters(settings, self._layout, size)

    def follow_world(self) -> None:
        """Connects to the current world, if the old one has been shut down. Waits for no other rank.

        Gradients that were being averaged in the old world are dropped. The state of the exchange is kept.
        """
        if self._world is None or not self._world.is_closed:
            return
        try:
            connection = self._connect()
        except NotInitializedError:
            # The next collective raises an error that says so.
            return
        if self._collecting:
            self._end_step()
        self._phase = Phase.IDLE
        if self._spoilt_by is not None:
            # It was a collective of the old world that never ended.
            self._spoilt_by, self._is_closed = None, False
        self._backwards.clear()
        before, exchanged = type(self.exchange), self.exchange.state_dict()
        self._join(connection.group, connection.generation, connection.check_parameters, connection.submit)
        # Keep the cap that autotune has chosen.
        self._plan(replace(connection, settings=replace(connection.settings, cap_bytes=self.settings.cap_bytes)))
        # A rank that was outside the process set may be in it now, with the settings of the others.
        if self._describe is not None:
            self._arguments, self._tune = self._describe(connection.settings, self.exchange)
        if exchanged and type(self.exchange) is before:
            self.exchange.load_state_dict(exchanged)
        for params, groups in self._added:
            self._take_in(params, groups)

    def outer_state(self) -> dict[str, Any]:
        """Returns this rank's part of the state of the outer steps; empty if there are none."""
        return {} if self.outer is None else self.outer.state_dict()

    def load_outer_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `outer_state` returned, or begins a new interval if it is empty."""
        if self.outer is not None:
            self.outer.load_state_dict(state)
        elif state:
            reason = "all ranks are on one host" if self.settings.outer is not None else "the optimizer has no outer="
            raise ValueError(
                f"the checkpoint has the state of outer={state['outer']}, and {reason}: make the optimizer as it was, "
                "or delete the key 'outer' of state_dict()['hvdlite'] on every rank"
            )

    @property
    def scales_itself(self) -> bool:
        """Whether `agree_to_step` must see GradScaler's decision, even if that is not to step."""
        return self.steps_first or self.settings.outer is not None

    @property
    def steps_first(self) -> bool:
        """Whether each rank steps with its own gradients, and the changes are combined afterwards (Adasum)."""
        return self._deltas is not None

    def compare_and_tune(self, describe: Callable[[Settings, Exchange], Described]) -> None:
        """Sets what returns, for a world's settings and exchange, what the ranks compare and tune in `connect`.

        It is called now, and in each new world.
        """
        self._describe = describe
        self._arguments, self._tune = describe(self.settings, self.exchange)

    @property
    def is_to_be_tuned(self) -> bool:
        """Whether autotune is on and has not chosen a cap yet."""
        return self._tune is not None and self._tuned_for is None

    def add_params(self, named_params: Iterable[tuple[str, Tensor]], groups: Iterable[Iterable[str]] = ()) -> None:
        """Adds parameters: plans their buckets behind the existing ones, and hooks their gradients."""
        self.follow_world()
        params, named_groups = dict(named_params), [list(group) for group in groups]
        self._added.append((params, named_groups))
        self._take_in(params, named_groups)
        self._hear(list(params.values()), self._on_gradient)

    def _take_in(self, params: dict[str, Tensor], groups: list[list[str]]) -> None:
        description, plans = self._layout.add(params, groups)
        for param in params.values():
            self._clock.follow(param.device)
        if self._deltas is not None:
            self._deltas.add(plans, params)
        if self.outer is not None:
            self.outer.add(params, groups)
        self._compare_later(params, description)

    def connect(self) -> Group:
        """Returns the communicator to the other ranks of the current world; see `GradientHooks.connect`."""
        self.follow_world()
        return super().connect()

    def _take_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # From the engine: if that has shared memory, gradients in it are summed without a copy. In the first step the
        # engine is not open yet.
        if self._links is None:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._links.all.zeros(numel, dtype, device)

    def _make_opening(self, number: int, description: Description) -> Opening:
        devices = [param.device for params, _ in self._added for param in params.values() if param.is_cuda]
        open_links: Callable[[Group], Links] = partial(Links, by_host=self.exchange.by_host, legs=self.exchange.legs)
        if self.outer is not None:
            open_links = self.outer.open
        return Opening(
            self._ranks,
            self._reducers,
            number,
            self,
            self._submit,
            arguments=self._arguments,
            description=description,
            open_links=open_links,
            tune=None if self._tune is None else Tune(self._tune, self._known_cap()),
            device=devices[0] if devices else None,
        )

    def _known_cap(self) -> int | None:
        """Returns the cap that autotune has chosen for ranks on these hosts, in this world or an earlier one."""
        return self.settings.cap_bytes if self._tuned_for == self._ranks.hosts else None

    def _take(self, opened: Opened) -> None:
        super()._take(opened)
        self._links = opened.links
        if opened.cap_bytes is not None:
            self._tuned_for = self._ranks.hosts
            self.settings = replace(self.settings, cap_bytes=opened.cap_bytes)
        if not self._collecting:
            self._plan_for_good()

    def _plan_for_good(self) -> None:
        """Replans the buckets with autotune's cap, or moves them to the engine's memory, once the engine is open.

        Call it only between steps.
        """
        self._is_provisional = False
        if self._layout.cap_bytes != self.settings.cap_bytes:
            self._lay_out()
            for params, groups in self._added:
                self._layout.add(params, groups)
        elif self._links is not None and isinstance(self._links.all.engine, HasMemory):
            for bucket in self._layout.buckets:
                bucket.renew()

    def _connected(self) -> Links:
        """Returns the links to the other ranks. The first call opens them: see `connect`."""
        self.connect()
        assert self._links is not None, "they have met"
        return self._links

    # -- inside backward

    def _on_gradient(self, param: Tensor) -> None:
        # Autograd has one thread per device, so several may call this at once.
        with self._lock:
            # This runs for every parameter in every pass, so it does as little as possible.
            if self._is_closed:
                # The hooks are removed soon (see `abandon`), and no step will use this gradient.
                return
            if self._deltas is not None:
                self._count_pass(param)
                return
            if self._phase not in _UNDER_WAY:
                point("begin")
                # This may replace the layout, if there is a new world.
                self._begin_step()
            state = self._layout.states[id(param)]
            if state.ready:
                self._require_surplus(state)
                self._discard()
                self._begin_step()
            backward = number_of_backward()
            if backward not in self._backwards:
                self._begin_backward(backward)
            if param.grad is not state.view:
                # Autograd made a new gradient, so the user has dropped the sum of earlier passes.
                state.passes = 0
            last_pass = False
            if not self._only_accumulating:
                state.passes += 1
                last_pass = state.passes >= self.backward_passes_per_step
            if last_pass and self._kept is not None:
                self._kept.keep(state)
            if state.home.take(state, last_pass) and self._links is not None:
                self._launch_full(self._links)
                point("backward")

    def _launch_full(self, links: Links) -> None:
        if self._survival is None:
            self._queue.launch_full(links)
        elif not self._is_broken:
            try:
                self._queue.launch_full(links)
            except CommunicationError as error:
                # The rest of backward is needed all the same: `synchronize` averages the gradients again.
                self._is_broken = True
                log.info("survive: a rank was lost during backward: %s", error)

    def _count_pass(self, param: Tensor) -> None:
        """Counts a backward pass for a gradient that is not averaged (Adasum)."""
        if (backward := number_of_backward()) not in self._backwards:
            self._begin_backward(backward)
        if self._only_accumulating:
            return
        state = self._layout.states[id(param)]
        state.passes += 1
        if state.passes > self.backward_passes_per_step:
            raise too_many_passes(state.name, self.backward_passes_per_step)

    # -- between backward and step

    def synchronize(self, update: Arrived | None = None, arrived: Arrived | None = None) -> None:
        """Waits for all ranks, and leaves the averages in ``param.grad``. Does nothing if that is done already.

        ``update`` is called with some parameters as soon as their averages arrive, while others are still being sent.
        Afterwards these gradients are set to None. ``arrived`` is called likewise, and the gradients stay. Neither is
        called for sparse gradients, nor if there are no buckets.

        A parameter that no rank used keeps ``grad = None``. One that some ranks used is averaged over all ranks, and
        the others count as zero. After too many backward passes this still waits, but the gradients are unusable: see
        `require_sound`.
        """
        if not self._collecting:
            self.follow_world()
        if self._deltas is None:
            self._require_not_closed()
            if self._phase not in (Phase.AVERAGED, Phase.DROPPED):
                with self._clock.waiting():
                    self._complete(partial(self._synchronize, update, arrived))

    def _complete(self, finish: Callable[[], None]) -> None:
        """Calls ``finish``, which ends the step with all ranks; where one is lost, again with those that are left.

        A rank returns only once all ranks have the averages: see `runtime.survival`.
        """
        survival, kept = self._survival, self._kept
        if survival is None or kept is None:
            finish()
            point("voted")
            return
        if self._phase is Phase.IDLE:
            self._begin_step()
        kept.keep_rest(self._layout.states)
        try:
            self._complete_among_those_left(finish, survival, kept)
        finally:
            kept.forget()
        assert self._number is not None, "it has met the others"
        survival.note_passed(self._number)
        point("voted")

    def _complete_among_those_left(self, finish: Callable[[], None], survival: Survival, kept: KeptGradients) -> None:
        phase, backwards = self._phase, set(self._backwards)
        while True:
            is_complete = False
            try:
                self._require_whole()
                finish()
                is_complete = True
                vote = torch.ones(1, dtype=torch.int32)
                self._connected().all.all_reduce(vote, f"the end of a step ({self._trace.optimizer})").wait()
            except CommunicationError as error:
                has_averages = survival.go_on(error, self._number) and is_complete
                phase_now = self._phase
                self.follow_world()
                self._backwards |= backwards
                if has_averages:
                    self._phase = phase_now
                    return
                self._begin_again(phase, kept)
            else:
                return

    def _require_whole(self) -> None:
        if self._is_broken:
            raise PeerLostError(f"a rank was lost during backward ({self._trace.optimizer})")

    def _begin_again(self, phase: Phase, kept: KeptGradients) -> None:
        """Begins the step again in a new world, with the gradients that were kept."""
        self._kept = kept
        self._begin_step()
        kept.put_back(self._layout.states.values())
        self._phase = phase
        if phase is Phase.SPOILT:
            self._layout.give_up()

    def _synchronize(self, update: Arrived | None = None, arrived: Arrived | None = None) -> None:
        if self._phase is Phase.IDLE:
            self._begin_step()
        # Buckets that are not full are launched here and not at the end of backward. In between, ranks may wait for
        # each other in other collectives, and only some of them may have full buckets.
        try:
            with self._trace.synchronizing():
                if self._phase is Phase.SPOILT:
                    self._finish_buckets()
                elif self._is_provisional and (changed := self._layout.allow_change()) is not None:
                    # In any other step the buckets would be sent by now. Send them, so that no other rank hangs.
                    self._finish_buckets()
                    raise changed
                else:
                    self._layout.require_same()
                    self._finish_buckets(update, arrived)
        finally:
            self._end_step()
        if self._phase is Phase.IDLE:
            self._phase = Phase.AVERAGED

    def _finish_buckets(self, update: Arrived | None = None, arrived: Arrived | None = None) -> None:
        links = self._connected()
        point("synchronize")
        failure: Exception | None = None
        for bucket in self._queue.finish_all(links):
            gathered = self._sparse.settle(bucket)
            if update is not None and failure is None and self._queue.failure is None:
                try:
                    with self._clock.stepping():
                        update([state.param for state in bucket.states if state not in gathered])
                except Exception as error:  # noqa: BLE001 - raised below
                    # Send the other buckets all the same: the other ranks wait for them.
                    failure = error
                else:
                    bucket.drop(gathered)
            elif arrived is not None:
                arrived([state.param for state in bucket.states if state not in gathered])
        if self.exchange.tells_failures:
            raise_together(links.all, self._queue.failure, f"the averaging of gradients ({self._trace.optimizer})")
        self._sparse.average(links.all, self._trace.optimizer, self._queue.count)
        if failure is not None:
            raise failure
        point("vote")

    def drop_gradients(self) -> None:
        """Sets all gradients to None, and frees the buckets' memory until the next gradient."""
        self._layout.drop_gradients()
        for bucket in self._layout.buckets:
            bucket.drop(())

    def require_sound(self) -> None:
        """Raises GradientError if too many backward passes have spoilt the gradients, until `zero_grad` drops them."""
        if self._phase in (Phase.SPOILT, Phase.DROPPED):
            raise GradientError(
                "step() was called after gradients were computed more than backward_passes_per_step times, which has "
                "spoilt them: call optimizer.synchronize() and optimizer.zero_grad() on every rank to drop them"
            )

    def require_nothing_pending(self, action: str, way_out: str) -> None:
        """Raises GradientError if this action would lose complete gradients that are not synchronized.

        ``action`` and ``way_out`` are parts of the message. Surplus gradients (see `_is_surplus`) are no error: this
        waits for them and drops them. It also drops gradients that have not had all their backward passes, and those of
        a world that has been shut down.
        """
        self.follow_world()
        if self._collecting:
            ready = next((state for state in self._layout.states.values() if state.ready), None)
            if ready is not None:
                if not self._is_surplus():
                    raise GradientError(
                        f"{action} while gradients are being averaged (the first: {ready.name!r}): {way_out}"
                    )
                self._discard()
            self._end_step()
        elif self._deltas is not None:
            self._layout.forget()
        self._backwards.clear()
        self._phase = Phase.IDLE

    @property
    def has_arrivals(self) -> bool:
        """Whether some gradient is complete and not synchronized yet."""
        return self._collecting and any(state.ready for state in self._layout.states.values())

    def passes_of(self) -> dict[Tensor, int]:
        """Returns the number of backward passes in this step of each parameter that has had one."""
        return {state.param: state.passes for state in self._layout.states.values() if state.passes}

    def progress(self) -> Progress:
        """Returns how far the current step is; see `control.reducer_registry.Progress`. Any thread may call it."""
        # Read while other threads may change it: a report may be a gradient late.
        waiting = self._queue.not_sent()
        missing = () if not waiting else tuple(waiting[0].missing_names())
        buckets = sum(not bucket.asleep for bucket in self._layout.buckets)
        phase = self._phase.value
        return Progress(self._trace.optimizer, self._trace.step, phase, buckets, buckets - len(waiting), missing)

    # -- the exchange's state

    def exchange_state(self) -> dict[str, Any]:
        """Returns the exchange's state for a checkpoint: this rank's, or after `consolidate` that of all ranks."""
        return self._consolidated or self.exchange.state_dict()

    def load_exchange_state(self, state: Mapping[str, Any]) -> None:
        """Loads what `exchange_state` returned, or an empty dict."""
        self._consolidated = {}
        self.exchange.load_state_dict(state)

    def consolidate(self, to: int) -> None:
        """Makes `exchange_state` on global rank ``to`` that of all ranks, until the next step. It waits for all."""
        self.require_nothing_pending("optimizer.consolidate_state_dict() was called", "call step() first")
        links, group = self._connected(), self.connect()
        named = whole_number(to)
        if named not in group.ranks:
            ranks = ", ".join(map(str, group.ranks))
            raise ValueError(f"consolidate_state_dict: to={shown(to)} is not one of the optimizer's ranks: {ranks}")
        state = self.exchange.consolidate([bucket.plan for bucket in self._layout.buckets], links)
        is_asked = group.ranks[group.rank] == named
        self._consolidated = state if is_asked else {}
        if self.outer is not None:
            self.outer.consolidate(keeps=is_asked)

    # -- the step

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Returns whether the ranks may step. Every rank must call it before `stepping`.

        With Adasum, whose ranks see only their own gradients, no rank steps if GradScaler has found one that is not
        finite on any rank (``found_inf``). Otherwise this divides the gradients by ``grad_scale``. Both are None
        without a GradScaler. With outer steps it does the same for the ranks of a host, which have found the same, and
        counts the step that is not taken. Otherwise it always returns True.
        """
        if not self._collecting:
            self.follow_world()
        if self.settings.outer is not None and found_inf is not None:
            if found_inf.item() > 0:
                with self.stepping():
                    return False
            if grad_scale is not None:
                inverse = 1.0 / float(grad_scale)
                for state in self._layout.states.values():
                    if state.param.grad is not None:
                        state.param.grad.mul_(inverse)
        if self._deltas is None:
            return True
        self._require_not_closed()
        self._layout.forget()
        return self._deltas.agree_to_step(grad_scale, found_inf)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context in which the optimizer takes its step. With Adasum, combines the ranks' changes at the end."""
        with self._clock.stepping():
            if self._deltas is not None:
                with self._deltas.stepping():
                    yield
            elif self.outer is not None:
                self._require_not_closed()
                self._connected()
                with self.outer.stepping():
                    yield
            else:
                yield
        self._stepped()

    def _stepped(self) -> None:
        """Records that the optimizer has used the gradients."""
        if self._deltas is None:
            self._reducers.stepped_backwards.extend(self._backwards)
        self._backwards.clear()
        if self._phase in (Phase.AVERAGED, Phase.DROPPED):
            self._phase = Phase.IDLE
        self._trace.stepped()
        self._reducers.steps[self._trace.optimizer] = self._trace.step
        if self.size > 1:
            self._clock.stepped(self._ranks.set_id)
        point("stepped")

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in one step of the other ranks without gradients, for `join`. Returns False if all ranks sat out.

        If some gradients are complete already, they are averaged in that step. Otherwise no parameter has a gradient
        afterwards. With Adasum the parameters change as on the other ranks.
        """
        if self.outer is not None:
            raise GradientError(
                f"hvd.join() does not work with outer={self.settings.outer!r}: hosts take outer steps together, and "
                "one that has joined would not come to them. Give every rank as many batches, for example with "
                "drop_last=True in its sampler"
            )
        if self._deltas is not None:
            is_stepping = self._deltas.sit_out()
            if is_stepping:
                self._clock.sat_out(self._ranks.set_id)
            return is_stepping
        if self.has_arrivals:
            # Even if this reducer is closed by now: other ranks are in that step.
            self._synchronize()
            self._stepped()
            return True
        self._begin_step()
        self._layout.drop_gradients()
        for bucket in self._layout.buckets:
            bucket.sit_out(average_of_active)
        try:
            self._finish_buckets()
            assert self._queue.count is not None, "something has come back"
            active = self._queue.count.active
        finally:
            self._end_step()
        self._layout.drop_gradients()
        if active > 0:
            self._clock.sat_out(self._ranks.set_id)
        return active > 0

    # -- phases

    @property
    def _collecting(self) -> bool:
        return self._phase in _UNDER_WAY

    @property
    def _is_sending(self) -> bool:
        return self._collecting or (self.outer is not None and self.outer.is_sending())

    def _begin_step(self) -> None:
        self.follow_world()
        self._ranks.require_open("averaging gradients")
        self._consolidated = {}
        self._is_provisional = self._links is None
        self._phase = Phase.COLLECTING
        self._layout.expect()
        self._queue.begin(self._layout.buckets)

    def _end_step(self) -> None:
        """Ends or gives up the step. Collectives that still run are not waited for, and keep their buckets' memory."""
        self._phase = Phase.DROPPED if self._phase is Phase.SPOILT else Phase.IDLE
        self._is_broken = False
        if self._kept is not None:
            self._kept.begin()
        self._queue.end()
        self._sparse.forget()
        self._layout.forget()
        if self._is_provisional and self._links is not None:
            self._plan_for_good()

    def _is_surplus(self) -> bool:
        """Whether other optimizers have already stepped with all backward passes that made these gradients.

        For example, a GAN's generator runs backward through the discriminator, and leaves unwanted gradients in it.
        """
        return bool(self._backwards) and self._backwards <= set(self._reducers.stepped_backwards)

    def _require_surplus(self, state: GradientState) -> None:
        if self._world is not None and self._world.is_closed:
            raise GradientError(
                f"the gradient of {state.name!r} was computed again, and an earlier one was still being averaged when "
                "hvd.shutdown() was called: call optimizer.zero_grad() after hvd.init(), before the first backward pass"
            )
        if not self._is_surplus():
            # The step must still be finished together with the other ranks, and is then dropped.
            self._phase = Phase.SPOILT
            self._layout.give_up()
            raise too_many_passes(state.name, self.backward_passes_per_step)

    def _discard(self) -> None:
        """Finishes the current step on all ranks, and drops its averages."""
        self._layout.give_up()
        try:
            self._complete(self._finish_dropped)
        finally:
            self._end_step()
            self._backwards.clear()

    def _finish_dropped(self) -> None:
        self._layout.give_up()
        for _ in self._queue.finish_all(self._connected()):
            pass
