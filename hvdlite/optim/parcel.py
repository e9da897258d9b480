"""
A bucket on its way where a compression of a user's own packs the gradients, which sees nothing but them.

    gradients ── pack ── flags and counts, and that it worked, to all ranks ── wires ── all-reduce ── unpack ── bucket

The flags have an all-reduce of their own, before the wires: so a compression that fails on one rank, or gives wires of
another size there, is an error on all of them at the same place. It is waited for, and hence nothing of this happens
during backward, when another rank may be waiting for something else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.group import Group
from ..compression.custom import CustomCompression
from ..ops.failures import raise_together
from ..ops.packing import PackedTensors, put_back
from .bucket import Bucket
from .flags import count_of
from .step_trace import NO_TRACK, BucketTrace
from .wire import InFlight, Settings, as_real
from .wire_memory import Wires


class Parcel:
    """Such a bucket under way, as `wire.InFlight` is for others, and all that must outlive it."""

    def __init__(
        self, bucket: Bucket, group: Group, settings: Settings, track: BucketTrace = NO_TRACK, *, name: str = "a bucket"
    ) -> None:
        """``name`` is the bucket's, by which errors and stalls tell it from others. Waits for all ranks."""
        assert isinstance(settings.compression, CustomCompression), "others need no packing"
        self.bucket = bucket
        self._track = track
        plan = bucket.plan
        what = f"the all-reduce of the {plan.describe()} ({name})"
        reduction = settings.of_wires()
        with track.compressing():
            buffer, _ = bucket.seal(leave_scale=False)
            tensors, words = [as_real(buffer[: plan.grad_numel])], [f"the {plan.describe()}"]
            if settings.compression.takes_each:
                tensors, words = bucket.views(), [f"the gradient of {slot.name!r}" for slot in bucket.slots]
            self._pack = PackedTensors(settings.compression, tensors, words, reduction.check_wire)
            if not bucket.takes_part:
                self._pack.clear()
            divisor = self._share_flags(group, buffer, what)
            self._flats = list(self._pack.flats())
            self._works = [reduction.begin(group, flat, counts, divisor, what) for flat, counts, _ in self._flats]
            # The program may have been given the gradients' own memory, and has used it.
            bucket.hold()
        self._takes_memory = any(_is_elsewhere(flat, buffer) for flat, _, _ in self._flats)
        if self._works and self._works[-1].work is not None:
            # They end in order.
            track.launched(self._works[-1].work, self._flats[-1][0])

    def _share_flags(self, group: Group, buffer: Tensor, what: str) -> int:
        """Leave in the bucket's tail what all ranks have there; over how many ranks an average is."""
        plan = self.bucket.plan
        tail = buffer[plan.grad_numel :]
        flags = [int(flag) for flag in (tail.real if tail.is_complex() else tail).tolist()]
        sums = raise_together(group, self._pack.failure, what, layout=self._pack.layout, counts=flags)
        tail.copy_(torch.tensor(sums))
        return count_of(self.bucket.presence, group.size)

    @property
    def holds_wire(self) -> bool:
        """As of `wire.InFlight`."""
        return self._takes_memory and self.bucket.plan.device.type == "cpu"

    @property
    def failure(self) -> Exception | None:
        """After `finish`: what the compression has raised, which the other ranks are to be told of."""
        return self._pack.failure

    def is_completed(self) -> bool:
        """Whether `finish` would not have to wait."""
        return all(underway.is_completed() for underway in self._works)

    def finish(self) -> None:
        """Block until done; leave in the bucket what the compression makes of it, and so in every gradient."""
        with self._track.waiting():
            for underway in self._works:
                underway.wait()
        self.bucket.accept()
        for underway, (flat, counts, packed) in zip(self._works, self._flats, strict=True):
            underway.finish()
            put_back(flat, counts, packed)
        if self.bucket.takes_part:
            self._pack.unpack()
        # No wire is needed any more.
        self._works, self._flats = [], []
        self._pack.packed.clear()
        self.bucket.hold()


def send(
    bucket: Bucket, group: Group, settings: Settings, wires: Wires, track: BucketTrace = NO_TRACK, *, name: str
) -> InFlight | Parcel:
    """Have a bucket travel, in whichever way; one that a user's own compression packs waits for all ranks."""
    if isinstance(settings.compression, CustomCompression):
        return Parcel(bucket, group, settings, track, name=name)
    return InFlight(bucket, group, settings, wires, track, name=name)


def _is_elsewhere(flat: Tensor, buffer: Tensor) -> bool:
    return flat.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
