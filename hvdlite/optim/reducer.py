"""
`Reducer`: takes an optimizer's gradients as backward makes them, and leaves their averages for the step.

    hook(param) ── slice of a bucket ── full buckets, in plan order: exchange.begin ──┐      inside backward
    step        ── the rest ── wait, in plan order ── exchange.finish ── param.grad ──┘      inside synchronize
                └─ gradients of other ranks ── sleeping buckets that some rank needs ── sparse gradients

A gradient lives in a *slice* of a *bucket*. A parameter has *arrived* when its gradient is complete for this step, that
is after `backward_passes_per_step` backward passes. The `Reducer` owns the buckets, their order, and what is in flight;
what happens to a bucket between the ranks is its `exchange`. Whether a user's calls come in an order that loses nothing
is checked here, since only here is known what is under way.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.group import Group
from ..control.generation import Generation
from ..errors import GradientError, NotInitializedError
from ..ops.failures import raise_together
from .exchange import Links
from .exchanges import exchange_of
from .flags import RankAndSize
from .gradient_hooks import GradientHooks, number_of_backward, too_many_passes
from .in_flight import BucketQueue
from .layout import Layout
from .settings import Settings
from .slot import Slot
from .sparse_gather import SparseParameters
from .step_deltas import StepDeltas


class Phase(enum.Enum):
    """How far a step is."""

    IDLE = "no gradient of this step has come"
    COLLECTING = "gradients come, and full buckets travel"
    SPOILT = "a backward pass too many has added to gradients that travel: the step is to be ended, and dropped"
    AVERAGED = "the averages are in the gradients, for the optimizer to use"
    DROPPED = "a spoilt step has ended: its gradients are good for nothing"


@dataclass(frozen=True, slots=True)
class Connection:
    """The ranks that gradients are averaged over, and how, for as long as the group of the world is open.

    ``check_parameters`` is as of `parameter_check.ParameterCheck`; ``world`` is None where there is none.
    """

    group: Group
    generation: Generation
    settings: Settings
    check_parameters: bool | int = False
    world: Group | None = None


# Looked at once for each gradient.
_UNDER_WAY = (Phase.COLLECTING, Phase.SPOILT)


class Reducer(GradientHooks):
    """Averages the gradients of some parameters over the ranks of a group, or combines what steps with them change.

    Knows neither optimizer nor world. `synchronize` must be called by all ranks equally often; everything
    between two of those calls may differ by rank, the parameters used and the order of their gradients
    included.

    With an exchange that comes after the step (Adasum), gradients stay each rank's own: they are only counted, and
    `stepping` combines what the step has changed.

    It outlives its world. Where that has been left and there is another, the next gradient, step or `zero_grad` finds
    the ranks of the new one, be they more or fewer, and plans anew.
    """

    def __init__(self, connect: Callable[[], Connection], backward_passes_per_step: int = 1) -> None:
        """``connect`` finds the ranks in the world of the time; a NotInitializedError where there is none."""
        connection = connect()
        super().__init__(connection.group, connection.generation, backward_passes_per_step, connection.check_parameters)
        self._connect = connect
        # What has been taken in: the parameters by name, and which of them are to share a bucket.
        self._added: list[tuple[dict[str, Tensor], list[list[str]]]] = []
        self._plan(connection)
        self._phase = Phase.IDLE
        # Held while a gradient is taken; again by the same thread, where that needs a backward pass of its own.
        self._lock = threading.RLock()

    # -- the plan

    def _plan(self, connection: Connection) -> None:
        """Take up the settings, for the ranks that have been joined; nothing has been taken in."""
        settings, group = connection.settings, connection.group
        self.settings = settings
        self.exchange = exchange_of(settings, group.size)
        self._world = connection.world
        self._links: Links | None = None
        self._layout = Layout(
            ranks=RankAndSize(group.rank, group.size),
            cap_bytes=settings.cap_bytes,
            scale_of=lambda dtype: self.exchange.scale_before(dtype, group.size),
            densify=settings.sparse_as_dense,
            memory=self._take_memory,
            stays=self.exchange.after_step or settings.leaves_gradients(group.size),
            aligned=self.exchange.aligned,
        )
        self._queue = BucketQueue(self.exchange, self._tracks, self._check, group.size)
        self._sparse = SparseParameters(settings, self._layout, group.size)
        self._deltas: StepDeltas | None = None
        if self.exchange.after_step:
            self._deltas = StepDeltas(self.exchange, self._tracks, self._check, self._connected, group.size)

    def _follow_world(self) -> None:
        """Join the ranks of the world that there is now, where the one of before has been left. Waits for nobody.

        What was under way there is dropped; an exchange's own state comes along.
        """
        if self._world is None or not self._world.is_closed:
            return
        try:
            connection = self._connect()
        except NotInitializedError:
            # Who communicates is told that the group has been left.
            return
        if self._collecting:
            self._end_step()
        self._phase = Phase.IDLE
        if self._spoilt_by is not None:
            # By what was under way in the other world.
            self._spoilt_by, self._is_closed = None, False
        self._backwards.clear()
        exchanged = self.exchange.state_dict()
        self._join(connection.group, connection.generation, connection.check_parameters)
        # Autotune's cap stays.
        self._plan(replace(connection, settings=replace(connection.settings, cap_bytes=self.settings.cap_bytes)))
        if exchanged:
            self.exchange.load_state_dict(exchanged)
        for params, groups in self._added:
            self._take_in(params, groups)

    @property
    def steps_first(self) -> bool:
        """Whether each rank steps with its own gradients, and what that changes is combined after it."""
        return self._deltas is not None

    def set_cap(self, cap_bytes: int) -> None:
        """Plan with another cap whatever is taken in from now on. On every rank."""
        self.settings = replace(self.settings, cap_bytes=cap_bytes)
        self._layout.cap_bytes = cap_bytes

    def add_params(self, named_params: Iterable[tuple[str, Tensor]], groups: Iterable[Iterable[str]] = ()) -> None:
        """Take in parameters: plan their buckets, after those there are, and hook their gradients."""
        self._follow_world()
        params, named_groups = dict(named_params), [list(group) for group in groups]
        self._added.append((params, named_groups))
        self._take_in(params, named_groups)
        self._hear(list(params.values()), self._on_gradient)

    def _take_in(self, params: dict[str, Tensor], groups: list[list[str]]) -> None:
        description, plans = self._layout.add(params, groups)
        if self._deltas is not None:
            self._deltas.add(plans, params)
        self._compare_later(params, description)

    def meet(self) -> Group:
        """The channel to the other ranks, those of the world that there is now; see `GradientHooks.meet`."""
        self._follow_world()
        return super().meet()

    def _take_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Of the engine that will carry it: where that is shared memory, gradients are summed where they lie.
        return self.meet().zeros(numel, dtype, device)

    def _open(self) -> Group:
        group = super()._open()
        if self._links is None:
            self._links = Links(group, by_host=self.exchange.by_host)
        return group

    def _connected(self) -> Links:
        """The links to the other ranks; the first call opens them, see `meet`."""
        self.meet()
        assert self._links is not None, "they have met"
        return self._links

    # -- inside backward

    def _on_gradient(self, param: Tensor) -> None:
        # Autograd has a thread for each device, and gradients of several may come at once.
        with self._lock:
            # Once for each parameter in each pass: what is the same for all of them is elsewhere.
            if self._is_closed:
                # Its hooks go soon, and nobody will step with what they would begin.
                return
            if self._deltas is not None:
                self._count_pass(param)
                return
            if self._phase not in _UNDER_WAY:
                # In another world, that plans anew.
                self._begin_step()
            slot = self._layout.slots[id(param)]
            if slot.arrived:
                self._require_surplus(slot)
                self._discard()
                self._begin_step()
            backward = number_of_backward()
            if backward not in self._backwards:
                self._backwards.add(backward)
            if param.grad is not slot.view:
                # A gradient that was None before: what earlier passes left in it, the user has thrown away.
                slot.passes = 0
            last_pass = False
            if not self._only_accumulating:
                slot.passes += 1
                last_pass = slot.passes >= self.backward_passes_per_step
            if slot.home.take(slot, last_pass):
                assert self._links is not None, "they have met when the step began"
                self._queue.launch_full(self._links)

    def _count_pass(self, param: Tensor) -> None:
        """A gradient that stays this rank's own has been added to."""
        self._backwards.add(number_of_backward())
        if self._only_accumulating:
            return
        slot = self._layout.slots[id(param)]
        slot.passes += 1
        if slot.passes > self.backward_passes_per_step:
            raise too_many_passes(slot.name, self.backward_passes_per_step)

    # -- between backward and step

    def synchronize(self, update: Callable[[list[Tensor]], None] | None = None) -> None:
        """Wait for all ranks; leave the averages in the gradients. Nothing if that has been done already.

        ``update`` is called with some parameters as soon as their averages are there, while others travel; then these
        gradients become None. It is not told of those that are gathered, nor of any at a rank that is alone.

        A parameter that no rank used keeps ``grad = None``; one that some ranks used is averaged over all
        of them, the others counting as zero. After a backward pass too many it waits as well, and what is in the
        gradients then is good for nothing: see `require_sound`.
        """
        if not self._collecting:
            self._follow_world()
        if self._deltas is None:
            self._require_not_closed()
            self._synchronize(update)

    def _synchronize(self, update: Callable[[list[Tensor]], None] | None) -> None:
        if self._phase in (Phase.AVERAGED, Phase.DROPPED):
            return
        if self._phase is Phase.IDLE:
            self._begin_step()
        # Not at the end of backward, which would be too early: ranks that did not use every parameter launch
        # the rest only here, and may wait for each other in other collectives before.
        try:
            with self._tracks.synchronizing():
                if self._phase is Phase.SPOILT:
                    self._bring_home(None)
                else:
                    self._layout.require_same()
                    self._bring_home(update)
        finally:
            self._end_step()
        if self._phase is Phase.IDLE:
            self._phase = Phase.AVERAGED

    def _bring_home(self, update: Callable[[list[Tensor]], None] | None) -> None:
        links = self._connected()
        failure: Exception | None = None
        for bucket in self._queue.finish_all(links):
            gathered = self._sparse.settle(bucket)
            if update is not None and failure is None and self._queue.failure is None:
                try:
                    update([slot.param for slot in bucket.slots if slot not in gathered])
                except Exception as error:  # noqa: BLE001 - raised below
                    # The other ranks wait for the rest, and the next step is to begin where theirs does.
                    failure = error
                else:
                    bucket.drop(gathered)
        if self.exchange.tells_failures:
            raise_together(links.all, self._queue.failure, f"the averaging of gradients ({self._tracks.optimizer})")
        self._sparse.average(links.all, self._tracks.optimizer, self._queue.count)
        if failure is not None:
            raise failure

    def drop_gradients(self) -> None:
        """Leave no parameter a gradient, and give the memory of the buckets back, until the next one comes."""
        self._layout.drop_gradients()
        for bucket in self._layout.buckets:
            bucket.drop(())

    def require_sound(self) -> None:
        """Raise a GradientError if a backward pass too many has spoilt the gradients, and they were not dropped."""
        if self._phase in (Phase.SPOILT, Phase.DROPPED):
            raise GradientError(
                "step() was called after gradients were computed more than backward_passes_per_step times, which has "
                "spoilt them: after that error, call optimizer.synchronize() and optimizer.zero_grad() on every rank "
                "to drop them"
            )

    def require_nothing_pending(self, action: str, way_out: str) -> None:
        """Raise a GradientError if gradients that nobody has waited for would be lost by this action.

        Unless they are surplus (see `_is_surplus`): then wait, and drop them. A half accumulation is dropped, and so
        is what was under way in a world that has been left.
        """
        self._follow_world()
        if self._collecting:
            arrived = next((slot for slot in self._layout.slots.values() if slot.arrived), None)
            if arrived is not None:
                if not self._is_surplus():
                    raise GradientError(
                        f"{action} while gradients are on their way between the ranks (the first: "
                        f"{arrived.name!r}): {way_out}"
                    )
                self._discard()
            self._end_step()
        elif self._deltas is not None:
            self._layout.forget()
        self._backwards.clear()
        self._phase = Phase.IDLE

    @property
    def has_arrivals(self) -> bool:
        """Whether some gradient is complete and has not been synchronized."""
        return self._collecting and any(slot.arrived for slot in self._layout.slots.values())

    def passes_of(self) -> dict[Tensor, int]:
        """The backward passes that have added to each gradient of this step, where there were any."""
        return {slot.param: slot.passes for slot in self._layout.slots.values() if slot.passes}

    # -- the step

    def agree_to_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        """Whether to step. Where the step comes first the ranks agree, since each sees its own gradients alone.

        With GradScaler's scale they are divided by it, unless some rank has found one that is not finite: then none
        steps. Every rank must call it before `stepping`, with None where there is no GradScaler.
        """
        if not self._collecting:
            self._follow_world()
        if self._deltas is None:
            return True
        self._require_not_closed()
        self._layout.forget()
        return self._deltas.agree_to_step(grad_scale, found_inf)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the optimizer use the gradients inside."""
        if self._deltas is None:
            yield
        else:
            with self._deltas.stepping():
                yield
        self._stepped()

    def _stepped(self) -> None:
        """The optimizer has used the gradients."""
        if self._deltas is None:
            self._reducers.stepped_backwards.extend(self._backwards)
        self._backwards.clear()
        if self._phase in (Phase.AVERAGED, Phase.DROPPED):
            self._phase = Phase.IDLE
        self._tracks.stepped()

    def sit_out(self, average_of_active: bool) -> bool:
        """Take part in one step of the other ranks with nothing to give; False if they all sat out as well.

        Gradients that are complete already go with that step. For `join`; afterwards no parameter has a gradient. Where
        the step comes first, the parameters become what theirs become.
        """
        if self._deltas is not None:
            return self._deltas.sit_out()
        if self.has_arrivals:
            # Also where it has been closed since: other ranks are in that step.
            self._synchronize(None)
            self._stepped()
            return True
        self._begin_step()
        self._layout.drop_gradients()
        for bucket in self._layout.buckets:
            bucket.sit_out(average_of_active)
        try:
            self._bring_home(None)
            assert self._queue.count is not None, "something has come back"
            active = self._queue.count.active
        finally:
            self._end_step()
        self._layout.drop_gradients()
        return active > 0

    # -- phases

    @property
    def _collecting(self) -> bool:
        return self._phase in _UNDER_WAY

    def _begin_step(self) -> None:
        self.meet().require_open("averaging gradients")
        self._phase = Phase.COLLECTING
        self._layout.expect()
        self._queue.begin(self._layout.buckets)

    def _end_step(self) -> None:
        """The step is over, or is given up: nobody waits for what is still under way, and it writes where it lies."""
        self._phase = Phase.DROPPED if self._phase is Phase.SPOILT else Phase.IDLE
        self._queue.end()
        self._sparse.forget()
        self._layout.forget()

    def _is_surplus(self) -> bool:
        """Whether another optimizer has stepped with every backward pass that these gradients come from.

        So it is with a GAN's discriminator after the generator's step: the generator's backward passes
        through it and leaves gradients that nobody asked for.
        """
        return bool(self._backwards) and self._backwards <= set(self._reducers.stepped_backwards)

    def _require_surplus(self, slot: Slot) -> None:
        if self._world is not None and self._world.is_closed:
            raise GradientError(
                f"the gradient of {slot.name!r} was computed again while an earlier one was on its way between ranks "
                "that have been left since, by hvd.shutdown(): call optimizer.zero_grad() after hvd.init(), before the "
                "first backward pass"
            )
        if not self._is_surplus():
            # So that the step can still be taken to its end with the other ranks, and dropped.
            self._phase = Phase.SPOILT
            self._layout.give_up()
            raise too_many_passes(slot.name, self.backward_passes_per_step)

    def _discard(self) -> None:
        """Let what is under way come to its end on all ranks, and begin anew."""
        self._layout.give_up()
        try:
            for _ in self._queue.finish_all(self._connected()):
                pass
        finally:
            self._end_step()
            self._backwards.clear()
