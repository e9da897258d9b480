"""
Gradients in, averaged gradients out.

    hook(param) ── slice of a bucket ── compress ── all-reduce ──┐      inside backward
    step        ── wait, in plan order ── decompress ── param.grad      inside synchronize

A gradient lives in a *slice* of a *bucket*; a full bucket becomes a *wire*, and the sum of all ranks'
wires, scaled, is the *average*. A parameter has *arrived* when its gradient is complete for this step,
that is after `backward_passes_per_step` backward passes.

What lies where is decided in `plan` and kept in `layout`; how buckets travel is in `in_flight`, and what happens to one
on its way in `wire`; sparse gradients take the way of `sparse`. Whether a user's calls come in an order that loses
nothing is checked here, since only here is known what is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..comm.group import Group
from ..compression.casts import Compression
from ..errors import GradientError
from .flags import Ranks
from .gradient_hooks import GradientHooks, number_of_backward, too_many_passes
from .in_flight import BucketsInFlight
from .layout import Layout
from .slot import Slot
from .wire import Settings


class Reducer(GradientHooks):
    """Averages the gradients of some parameters over the ranks of a group.

    Knows neither optimizer nor world. `synchronize` must be called by all ranks equally often; everything
    between two of those calls may differ by rank, the parameters used and the order of their gradients
    included.
    """

    def __init__(
        self,
        group: Group,
        settings: Settings,
        backward_passes_per_step: int = 1,
        *,
        check_parameters: bool | int = False,
    ) -> None:
        """``check_parameters`` is as of `sameness.ParameterCheck`."""
        super().__init__(group, settings, backward_passes_per_step, check_parameters)
        self._layout = Layout(
            ranks=Ranks(group.rank, group.size),
            cap_bytes=settings.cap_bytes,
            scale_of=lambda dtype: settings.scaling(dtype, group.size).before,
            densify=settings.sparse_as_dense,
            memory=self._take_memory,
            stays=group.size == 1 and settings.compression is Compression.none,
            aligned=not settings.packs,
        )
        self._in_flight = BucketsInFlight(self._layout, settings, self._tracks, self._check, alone=group.size == 1)
        self._synchronized = False
        # Whether a backward pass too many has added to gradients that were on their way.
        self._is_spoilt = False
        # Held while a gradient is taken; again by the same thread, where that needs a backward pass of its own.
        self._lock = threading.RLock()

    # -- the plan

    def set_cap(self, cap_bytes: int) -> None:
        """Plan with another cap whatever is taken in from now on. On every rank."""
        self.settings = replace(self.settings, cap_bytes=cap_bytes)
        self._layout.cap_bytes = cap_bytes

    def add_params(self, named_params: Iterable[tuple[str, Tensor]], groups: Iterable[Iterable[str]] = ()) -> None:
        """Take in parameters: plan their buckets, after those there are, and hook their gradients."""
        params = dict(named_params)
        self._hear(params, self._layout.add(params, groups))

    def _take_memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Of the engine that will carry it: where that is shared memory, gradients are summed where they lie.
        return self.meet().zeros(numel, dtype, device)

    # -- inside backward

    def _on_gradient(self, param: Tensor) -> None:
        # Autograd has a thread for each device, and gradients of several may come at once.
        with self._lock:
            # Once for each parameter in each pass: what is the same for all of them is elsewhere.
            if self._is_closed:
                # Its hooks go soon, and nobody will step with what they would begin.
                return
            slot = self._layout.slots[id(param)]
            if not self._collecting:
                self._begin_step()
            elif slot.arrived:
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
                self._in_flight.launch_full_buckets(self.meet())

    # -- between backward and step

    def synchronize(self, update: Callable[[list[Tensor]], None] | None = None) -> None:
        """Wait for all ranks; leave the averages in the gradients. Nothing if that has been done already.

        ``update`` is called with some parameters as soon as their averages are there, while others travel; then these
        gradients become None. It is not told of those that are gathered, nor of any at a rank that is alone.

        A parameter that no rank used keeps ``grad = None``; one that some ranks used is averaged over all
        of them, the others counting as zero. After a backward pass too many it waits as well, and what is in the
        gradients then is good for nothing: see `require_sound`.
        """
        self._require_not_closed()
        self._synchronize(update)

    def _synchronize(self, update: Callable[[list[Tensor]], None] | None) -> None:
        if self._synchronized:
            return
        if not self._collecting:
            self._begin_step()
        # Not at the end of backward, which would be too early: ranks that did not use every parameter launch
        # the rest only here, and may wait for each other in other collectives before.
        try:
            with self._tracks.synchronizing():
                self._bring_home(None if self._is_spoilt else update)
        finally:
            self._end_step()
        self._synchronized = True

    def _bring_home(self, update: Callable[[list[Tensor]], None] | None) -> None:
        group = self.meet()
        if not self._is_spoilt:
            self._layout.require_same()
        failure: Exception | None = None
        for bucket in self._in_flight.arriving(group):
            gathered = self._in_flight.settle(bucket)
            if update is not None and failure is None and not self._in_flight.has_failed:
                try:
                    update([slot.param for slot in bucket.slots if slot not in gathered])
                except Exception as error:  # noqa: BLE001 - raised below
                    # The other ranks wait for the rest, and the next step is to begin where theirs does.
                    failure = error
                else:
                    bucket.drop(gathered)
        self._in_flight.gather(group)
        if failure is not None:
            raise failure

    def drop_gradients(self) -> None:
        """Leave no parameter a gradient, and give the memory of the buckets back, until the next one comes."""
        self._layout.drop_gradients()
        for bucket in self._layout.buckets:
            bucket.drop(())

    def require_sound(self) -> None:
        """Raise a GradientError if a backward pass too many has spoilt the gradients, and they were not dropped."""
        if self._is_spoilt:
            raise GradientError(
                "step() was called after gradients were computed more than backward_passes_per_step times, which has "
                "spoilt them: after that error, call optimizer.synchronize() and optimizer.zero_grad() on every rank "
                "to drop them"
            )

    def sit_out(self, average_of_active: bool) -> bool:
        """Take part in one step of the other ranks with nothing to give; False if they all sat out as well.

        Gradients that are complete already go with that step. For `join`; afterwards no parameter has a gradient.
        """
        if self.has_arrivals:
            # Also where it has been closed since: other ranks are in that step.
            self._synchronize(None)
            self.stepped()
            return True
        self._begin_step()
        self._layout.drop_gradients()
        for bucket in self._layout.buckets:
            bucket.sit_out(average_of_active)
        try:
            self._bring_home(None)
            active = self._in_flight.active
        finally:
            self._end_step()
        self._layout.drop_gradients()
        return active > 0

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the optimizer use the gradients inside."""
        yield
        self.stepped()

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self._ranks.stepped_backwards.extend(self._backwards)
        self._backwards.clear()
        self._synchronized = False
        self._tracks.stepped()

    def require_nothing_pending(self, action: str, way_out: str) -> None:
        """Raise a GradientError if gradients that nobody has waited for would be lost by this action.

        Unless they are surplus (see `_is_surplus`): then wait, and drop them. A half accumulation is dropped.
        """
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
        self._backwards.clear()
        self._synchronized = False
        self._is_spoilt = False

    @property
    def has_arrivals(self) -> bool:
        """Whether some gradient is complete and has not been synchronized."""
        return self._collecting and any(slot.arrived for slot in self._layout.slots.values())

    def passes_of(self) -> dict[Tensor, int]:
        """The backward passes that have added to each gradient of this step, where there were any."""
        return {slot.param: slot.passes for slot in self._layout.slots.values() if slot.passes}

    # -- how it is done

    def _begin_step(self) -> None:
        self.meet().require_open("averaging gradients")
        self._collecting = True
        self._synchronized = False
        self._is_spoilt = False
        self._layout.expect()

    def _end_step(self) -> None:
        self._collecting = False
        self._in_flight.reset()
        self._layout.forget()

    def _is_surplus(self) -> bool:
        """Whether another optimizer has stepped with every backward pass that these gradients come from.

        So it is with a GAN's discriminator after the generator's step: the generator's backward passes
        through it and leaves gradients that nobody asked for.
        """
        return bool(self._backwards) and self._backwards <= set(self._ranks.stepped_backwards)

    def _require_surplus(self, slot: Slot) -> None:
        if not self._is_surplus():
            # So that the step can still be taken to its end with the other ranks, and dropped.
            self._is_spoilt = True
            self._layout.give_up()
            raise too_many_passes(slot.name, self.backward_passes_per_step)

    def _discard(self) -> None:
        """Let what is under way come to its end on all ranks, and begin anew."""
        self._layout.give_up()
        try:
            for _ in self._in_flight.arriving(self.meet()):
                pass
        finally:
            self._end_step()
            self._backwards.clear()
