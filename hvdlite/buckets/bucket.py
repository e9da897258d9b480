"""
`Bucket`: a flat buffer whose views become the gradients of its parameters. It also tracks which of them are complete.

    param.grad ── take ── view of the buffer      (no packing: the gradient is kept in the buffer)
    seal: zeros for missing gradients, and the flags ── all-reduce by an exchange ── averages in param.grad

`plan` decides which gradients a bucket holds. `reducer` calls `take` during backward. `in_flight` decides when to send
a bucket, seals it, and passes it to an `exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .flags import (
    DROPS,
    TAKES_PART,
    Flags,
    Presence,
    RankAndSize,
    SliceFlags,
    Weights,
)
from .gradient_state import GradientState, changed_too_early, misfit, replaced, require_sparse_untouched
from .plan import BucketPlan

# Allocates a flat tensor of zeros: number of elements, dtype, device.
Memory = Callable[[int, torch.dtype, torch.device], Tensor]


@dataclass(frozen=True, slots=True)
class BucketOptions:
    """What all buckets of an optimizer have in common."""

    ranks: RankAndSize
    scale_of: Callable[[torch.dtype], float]
    """Returns the factor that gradients of a dtype are multiplied by before they are sent."""
    densify: bool
    """Whether sparse gradients are sent as dense ones. If not, `sparse_gather` averages them."""
    memory: Memory
    """Allocates a buffer, at its first gradient."""


class BucketMemory:
    """A bucket's flat buffer, its parts, and the views that are gradients. ``tail`` is ``flags`` and ``weights``."""

    __slots__ = ("_addresses", "_states", "_views", "flags", "flat", "gradients", "tail", "weights")

    def __init__(self, plan: BucketPlan, flat: Tensor, states: Sequence[GradientState]) -> None:
        self.flat = flat
        self.gradients, self.tail = flat[: plan.grad_numel], flat[plan.grad_numel :]
        self.flags, self.weights = flat[plan.grad_numel : plan.weight_start], flat[plan.weight_start :]
        self._states = states
        for state in states:
            state.view = self._slice_of(state)
        self._note_views()

    def _slice_of(self, state: GradientState) -> Tensor:
        spec = state.piece.spec
        return self.flat.as_strided(spec.shape, spec.stride, state.piece.start)

    def _note_views(self) -> None:
        # With their addresses: a program that moves or converts a model does so with its gradients, by `Tensor.data`.
        # These are then the same objects, and no views any more.
        self._views = [state.view for state in self._states if state.view is not None]
        self._addresses = list(map(Tensor.data_ptr, self._views))

    @property
    def has_moved(self) -> bool:
        """Whether gradients were moved out of the buffer, or with it."""
        return list(map(Tensor.data_ptr, self._views)) != self._addresses

    def bring_back(self) -> None:
        """Copies gradients that were moved out of the buffer, with the model, back into it."""
        for state, view in zip(self._states, self._views, strict=True):
            again = self._slice_of(state)
            if not view.is_set_to(again):
                if (view.dtype, view.device, view.shape) != (self.flat.dtype, self.flat.device, again.shape):
                    raise misfit(state, view)
                state.view = again.copy_(view)
                if state.param.grad is view:
                    state.param.grad = state.held = again
        self._note_views()


class Bucket:
    """The gradients of some parameters as one flat tensor, followed by the flags that are summed with them."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor], options: BucketOptions) -> None:
        self.plan = plan
        self._options = options
        self._scale = options.scale_of(plan.dtype)
        # The bucket of which this is a further round; else itself.
        self.home = self
        # Whether it is sent in every step, even if all of its parameters are frozen.
        self.is_first = False
        # What is sent with the first bucket.
        self.weights: Weights | None = None
        self.states = [GradientState(self, piece, param) for piece, param in zip(plan.slices, params, strict=True)]
        # Of these, in this step and in the next: see `GradientState.frozen`.
        self.frozen = [state for state in self.states if state.frozen]
        self._frozen_next = self.frozen
        # In this step: whether it takes no more gradients, since it was sent, or will not be.
        self._is_sent = False
        self._memory: BucketMemory | None = None
        self._flags = Flags(plan, options.ranks)
        # The buffer's `Tensor._version` after hvdlite's last write. If it differs later, the user has changed a
        # gradient. None while the user may change them: before the first gradient, and once the averages are returned.
        self._version: int | None = None
        self._is_wanted = True
        # What this rank adds to the counts of ranks in this step.
        self.presence = TAKES_PART
        # In this step: the number of gradients that the bucket still waits for.
        self._missing = len(self.states)
        # In this step: the number of dense gradients so far, and how many of these are scaled.
        self._dense = 0
        self._scaled = 0
        # A `time.monotonic_ns` for the timeline; None while gradients of this step are missing.
        self.full_since_ns: int | None = None

    @property
    def memory(self) -> BucketMemory:
        """The flat buffer and its parts. Allocated at first access."""
        return self._memory or self._use(self._options.memory(self.plan.numel, self.plan.dtype, self.plan.device))

    @property
    def flat(self) -> Tensor | None:
        return None if self._memory is None else self._memory.flat

    def _use(self, flat: Tensor) -> BucketMemory:
        memory = self._memory = BucketMemory(self.plan, flat, self.states)
        return memory

    def _forget_memory(self) -> None:
        self._memory = None
        for state in self.states:
            state.view = None

    def take_over(self, flat: Tensor) -> None:
        """Uses the memory of an earlier bucket with the same plan. The gradients there stay those of the parameters."""
        self._use(flat)
        for state in self.states:
            grad = state.param.grad
            # Views of the earlier bucket: to add to one would look like a change of this bucket by the user.
            if grad is not None and grad.layout is torch.strided and grad.is_set_to(self._view_of(state)):
                state.param.grad = state.view

    @property
    def asleep(self) -> bool:
        """Whether it is not sent in this step: all parameters are frozen on all ranks. What comes is late."""
        return len(self.frozen) == len(self.states) and not self.is_first

    def collect(self) -> bool:
        """Moves averages that lie elsewhere into the buffer, after a step. Returns False if no rank has had any."""
        for state in self.states:
            grad = state.param.grad
            if grad is not None and grad is not state.view:
                state.param.grad = self._view_of(state).copy_(grad if grad.layout is torch.strided else grad.to_dense())
        # Nothing has thawed, unless the program has set gradients of what is frozen.
        is_unused = self.asleep and len(self._frozen_next) == len(self.states)
        return not is_unused or any(state.param.grad is not None for state in self.states)

    def freeze(self, names: Container[str]) -> None:
        """Sets which parameters no rank has trained in the last step. Every rank must set the same."""
        for state in self.states:
            state.frozen = state.name in names
            state.awaited = True
        self.frozen = self._frozen_next = [state for state in self.states if state.frozen]

    def thaw(self, states: Collection[GradientState]) -> None:
        """Makes the next step wait for these parameters."""
        self._frozen_next = [state for state in self._frozen_next if state not in states]

    def expect(self) -> None:
        """Starts a step, which waits for all gradients but those that no rank has trained, and this rank does not."""
        self._version = None
        self._is_wanted = True
        self.presence = TAKES_PART
        if self._frozen_next != self.frozen:
            self.freeze({state.name for state in self._frozen_next})
        self._missing = len(self.states)
        for state in self.frozen:
            state.awaited = state.param.requires_grad
            self._missing -= not state.awaited
        self._is_sent = self.asleep
        self._dense = self._scaled = 0
        self.full_since_ns = None

    def missing_names(self) -> list[str]:
        """Returns the names of the first parameters that the bucket waits for in this step, at most three."""
        return [state.name for state in self.states if state.param.requires_grad and not state.ready][:3]

    def take(self, state: GradientState, last_pass: bool) -> bool:
        """Copies ``param.grad`` into the buffer and replaces it by the view. Returns True if this filled the bucket.

        On the last pass before the bucket is sent, the copy also scales the value, at no extra cost. A sparse gradient
        stays in ``param.grad``, and `seal` sets its flag.
        """
        # Runs for every parameter in every pass, so it is one function without avoidable calls.
        param = state.param
        if self._is_sent:
            # Engines read the buffer, and it has no memory if it sleeps.
            state.held = param.grad
            state.late, state.ready = True, last_pass
            return False
        grad, view = param.grad, self._view_of(state) if state.view is None else state.view
        is_dense = True
        if grad is view:
            pass  # autograd has added to the view in place
        elif grad is not None and grad.layout is torch.strided:
            if grad.dtype != view.dtype or grad.device != view.device or grad.shape != view.shape:
                raise misfit(state, grad)
            if self._version is not None and self._version != view._version:
                self.require_untouched()
            value = grad.detach() if grad.requires_grad else grad
            if last_pass and self._scale != 1.0:
                torch.mul(value, self._scale, out=view)
                state.scaled = True
                self._scaled += 1
            else:
                view.copy_(value)
            param.grad = view
        else:
            is_dense = False
            state.sparse = grad is not None
            state.version = 0 if grad is None else grad._version
        state.held = param.grad
        if is_dense and (last_pass or self._version is not None):
            self._version = view._version
        if not last_pass:
            return False
        state.ready = True
        self._dense += is_dense
        if not state.awaited:
            return False
        self._missing -= 1
        if self._missing:
            return False
        self.full_since_ns = time.monotonic_ns()
        return True

    def _view_of(self, state: GradientState) -> Tensor:
        if state.view is None:
            self._use(self._options.memory(self.plan.numel, self.plan.dtype, self.plan.device))
        assert state.view is not None, "the memory sets the views"
        return state.view

    @property
    def can_leave(self) -> bool:
        """Whether it may be sent during backward: it is full, and autograd would add to nothing that it holds."""
        return not self._missing and all(state.ready or state.param.grad is None for state in self.frozen)

    def seal(self, *, leave_scale: bool) -> tuple[BucketMemory, float]:
        """Makes the buffer ready to send: zeros for missing gradients, and this rank's flags.

        Returns the memory, and the factor that the gradients must still be multiplied by: 1 unless ``leave_scale``.
        """
        memory = self.memory
        if not self.presence.takes_part:
            self._is_sent = True
            memory.flat.zero_()
            unused = [False] * len(self.states)
            trained = [state.param.requires_grad for state in self.states]
            self._flags.write(memory.flags, self.presence, unused, unused, trained)
            return memory, 1.0
        self.require_untouched()
        if memory.has_moved:
            memory.bring_back()
        is_complete = self.is_complete
        used = [True] * len(self.states) if is_complete else [self._fill(state) for state in self.states]
        scale_left = 1.0 if self._scale == 1.0 else self._scale_rest(leave_scale)
        if is_complete and self.presence == TAKES_PART:
            self._flags.write_usual(memory.flags)
        else:
            sparse = [state.ready and state.sparse for state in self.states]
            trained = [state.ready or state.param.requires_grad for state in self.states]
            self._flags.write(memory.flags, self.presence, used, sparse, trained)
        if self.weights is not None:
            self.weights.write(memory.weights)
        self._version = memory.flat._version
        self._is_sent = True
        return memory, scale_left

    def views(self) -> list[Tensor]:
        """Returns the gradients as views of the flat buffer, each in its parameter's shape."""
        return [self._view_of(state) for state in self.states]

    def allow_changes(self) -> None:
        """Lets the user change gradients in this step, because its averages will be dropped."""
        self._is_wanted = False

    def sit_out(self, average_of_active: bool) -> None:
        """Sends zeros in this step. ``average_of_active``: this rank does not count in the averages' divisor."""
        self.allow_changes()
        self.presence = Presence(left_out=average_of_active, takes_part=False, drops=False)

    def drop_averages(self) -> None:
        """Tells the other ranks, if it is not sent yet, that this one drops the averages of this step."""
        self.allow_changes()
        self.presence = DROPS

    def guard(self) -> None:
        """Makes any later change to the buffer an error: the user must not touch averages that are not returned yet."""
        self._version = self.memory.flat._version

    def unguard(self) -> None:
        """Lets the user change the gradients again, since their averages are returned."""
        self._version = None

    def drop(self, kept: Sequence[GradientState]) -> None:
        """Sets the gradients to None, except those in ``kept``, and frees the buffer, unless it is the engine's."""
        for state in self.states:
            if state not in kept:
                state.param.grad = None
        if self._memory is not None and self._memory.flat.untyped_storage().resizable():
            self._forget_memory()

    def renew(self) -> None:
        """Makes the next gradient allocate a new buffer. Existing gradients keep their old memory."""
        self._forget_memory()
        self._version = None

    def abandon(self) -> None:
        """Gives up the buffer and its gradients, since a collective may still write to it."""
        for state in self.states:
            if state.param.grad is state.view:
                state.param.grad = None
        self.renew()

    def require_same(self) -> None:
        """Raises GradientError if the user has changed, replaced or dropped a gradient that is being averaged."""
        if not self._is_wanted:
            return
        self.require_untouched()
        if self._is_sent and self._memory is not None and self._memory.has_moved:
            raise changed_too_early(f"one of the {self.plan.describe()} was moved or converted, with the model,")
        for state in self.states:
            if not state.ready or state.late:
                continue
            if state.sparse:
                require_sparse_untouched(state)
            elif state.param.grad is not state.view:
                raise replaced(state)

    def require_untouched(self) -> None:
        """Raises GradientError if the user has changed the buffer since hvdlite last wrote to it."""
        if self._is_wanted and self._version is not None and self._version != self.memory.flat._version:
            raise changed_too_early(f"one of the {self.plan.describe()} was changed")

    def _fill(self, state: GradientState) -> bool:
        """Writes this rank's gradient, or zeros, into the slice. Returns whether this rank has a dense gradient."""
        # hvdlite writes to the buffer from here on, so the version no longer shows changes by the user.
        self._version = None
        if not state.ready and state.param.grad is not None:
            # Fewer passes than backward_passes_per_step, or a gradient that the user has set: it is averaged as it is.
            self.take(state, last_pass=True)
        assert state.view is not None, "the buffer sets the views"
        if state.ready and state.sparse and self._options.densify and state.param.grad is not None:
            state.view.copy_(state.param.grad.to_dense())
        elif not state.ready or state.sparse:
            state.view.zero_()
            return False
        return True

    def _scale_rest(self, leave: bool) -> float:
        """Scales the gradients that `take` did not. Returns the factor that the caller must scale all of them by."""
        if self._scaled == len(self.states):
            return 1.0
        if self._scaled == 0:
            if leave:
                return self._scale
            self.memory.gradients.mul_(self._scale)
            return 1.0
        for state in self.states:
            if state.ready and not state.scaled:
                assert state.view is not None, "the buffer sets the views"
                state.view.mul_(self._scale)
        return 1.0

    @property
    def is_complete(self) -> bool:
        """Whether this rank has a dense gradient in every slice. If so, it need not read the other ranks' flags."""
        return self._dense == len(self.states)

    def read_flags(self, *, alone: bool) -> list[tuple[GradientState, SliceFlags]]:
        """Returns the flags of all ranks for each parameter, after the all-reduce; nothing if this rank `is_complete`.

        On a GPU this waits for the device, unless this rank is ``alone``.
        """
        if self.is_complete:
            if self.frozen:
                self._frozen_next = []
            return []
        flags = list(zip(self.states, self._flags.read(self.memory.flags, alone=alone), strict=True))
        self._frozen_next = [state for state, of_all in flags if not of_all.trained]
        return flags

    def late_gradients(self) -> dict[str, Tensor]:
        """Takes the gradients that have come after this was sent off their parameters, by name."""
        late = {}
        for state in self.frozen:
            grad = state.param.grad
            # Also one that the user has set, of which autograd told nothing.
            if grad is not None and (state.late or not state.ready):
                late[state.name] = grad
                state.param.grad = state.held = None
                state.late = state.ready = state.sparse = False
        return late

    def further(self, late: Mapping[str, Tensor]) -> Bucket:
        """Returns a bucket of stand-ins for the same parameters, for another round with these gradients alone."""
        params = [state.param.detach() for state in self.states]
        for state, param in zip(self.states, params, strict=True):
            param.grad = late.get(state.name)
        bucket = Bucket(self.plan, params, replace(self._options, memory=plain_memory))
        bucket.home = self
        bucket.is_first = True
        bucket.expect()
        bucket._is_wanted, bucket.presence = self._is_wanted, self.presence
        return bucket


def plain_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates memory of the process's own."""
    return torch.zeros(numel, dtype=dtype, device=device)
