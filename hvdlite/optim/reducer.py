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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor

from ..buckets.bucket import Bucket
from ..buckets.exchange import Links
from ..buckets.gradient_state import GradientState
from ..buckets.weights import WeightState
from ..control.reducer_registry import Progress
from ..errors import (
    GradientError,
    MismatchError,
)
from ..faults import point
from ..ops.base import compare
from ..ops.failures import raise_together
from ..outside_graphs import keep_outside_graphs
from ..steps.kept_gradients import KeptGradients
from ..steps.surviving_step import Buffers
from ..values import shown, whole_number
from .gradient_hooks import number_of_backward, too_many_passes
from .world_plan import Connection, WorldPlan


class Phase(enum.Enum):
    """The phase of a step."""

    IDLE = "no gradient of this step has arrived"
    COLLECTING = "gradients arrive, and full buckets are being averaged"
    SPOILT = "one backward pass too many has changed gradients that are being averaged: end the step and drop them"
    AVERAGED = "the averages are in the gradients, for the optimizer to use"
    DROPPED = "a spoilt step has ended: its gradients are invalid"
    DISCARDED = "a rank was lost, and all others have discarded the step: its gradients are zeros"


class _Pending(enum.Enum):
    """The complete gradients of a rank that are not synchronized."""

    NOTHING = 0
    SURPLUS = 1
    """Those that another optimizer's step has left; see `Reducer._is_surplus`."""
    DROPPED = 2
    """The same, which the program has dropped or replaced."""
    PARTLY_DROPPED = 3
    OWN = 4


class StepMark(NamedTuple):
    """What a step is besides its gradients, to begin it again or end it in another world."""

    phase: Phase
    # Autograd's numbers of its backward passes.
    backwards: frozenset[int]
    weights: WeightState


# Called with parameters whose averages have arrived.
Arrived = Callable[[list[Tensor]], None]

# The phases in which a step is in progress. A global, since it is read for every gradient.
_UNDER_WAY = (Phase.COLLECTING, Phase.SPOILT)


class Reducer(WorldPlan):
    """Averages the gradients of some parameters over the ranks of a group.

    All ranks must call `synchronize` equally often. Between two calls the ranks may differ in which parameters they
    use, and in the order of the gradients.

    With an exchange that runs after the step (Adasum), gradients are not averaged, only counted. Instead `stepping`
    combines what the ranks' steps have changed.

    A reducer outlives its world. After `hvd.shutdown()` and `hvd.init()`, the next gradient, step or `zero_grad`
    connects to the ranks of the new world, however many there are, and plans the buckets again.
    """

    def __init__(self, connect: Callable[[], Connection], backward_passes_per_step: int = 1) -> None:
        super().__init__(connect, backward_passes_per_step)
        self._phase = Phase.IDLE
        self.before_step: WeakMethod[Callable[[], None]] | None = None
        """A method that is called when a step begins, in the same place on all ranks, before anything is sent."""
        # Held while a hook handles a gradient. Reentrant, since the same thread may run another backward pass inside.
        self._lock = threading.RLock()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._lock = threading.RLock()
        self._phase = Phase.IDLE

    @property
    def scales_itself(self) -> bool:
        """Whether `agree_to_step` must see GradScaler's decision, even if that is not to step."""
        return self.steps_first or self.settings.outer is not None

    @property
    def steps_first(self) -> bool:
        """Whether each rank steps with its own gradients, and the changes are combined afterwards (Adasum)."""
        return self._deltas is not None

    # -- inside backward

    def weigh(self, n: int) -> float:
        """Adds n to this rank's weight in this step. Returns what the loss must be multiplied by; see `weights`."""
        if not self.is_in_step:
            self.follow_world()
        return self.weights.add(n)

    def _begin_backward(self, backward: int) -> None:
        super()._begin_backward(backward)
        self.weights.begin_backward()

    def _on_gradient(self, param: Tensor) -> None:
        # Autograd has one thread per device, so several may call this at once.
        with self._lock:
            # This runs for every parameter in every pass, so it does as little as possible.
            if self._is_closed:
                # The hooks are removed soon (see `abandon`), and no step will use this gradient.
                return
            if param.grad is None:
                # Autograd calls hooks also where a function's backward has returned None.
                return
            if self._deltas is not None:
                self._count_pass(param)
                return
            if self._phase not in _UNDER_WAY:
                point("begin")
                # This may replace the layout, if there is a new world.
                self._begin_step()
            backward = number_of_backward()
            if backward not in self._backwards:
                if self._is_dropped_surplus(param):
                    # It belongs to the step that begins now, and not to the one that all ranks drop.
                    grad, param.grad = param.grad, None
                    self._drop_surplus()
                    param.grad = grad
                    self._begin_step()
                self._begin_backward(backward)
            try:
                # There may be a new world, or other parameters.
                state = self._layout.states[id(param)]
            except KeyError:
                # It has left the optimizer.
                return
            if state.ready:
                raise self._is_added_to(state, backward)
            if param.grad is not state.held:
                # Autograd made a new gradient, so the user has dropped the sum of earlier passes.
                state.passes = 0
            last_pass = False
            if not self._only_accumulating:
                state.passes += 1
                last_pass = state.passes >= self.backward_passes_per_step
            if last_pass and self._surviving is not None:
                self._surviving.keep(state)
            # The ranks compare parameters that were added or have left in the step, before anything is sent.
            if state.home.take(state, last_pass) and self._links is not None and not self._uncompared:
                self._launch_full(self._links)
                point("backward")

    def _launch_full(self, links: Links) -> None:
        if self._surviving is None:
            self._queue.launch_full(links)
        else:
            self._surviving.launch_full(self._queue, links, self._number)

    def _count_pass(self, param: Tensor) -> None:
        """Counts a backward pass for a gradient that is not averaged (Adasum)."""
        if (backward := number_of_backward()) not in self._backwards:
            self._begin_backward(backward)
        if self._only_accumulating:
            return
        state = self._layout.states[id(param)]
        if param.grad is not state.held:
            state.passes, state.held = 0, param.grad
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
        if not self.is_in_step:
            self.follow_world()
        if self._deltas is None:
            self._require_not_closed()
            if self._phase not in (Phase.AVERAGED, Phase.DROPPED, Phase.DISCARDED):
                having = self._having()
                with self._clock.waiting():
                    self._complete(partial(self._synchronize, update, arrived))
                if self.is_discarded:
                    # Not None, which a GradScaler takes for a mistake of the program.
                    for param in having:
                        param.grad = torch.zeros_like(param)

    def _having(self) -> list[Tensor]:
        """Returns the parameters that have a gradient, if the step may be discarded."""
        if self._surviving is None or self._surviving.kept is not None:
            return []
        return [state.param for state in self._layout.states.values() if state.param.grad is not None]

    def _complete(self, finish: Callable[[], None]) -> None:
        """Calls ``finish``, which ends the step with all ranks; where one is lost, again with those that are left.

        A rank returns only once all ranks have the averages: see `runtime.survival`.
        """
        if self._surviving is None:
            finish()
        else:
            self._surviving.require_no_capture()
            if self._phase is Phase.IDLE:
                self._begin_step()
            self._surviving.complete(self, finish, self._taken_number(), self._trace.optimizer)
        point("voted")

    def _taken_number(self) -> int:
        if self._opening is None:
            self.take_number()
        assert self._number is not None, "it has just been taken"
        return self._number

    # -- what `SurvivingSteps` needs of a step

    @property
    def is_left_behind(self) -> bool:
        return self.is_in_step and self._world is not None and self._world.is_closed

    def gradient_states(self) -> Mapping[int, GradientState]:
        return self._layout.states

    def buffers(self) -> Buffers:
        return self._layout.buffers()

    def mark(self) -> StepMark:
        return StepMark(self._phase, frozenset(self._backwards), self.weights.state)

    def begin_again(self, mark: StepMark, kept: KeptGradients, buffers: Buffers) -> None:
        self.follow_world(buffers)
        self._backwards |= mark.backwards
        self.weights.state = mark.weights
        self._begin_step()
        kept.put_back(self._layout.states.values())
        self._phase = mark.phase
        if mark.phase is Phase.SPOILT:
            self._layout.give_up()

    def go_on_from(self, mark: StepMark, buffers: Buffers) -> None:
        self.follow_world(buffers)
        self._backwards |= mark.backwards
        self._phase, self.weights.state = mark.phase, mark.weights

    def discard(self, mark: StepMark) -> None:
        self.follow_world()
        if self.is_in_step:
            self._end_step()
        self._phase = Phase.DROPPED if mark.phase is Phase.SPOILT else Phase.DISCARDED
        self._backwards |= mark.backwards
        self.weights.state = mark.weights
        self.weights.end_step()

    # -- the end of a step

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
            self.weights.end_step()
        if self._phase is Phase.IDLE:
            self._phase = Phase.AVERAGED

    def _finish_buckets(self, update: Arrived | None = None, arrived: Arrived | None = None) -> None:
        links = self.connected()
        point("synchronize")
        failure: Exception | None = None
        for bucket in self._queue.finish_all(links):
            assert self._queue.count is not None, "it comes with the first bucket"
            try:
                bucket.correct(self._queue.count, links.all.describe_rank)
            except MismatchError as error:
                failure = error
            if self.weights.correction != 1.0:
                bucket.memory.gradients.mul_(self.weights.correction)
            # What may get a further round is not averaged yet.
            pending = [*self._sparse.settle(bucket), *bucket.frozen]
            if bucket.home is not bucket or self._queue.is_dropped_by_some:
                continue
            if update is not None and failure is None and self._queue.failure is None:
                failure = self._update(bucket, pending, update)
            elif arrived is not None:
                arrived([state.param for state in bucket.states if state not in pending])
        self._require_alike()
        if self.exchange.tells_failures:
            raise_together(links.all, self._queue.failure, f"the averaging of gradients ({self._trace.optimizer})")
        self._sparse.average(links.all, self._trace.optimizer, self._queue.count)
        if self._inner.size == 1 and not self._layout.buckets:
            self.weights.read_alone()
        if self.weights.correction != 1.0:
            self._layout.correct(self.weights.correction)
        if failure is not None:
            raise failure
        if update is not None:
            self._update_frozen(update)
        point("vote")

    def _update(self, bucket: Bucket, pending: Sequence[GradientState], update: Arrived) -> Exception | None:
        """Calls ``update`` with a bucket's parameters but those ``pending``, and drops their gradients.

        Returns an error instead of raising it: the other ranks wait for the other buckets.
        """
        try:
            with self._clock.stepping():
                update([state.param for state in bucket.states if state not in pending])
        except Exception as error:  # noqa: BLE001 - raised once all buckets are sent
            return error
        bucket.drop(pending)
        return None

    def _update_frozen(self, update: Arrived) -> None:
        """Calls ``update`` with those parameters, frozen on all ranks before, that have gradients in this step."""
        frozen = [state.param for bucket in self._layout.buckets for state in bucket.frozen]
        if late := [param for param in frozen if param.grad is not None]:
            with self._clock.stepping():
                update(late)
            for param in late:
                param.grad = None

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
        waits for them and drops them, as it drops those of a world that has been shut down. Gradients that have not had
        all their backward passes stay, and count their passes anew.
        """
        self.follow_world()
        pending = self._pending()
        if pending is _Pending.OWN:
            raise self._is_pending(action, way_out)
        self._leave_step(drops=pending is not _Pending.NOTHING)

    def settle(self, action: str, way_out: str) -> None:
        """Does as `require_nothing_pending` for an action that leaves gradients where they are.

        Every rank must call it, and it waits for all. Where there are surplus gradients, all ranks average them. They
        may then add to these averages, and the step that follows averages the sums. Raises GradientError on all ranks
        if one has others pending.
        """
        self.follow_world()
        own = self._pending()
        everyone = compare(self._ranks, own.value, "looking for gradients that are being averaged")
        found = [own] if everyone is None else [_Pending(value) for value in everyone]
        if own is _Pending.OWN:
            raise self._is_pending(action, way_out)
        if _Pending.OWN in found:
            rank = self._ranks.describe_rank(found.index(_Pending.OWN))
            raise GradientError(f"{action} while gradients of {rank} are being averaged: {way_out} on every rank")
        if _Pending.PARTLY_DROPPED in found or {_Pending.SURPLUS, _Pending.DROPPED} <= set(found):
            raise GradientError(
                f"{action} after some gradients of {self._trace.optimizer} that another optimizer's backward pass had "
                "left there were dropped, and others not: call zero_grad() on every rank before"
            )
        if _Pending.SURPLUS in found:
            self.synchronize()
            # Some ranks may run another pass before the step, and others not: all come to it alike.
            self.forget_averages()
        else:
            if _Pending.DROPPED in found and not self.is_in_step:
                self._begin_step()
            self._leave_step(drops=_Pending.DROPPED in found)

    def _pending(self) -> _Pending:
        ready = self._ready() if self.is_in_step else []
        if not ready:
            return _Pending.NOTHING
        if not self._is_surplus(self._backwards):
            return _Pending.OWN
        kept = _kept(ready)
        if not kept:
            return _Pending.DROPPED
        return _Pending.SURPLUS if len(kept) == len(ready) else _Pending.PARTLY_DROPPED

    def _ready(self) -> list[GradientState]:
        return [state for state in self._layout.states.values() if state.ready]

    def _is_pending(self, action: str, way_out: str) -> GradientError:
        name = next(state.name for state in self._layout.states.values() if state.ready)
        return GradientError(f"{action} while gradients are being averaged (the first: {name!r}): {way_out}")

    def _leave_step(self, *, drops: bool) -> None:
        """Ends a step that has no complete gradients, or of which all ranks drop them."""
        if self.is_in_step:
            weights = self.weights.state
            if drops:
                self._discard()
            self._end_step()
            if not drops:
                # The next step averages them, so their numbers of samples count in it.
                self.weights.state = weights
        elif self._deltas is not None:
            self._layout.forget()
        self._backwards.clear()
        self._phase = Phase.IDLE

    def drop_passes(self) -> None:
        """Forgets backward passes whose gradients the user drops, once nothing is pending."""
        self.weights.drop()

    @property
    def is_discarded(self) -> bool:
        """Whether a rank was lost in this step, and no rank uses it. The gradients are zeros then."""
        return self._phase is Phase.DISCARDED

    @property
    def has_passes(self) -> bool:
        """Whether gradients of backward passes outside of `only_accumulating` are not averaged yet."""
        return self.is_in_step and any(state.passes or state.ready for state in self._layout.states.values())

    def note_used_passes(self) -> None:
        """Tells other optimizers that this one has used the step's backward passes: what they have left is surplus."""
        known = set(self._reducers.stepped_backwards)
        self._reducers.stepped_backwards.extend(self._backwards - known)

    def forget_averages(self) -> None:
        """Begins the next step, where the averages of the last are there and the program has not used them."""
        if self._phase in (Phase.AVERAGED, Phase.DISCARDED):
            self._phase = Phase.IDLE
            self._backwards.clear()

    @property
    def has_arrivals(self) -> bool:
        """Whether some gradient is complete and not synchronized yet."""
        return self.is_in_step and any(state.ready for state in self._layout.states.values())

    def passes_of(self) -> dict[Tensor, int]:
        """Returns the number of backward passes in this step of each parameter that has had one."""
        return {state.param: state.passes for state in self._layout.states.values() if state.passes}

    def progress(self) -> Progress:
        # Read while other threads may change it: a report may be a gradient late.
        waiting = self._queue.not_sent()
        missing = () if not waiting else tuple(waiting[0].missing_names())
        buckets = sum(not bucket.asleep for bucket in self._layout.buckets)
        phase = self._phase.value
        if self._phase is Phase.IDLE:
            # Those of the step before have all been sent.
            return Progress(self._trace.optimizer, self._trace.step, phase, buckets, 0, ())
        return Progress(self._trace.optimizer, self._trace.step, phase, buckets, buckets - len(waiting), missing)

    # -- checkpoints

    def load_exchange_state(self, state: Mapping[str, Any], scale: float | None, reference: float) -> None:
        """Loads what `exchange_state` returned, or an empty dict; see `ExchangeState.load`."""
        specs = [each.piece.spec for each in self._layout.states.values()]
        numels = {each.name: each.numel * (1 + each.dtype.is_complex) for each in specs}
        self.exchange_state.load(state, scale, reference, numels)

    def consolidate(self, to: int) -> None:
        """Makes the state on global rank ``to`` that of all ranks, until the next step. It waits for all."""
        self.settle("optimizer.consolidate_state_dict() was called", "call step() first")
        links, group = self.connected(), self.connect()
        named = whole_number(to)
        if named not in group.ranks:
            ranks = ", ".join(map(str, group.ranks))
            raise ValueError(f"consolidate_state_dict: to={shown(to)} is not one of the optimizer's ranks: {ranks}")
        is_asked = group.ranks[group.rank] == named
        self.exchange_state.consolidate([bucket.plan for bucket in self._layout.buckets], links, keeps=is_asked)
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
        if not self.is_in_step:
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
                self.connected()
                with self.outer.stepping():
                    yield
            else:
                yield
        self._stepped()

    def _stepped(self) -> None:
        """Records that the optimizer has used the gradients."""
        self.note_used_passes()
        if self._deltas is not None:
            # Passes of a closure, which came after `agree_to_step`.
            self._layout.forget()
        self._backwards.clear()
        if self._phase in (Phase.AVERAGED, Phase.DROPPED, Phase.DISCARDED):
            self._phase = Phase.IDLE
        self._trace.stepped()
        self._reducers.steps[self._trace.optimizer] = self._trace.step
        if self.size > 1:
            self._clock.stepped(self._ranks.set_id)
        point("stepped")

    def why_no_join(self) -> str:
        if self.outer is None:
            return ""
        return (
            f"hvd.join() does not work with outer={self.settings.outer!r}: hosts take outer steps together, and "
            "one that has joined would not come to them. Give every rank as many batches, for example with "
            "drop_last=True in its sampler"
        )

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in one step of the other ranks without gradients, for `join`. Returns False if all ranks sat out.

        If some gradients are complete already, they are averaged in that step. Otherwise no parameter has a gradient
        afterwards. With Adasum the parameters change as on the other ranks.
        """
        if why := self.why_no_join():
            raise GradientError(why)
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
    def is_in_step(self) -> bool:
        return self._phase in _UNDER_WAY

    @property
    def _is_sending(self) -> bool:
        return self.is_in_step or (self.outer is not None and self.outer.is_sending())

    def _leave_world(self, *, goes_on: bool) -> None:
        if self.is_in_step:
            if self._surviving is not None:
                self._surviving.take_back()
            self._end_step()
            goes_on = False
        if not goes_on:
            self._phase = Phase.IDLE
            self._backwards.clear()
        if self._spoilt_by is not None:
            # It was a collective of the old world that never ended.
            self._spoilt_by, self._is_closed = None, False

    def _begin_step(self) -> None:
        if self.before_step is not None and (follow_groups := self.before_step()) is not None:
            follow_groups()
        self.follow_world()
        self._ranks.require_open("averaging gradients")
        self.exchange_state.begin_step(self.weights.state.reference, self.weights.of_step)
        if self._surviving is not None:
            self._surviving.begin()
        elif self._reducers.has_several and self._stateful_exchange is not None:
            # Its gradients may turn out to be surplus.
            self._stateful_exchange.begin_step()
        self._is_provisional = self._links is None
        self._phase = Phase.COLLECTING
        self._layout.expect()
        # Without another optimizer no gradients are surplus.
        self._queue.begin(self._layout.buckets, holds_last=self._reducers.has_several)

    def _end_step(self) -> None:
        """Ends or gives up the step. Collectives that still run are not waited for, and keep their buckets' memory."""
        self._phase = Phase.DROPPED if self._phase is Phase.SPOILT else Phase.IDLE
        if self._surviving is not None:
            self._surviving.end()
        elif self._stateful_exchange is not None:
            self._stateful_exchange.end_step()
        self._queue.end()
        self.weights.drop()
        self._sparse.forget()
        self._layout.forget()
        if self._is_provisional and self._links is not None:
            self._plan_for_good()

    def _is_surplus(self, backwards: Set[int]) -> bool:
        """Whether other optimizers have already stepped with all of these backward passes.

        For example, a GAN's generator runs backward through the discriminator, and leaves unwanted gradients in it.
        """
        return bool(backwards) and backwards <= set(self._reducers.stepped_backwards)

    def _is_dropped_surplus(self, param: Tensor) -> bool:
        """Whether a new backward pass finds surplus gradients, which the user has dropped or replaced.

        ``param`` is the one with the pass's first gradient, to which it must not have been added. Raises GradientError
        if the user has dropped some of them and not all: those that are left may be averages by now.
        """
        if not self._backwards or not (self._is_surplus(self._backwards) or self._is_replaced):
            return False
        ready = self._ready()
        kept = _kept(ready)
        own = self._layout.states.get(id(param))
        if len(kept) == len(ready) or own in kept:
            return False
        if kept and not self._is_replaced:
            self._spoil()
            raise GradientError(
                "a backward pass came after some of the gradients that another optimizer's backward pass had left in "
                f"{self._trace.optimizer} were dropped or replaced, and others not (the first: {kept[0].name!r}): call "
                "zero_grad() of this optimizer before the pass, on every rank"
            )
        return True

    @property
    def _is_replaced(self) -> bool:
        """Whether another optimizer has gone on in a new world since the step began."""
        return self._surviving is not None and self.is_left_behind

    def _drop_surplus(self) -> None:
        """Ends a step of surplus gradients."""
        if self._is_replaced:
            # No rank sends in the new world what all drop.
            self.follow_world()
        elif self._world is None or not self._world.is_closed:
            self._discard()

    def _is_added_to(self, state: GradientState, backward: int) -> GradientError:
        """Gives up the step, and returns the error: a pass has added to a complete gradient, which may be sent."""
        if self._world is not None and self._world.is_closed and not self._is_replaced:
            return GradientError(
                f"the gradient of {state.name!r} was computed again, and an earlier one was still being averaged when "
                "hvd.shutdown() was called: call optimizer.zero_grad() after hvd.init(), before the first backward pass"
            )
        # This pass makes no gradients that a step will use.
        self._backwards.discard(backward)
        is_surplus = self._is_surplus(self._backwards) or self._is_replaced
        self._spoil()
        if not is_surplus:
            return too_many_passes(state.name, self.backward_passes_per_step)
        # The sum would depend on how far the average was.
        return GradientError(
            f"the gradient of {state.name!r} was added to gradients that another optimizer's backward pass has left "
            "there, as a GAN's generator does in its discriminator: call zero_grad() of this optimizer or model before "
            "its backward pass, or freeze its parameters during the other one"
        )

    def _spoil(self) -> None:
        """Gives up the step's averages. It must still be finished together with the other ranks."""
        self._phase = Phase.SPOILT
        self._layout.give_up()

    def _discard(self) -> None:
        """Finishes the current step on all ranks, and drops its averages."""
        self._layout.give_up()
        # Gradients that the program has set, or the next pass computes, belong to the next step. So do averages of the
        # last one, which lie in the bucket that is sent.
        stay = [
            (state.param, state.param.grad.clone() if state.param.grad is state.view else state.param.grad)
            for state in self._layout.states.values()
            if not state.ready and state.param.grad is not None
        ]
        for param, _ in stay:
            param.grad = None
        try:
            if self._surviving is None:
                self._finish_dropped()
                if self._stateful_exchange is not None:
                    # Nor does the exchange keep a part of what is dropped.
                    self._stateful_exchange.take_step_back()
            else:
                self._surviving.drop(self._finish_dropped, self._taken_number())
        finally:
            self._end_step()
            self._backwards.clear()
            for param, grad in stay:
                param.grad = grad

    def _finish_dropped(self) -> None:
        self._layout.drop_averages()
        for _ in self._queue.finish_all(self.connected()):
            pass
        self._require_alike()

    def _require_alike(self) -> None:
        """Raises GradientError, on all ranks, if some have dropped gradients which others averaged with their own."""
        if not self._queue.is_dropped_by_some:
            return
        self._phase = Phase.SPOILT
        raise GradientError(
            f"some ranks have dropped gradients of {self._trace.optimizer} that another optimizer's backward pass had "
            "left there, as a GAN's generator does in its discriminator, and others had none to drop: gradients of "
            "different steps were averaged. Such a pass must reach this optimizer's parameters on all ranks or on "
            "none: freeze them during it, by requires_grad_(False), and call zero_grad() on every rank to go on"
        )


def _kept(ready: Sequence[GradientState]) -> list[GradientState]:
    """Returns those whose gradient is still in ``param.grad``: the program has neither dropped nor replaced it."""
    return [state for state in ready if state.param.grad is state.held]


keep_outside_graphs(globals())
