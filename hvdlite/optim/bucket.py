"""
A bucket in memory: one flat buffer, the views of it that are the gradients, and what has arrived.

    param.grad ── take ── view of the buffer      (nothing to pack: the gradient lives there)
    seal: zeros for what did not arrive, flags for the others ── all-reduce elsewhere ── give back

What a bucket holds is decided in `plan`; when it travels, in `reducer`; what happens to it then, in an `exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .flags import TAKES_PART, Flags, ParticipantCount, RankAndSize, presence_of
from .plan import BucketPlan
from .slot import Slot, changed_too_early, misfit

# Where a flat tensor of zeros comes from: elements, dtype, device.
Memory = Callable[[int, torch.dtype, torch.device], Tensor]


class BucketMemory(NamedTuple):
    """A bucket's flat buffer, and the two parts of it: the gradients, with gaps between them, and the flags."""

    flat: Tensor
    gradients: Tensor
    tail: Tensor


class Bucket:
    """The gradients of some parameters as one flat tensor, and the flags that travel with them."""

    def __init__(
        self,
        plan: BucketPlan,
        params: Sequence[Tensor],
        *,
        ranks: RankAndSize,
        scale: float,
        densify: bool,
        memory: Memory,
    ) -> None:
        self.plan = plan
        # By the names that it holds, for messages.
        self.description = plan.describe()
        self._allocate = memory
        # By what gradients are multiplied before they travel.
        self._scale = scale
        self.asleep = plan.asleep
        # The sleeping buckets that this one's flags wake.
        self.sleepers: list[Bucket] = []
        # Whether sparse gradients travel as dense ones, instead of another way.
        self._densify = densify
        self.slots = [Slot(self, piece, param) for piece, param in zip(plan.slices, params, strict=True)]
        self._memory: BucketMemory | None = None
        self._flags = Flags(plan, ranks)
        # PyTorch's count of changes to the buffer after our own last one, from a gradient's arrival until all
        # buckets' averages are there; None when a change is the user's good right.
        self._version: int | None = None
        self._is_wanted = True
        # What this rank adds to the counts of those that sit out and do not count, and of those that take part.
        self._presence = TAKES_PART
        # In this step: the gradients that are to come, and of those that came the dense ones, and the scaled of these.
        self._missing = len(self.slots)
        # Whether every gradient that is to come in this step has come.
        self.is_full = self._missing == 0
        self._dense = 0
        self._scaled = 0
        # By `time.monotonic_ns`, for a timeline; None while gradients of this step are missing.
        self.full_since_ns: int | None = None

    @property
    def memory(self) -> BucketMemory:
        """The flat buffer and its parts; taken when it is first asked for."""
        memory = self._memory
        if memory is None:
            plan = self.plan
            flat = self._allocate(plan.numel, plan.dtype, plan.device)
            memory = self._memory = BucketMemory(flat, flat[: plan.grad_numel], flat[plan.grad_numel :])
            for slot in self.slots:
                spec = slot.piece.spec
                slot.view = flat.as_strided(spec.shape, spec.stride, slot.piece.start)
        return memory

    def expect(self) -> None:
        """Begin a step: wait for the parameters that require a gradient now."""
        self._version = None
        self._is_wanted = True
        self._presence = TAKES_PART
        self._missing = sum([slot.param.requires_grad for slot in self.slots])
        self.is_full = self._missing == 0
        self._dense = self._scaled = 0
        self.full_since_ns = None

    def take(self, slot: Slot, last_pass: bool) -> bool:
        """Make ``param.grad`` the view of the buffer, with the value that it has now.

        On the last pass before it travels the value is scaled on the way, since that costs nothing there.
        A sparse gradient stays where it is, and its flag will say so. Whether the bucket is full now.
        """
        # Once for each parameter in each step: all in one place, without a call that is not needed.
        param = slot.param
        grad, view = param.grad, slot.view
        if view is None:
            view = self._view_of(slot)
        is_dense = True
        if grad is view:
            pass  # autograd has added to it
        elif grad is not None and grad.layout is torch.strided:
            if grad.dtype != view.dtype or grad.device != view.device:
                raise misfit(slot, grad)
            if self._version is not None and self._version != view._version:
                self._require_untouched()
            value = grad.detach() if grad.requires_grad else grad
            if last_pass and self._scale != 1.0:
                torch.mul(value, self._scale, out=view)
                slot.scaled = True
                self._scaled += 1
            else:
                view.copy_(value)
            param.grad = view
        else:
            is_dense = False
            slot.sparse = grad is not None
        if is_dense and (last_pass or self._version is not None):
            self._version = view._version
        if not last_pass:
            return False
        slot.arrived = True
        self._dense += is_dense
        self._missing -= param.requires_grad
        self.is_full = self._missing == 0
        if not self.is_full or not param.requires_grad:
            return False
        self.full_since_ns = time.monotonic_ns()
        return True

    def _view_of(self, slot: Slot) -> Tensor:
        assert self.memory is not None, "it is taken when it is asked for"
        assert slot.view is not None, "the memory sets the views"
        return slot.view

    def seal(self, *, leave_scale: bool) -> tuple[BucketMemory, float]:
        """The memory, ready to travel: no stale values, and the flags of this rank set.

        And by what its gradients are still to be multiplied, which is 1 unless the caller would do that on the way.
        """
        memory = self.memory
        if self._presence != TAKES_PART:
            memory.flat.zero_()
            self._flags.write_presence(memory.tail, self._presence)
            return memory, 1.0
        self._require_untouched()
        is_complete = self.is_complete
        used = [True] * len(self.slots) if is_complete else [self._fill(slot) for slot in self.slots]
        scale_left = 1.0 if self._scale == 1.0 else self._scale_rest(leave_scale)
        if self.sleepers or not is_complete:
            sparse = [slot.arrived and slot.sparse for slot in self.slots]
            wake = [sleeper.asleep and sleeper.needed for sleeper in self.sleepers]
            self._flags.write(memory.tail, used, sparse, wake)
        else:
            self._flags.write_usual(memory.tail)
        self._version = memory.flat._version
        return memory, scale_left

    def views(self) -> list[Tensor]:
        """The gradients' places in the flat buffer, each in its parameter's shape."""
        return [self._view_of(slot) for slot in self.slots]

    @property
    def takes_part(self) -> bool:
        """Whether this rank does not sit out this step."""
        return self._presence == TAKES_PART

    def give_up(self) -> None:
        """What this step brings is wanted by nobody: it may be changed, or cast away, at any time."""
        self._is_wanted = False

    def sit_out(self, average_of_active: bool) -> None:
        """Travel in this step with nothing to give; whether averages are to be over the other ranks alone."""
        self.give_up()
        self._presence = (int(average_of_active), 0)

    def accept(self) -> None:
        """The averages are about to be written over the gradients, which must be what has travelled."""
        self._require_untouched()

    def hold(self) -> None:
        """The averages are there. Maybe sooner than the user can know: they are not to be changed yet."""
        self._version = self.memory.flat._version

    def release(self) -> None:
        """All buckets have come back: from now on the gradients are the user's to change."""
        self._version = None

    def drop(self, kept: Sequence[Slot]) -> None:
        """Leave no gradient but those ``kept``, which are not in it; memory is taken again when the next one comes.

        An engine's own memory stays: to map it anew on all ranks in every step would cost more than it is worth.
        """
        for slot in self.slots:
            if slot not in kept:
                slot.param.grad = None
        if self._memory is not None and self._memory.flat.untyped_storage().resizable():
            self._memory = None
            for slot in self.slots:
                slot.view = None

    def abandon(self) -> None:
        """Leave the memory to what is under way, with its gradients: the next one to come has memory of its own."""
        for slot in self.slots:
            if slot.param.grad is slot.view:
                slot.param.grad = None
            slot.view = None
        self._memory = None
        self._version = None

    def require_same(self) -> None:
        """Raise a GradientError if the user has changed, replaced or dropped a gradient that is on its way."""
        if not self._is_wanted:
            return
        self._require_untouched()
        for slot in self.slots:
            if slot.param.grad is not slot.view and slot.arrived and not slot.sparse:
                how = "set to None" if slot.param.grad is None else "replaced"
                raise changed_too_early(f"the gradient of {slot.name} was {how}", slot.param)

    def _require_untouched(self) -> None:
        if self._is_wanted and self._version is not None and self._version != self.memory.flat._version:
            raise changed_too_early(f"one of the {self.description} was changed", self.slots[0].param)

    def _fill(self, slot: Slot) -> bool:
        """Make sure that the slice holds this rank's share; whether it has one."""
        # What is written from here on, for this slice or the one before it, is no change of the user's.
        self._version = None
        if not slot.arrived and slot.param.grad is not None:
            # Half an accumulation, or a gradient that no backward of ours made: it counts as it is.
            self.take(slot, last_pass=True)
        assert slot.view is not None, "the buffer sets the views"
        if slot.arrived and slot.sparse and self._densify and slot.param.grad is not None:
            slot.view.copy_(slot.param.grad.to_dense())
        elif not slot.arrived or slot.sparse:
            slot.view.zero_()
            return False
        return True

    def _scale_rest(self, leave: bool) -> float:
        """Scale what was not scaled as it was taken; by what all is to be scaled where that is left."""
        if self._scaled == len(self.slots):
            return 1.0
        if self._scaled == 0:
            if leave:
                return self._scale
            self.memory.gradients.mul_(self._scale)
            return 1.0
        for slot in self.slots:
            if slot.arrived and not slot.scaled:
                assert slot.view is not None, "the buffer sets the views"
                slot.view.mul_(self._scale)
        return 1.0

    @property
    def needed(self) -> bool:
        """Whether this rank has, or will have, a gradient for it in this step."""
        return any(slot.param.requires_grad or slot.param.grad is not None for slot in self.slots)

    @property
    def is_complete(self) -> bool:
        """Whether this rank gave a dense gradient for every slice, and so need not ask who else did."""
        return self._dense == len(self.slots)

    def read_flags(self, *, alone: bool) -> list[tuple[Slot, bool, bool]]:
        """After the all-reduce: for every slot whether any rank used it, and whether any had it sparse.

        On a GPU this waits for the device, unless this rank is ``alone``: ask only where the answer is needed.
        """
        flags = self._flags.read(self.memory.tail, alone=alone)
        return [(slot, *used_and_sparse) for slot, used_and_sparse in zip(self.slots, flags, strict=True)]

    def read_wake(self, *, alone: bool) -> list[bool]:
        """After the all-reduce: which of the `sleepers` some rank needs; waits as `read_flags` does."""
        return self._flags.read_wake(self.memory.tail, alone=alone)

    def count(self, size: int) -> ParticipantCount:
        """How many of ``size`` ranks took part; to be read when the counts of all ranks are in the bucket."""
        return ParticipantCount(presence_of(self.plan, self.memory.tail), size)
