"""
A bucket in memory: one flat buffer, the views of it that are the gradients, and what has arrived.

    param.grad ── take ── view of the buffer      (nothing to pack: the gradient lives there)
    seal: zeros for what did not arrive, flags for the others ── all-reduce elsewhere ── give back

What a bucket holds is decided in `plan`; when it travels, in `reducer` and `convoy`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import GradientError
from .plan import BucketPlan, Slice

_TAKES_PART = (1, 0)


# Where a flat tensor of zeros comes from: elements, dtype, device.
Memory = Callable[[int, torch.dtype, torch.device], Tensor]


class Home(Protocol):
    """Where a gradient is kept between backward and step."""

    def take(self, slot: Slot, /, last_pass: bool) -> None: ...
    def arrive(self, slot: Slot, /) -> None: ...


class Slot:
    """One parameter's place in a bucket, and how far it is in this step."""

    __slots__ = ("arrived", "home", "name", "param", "passes", "piece", "scaled", "sparse", "view")

    def __init__(self, home: Home, piece: Slice, param: Tensor) -> None:
        self.home = home
        self.piece = piece
        self.name = piece.spec.name
        self.param = param
        # The gradient's place in the flat buffer; None until the bucket takes memory.
        self.view: Tensor | None = None
        self.passes = 0
        self.arrived = False
        self.sparse = False
        # Whether the view holds the gradient times the bucket's scale already.
        self.scaled = False

    def forget(self) -> None:
        """Begin anew: nothing of this step has been seen."""
        self.passes = 0
        self.arrived = False
        self.sparse = False
        self.scaled = False


class Bucket:
    """The gradients of some parameters as one flat tensor, and the flags that travel with them."""

    def __init__(
        self, plan: BucketPlan, params: Sequence[Tensor], *, scale: float, densify: bool, memory: Memory
    ) -> None:
        self.plan = plan
        self._memory = memory
        # By what gradients are multiplied before they travel.
        self._scale = scale
        self.asleep = plan.asleep
        # The sleeping buckets that this one's flags wake.
        self.sleepers: list[Bucket] = []
        # Whether sparse gradients travel as dense ones, instead of another way.
        self._densify = densify
        self.slots = [Slot(self, piece, param) for piece, param in zip(plan.slices, params, strict=True)]
        self._buffer: Tensor | None = None
        # PyTorch's count of changes to the buffer after our own last one, from a gradient's arrival until all
        # buckets' averages are there; None when a change is the user's good right.
        self._version: int | None = None
        self._is_wanted = True
        # What this rank adds to the counts of those that take part, and of those that sit out and do not count.
        self._presence = _TAKES_PART
        self._missing = len(self.slots)
        # By `time.monotonic_ns`, for a timeline; None while gradients of this step are missing.
        self.full_since_ns: int | None = None

    @property
    def buffer(self) -> Tensor:
        """The flat buffer; its memory is taken when it is first asked for."""
        if self._buffer is None:
            plan = self.plan
            self._buffer = self._memory(plan.numel, plan.dtype, plan.device)
            for slot in self.slots:
                spec = slot.piece.spec
                slot.view = self._buffer.as_strided(spec.shape, spec.stride, slot.piece.start)
        return self._buffer

    @property
    def full(self) -> bool:
        """Whether every gradient that is to come in this step has come."""
        return self._missing == 0

    def expect(self) -> None:
        """Begin a step: wait for the parameters that require a gradient now."""
        self._version = None
        self._is_wanted = True
        self._presence = _TAKES_PART
        self._missing = sum(1 for slot in self.slots if slot.param.requires_grad)
        self.full_since_ns = None

    def arrive(self, slot: Slot) -> None:
        """Count this gradient as complete."""
        slot.arrived = True
        if slot.param.requires_grad:
            self._missing -= 1
            if self._missing == 0:
                self.full_since_ns = time.monotonic_ns()

    def take(self, slot: Slot, last_pass: bool) -> None:
        """Make ``param.grad`` the view of the buffer, with the value that it has now.

        On the last pass before it travels the value is scaled on the way, since that costs nothing there.
        A sparse gradient stays where it is, and its flag will say so.
        """
        buffer, view, param = self.buffer, slot.view, slot.param
        assert view is not None, "the buffer sets the views"
        grad = param.grad
        if grad is None:
            return
        if grad is view:
            # Autograd has added to it.
            self._note_version(last_pass)
            return
        if grad.layout != torch.strided:
            slot.sparse = True
            return
        if grad.dtype != buffer.dtype or grad.device != buffer.device:
            raise GradientError(
                f"parameter {slot.name!r} had dtype {buffer.dtype} on {buffer.device} when the optimizer was "
                f"wrapped and has a gradient of {grad.dtype} on {grad.device} now: move or convert the model "
                "before hvd.DistributedOptimizer(...)"
            )
        self._require_untouched()
        if last_pass and self._scale != 1.0:
            torch.mul(grad.detach(), self._scale, out=view)
            slot.scaled = True
        else:
            view.copy_(grad.detach())
        param.grad = view
        self._note_version(last_pass)

    def seal(self, *, leave_scale: bool) -> tuple[Tensor, float]:
        """The flat buffer, ready to travel: no stale values, and the flags of this rank set.

        And by what its gradients are still to be multiplied, which is 1 unless the caller would do that on the way.
        """
        buffer = self.buffer
        if self._presence != _TAKES_PART:
            buffer.zero_()
            buffer[self.plan.presence_start : self.plan.wake_start].copy_(torch.tensor(self._presence))
            return buffer, 1.0
        self._require_untouched()
        used = [self._fill(slot) for slot in self.slots]
        scale_left = self._scale_rest(leave_scale)
        tail = buffer[self.plan.grad_numel :]
        if all(used) and not self.sleepers and not any(slot.sparse for slot in self.slots):
            # Filled in place, without a copy from the host: the usual case stays asynchronous on a GPU.
            tail[: len(used)].fill_(1)
            tail[len(used) :].zero_()
            tail[2 * len(used)].fill_(1)
        else:
            sparse = [slot.arrived and slot.sparse for slot in self.slots]
            wake = [sleeper.asleep and sleeper.needed for sleeper in self.sleepers]
            tail.copy_(torch.tensor([*used, *sparse, *_TAKES_PART, *wake], dtype=buffer.dtype))
        self._note_version(True)
        return buffer, scale_left

    def give_up(self) -> None:
        """What this step brings is wanted by nobody: it may be changed, or cast away, at any time."""
        self._is_wanted = False

    def sit_out(self, average_of_active: bool) -> None:
        """Travel in this step with nothing to give; whether averages are to be over the other ranks alone."""
        self.give_up()
        self._presence = (0, int(average_of_active))

    def accept(self) -> None:
        """The averages are about to be written over the gradients, which must be what has travelled."""
        self._require_same()

    def hold(self) -> None:
        """The averages are there. Maybe sooner than the user can know: they are not to be changed yet."""
        self._note_version(True)

    def release(self) -> None:
        """All buckets have come back: from now on the gradients are the user's to change."""
        self._require_same()
        self._version = None

    def _require_same(self) -> None:
        if not self._is_wanted:
            return
        self._require_untouched()
        for slot in self.slots:
            grad = slot.param.grad
            if slot.arrived and not slot.sparse and grad is not slot.view:
                how = "set to None" if grad is None else "replaced"
                raise _changed_too_early(f"the gradient of {slot.name} was {how}")

    def _note_version(self, begin: bool) -> None:
        if begin or self._version is not None:
            self._version = self.buffer._version

    def _require_untouched(self) -> None:
        if self._is_wanted and self._version is not None and self._version != self.buffer._version:
            raise _changed_too_early(f"one of the {self.plan.describe()} was changed")

    def _fill(self, slot: Slot) -> bool:
        """Make sure that the slice holds this rank's share; whether it has one."""
        if not slot.arrived and slot.param.grad is not None:
            # Half an accumulation, or a gradient that no backward of ours made: it counts as it is.
            self.take(slot, last_pass=True)
            slot.arrived = True
        assert slot.view is not None, "the buffer sets the views"
        if slot.arrived and slot.sparse and self._densify and slot.param.grad is not None:
            slot.view.copy_(slot.param.grad.to_dense())
        elif not slot.arrived or slot.sparse:
            slot.view.zero_()
            return False
        return True

    def _scale_rest(self, leave: bool) -> float:
        """Scale what was not scaled as it was taken; by what all is to be scaled where that is left."""
        if self._scale == 1.0 or all(slot.scaled for slot in self.slots):
            return 1.0
        if not any(slot.scaled for slot in self.slots):
            if leave:
                return self._scale
            self.buffer[: self.plan.grad_numel].mul_(self._scale)
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
    def locally_complete(self) -> bool:
        """Whether this rank gave a dense gradient for every slice, and so need not ask who else did."""
        return all(slot.arrived and not slot.sparse for slot in self.slots)

    def read_flags(self) -> list[tuple[Slot, bool, bool]]:
        """After the all-reduce: for every slot whether any rank used it, and whether any had it sparse.

        On a GPU this waits for the device, so ask only where the answer is needed.
        """
        count = len(self.slots)
        tail = self.buffer[self.plan.grad_numel :].abs().tolist()
        return [(slot, tail[i] > 0, tail[count + i] > 0) for i, slot in enumerate(self.slots)]

    def read_wake(self) -> list[bool]:
        """After the all-reduce: which of the `sleepers` some rank needs."""
        return [value > 0 for value in self.buffer[self.plan.wake_start :].abs().tolist()]

    @property
    def presence(self) -> Tensor:
        """After the all-reduce: how many ranks took part, and how many sat out and do not count."""
        counts = self.buffer[self.plan.presence_start : self.plan.wake_start]
        return counts.real if counts.is_complex() else counts


def _changed_too_early(what: str) -> GradientError:
    return GradientError(
        f"{what} while it was on its way between the ranks, which would have made them differ: call "
        "optimizer.synchronize() after backward() and before clipping, changing or dropping gradients; hooks that "
        "change them belong on the parameters before hvd.DistributedOptimizer(...)"
    )
