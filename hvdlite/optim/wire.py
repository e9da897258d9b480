"""
From a full bucket to its average: compress, all-reduce, decompress, as one object that is under way.

    bucket.seal (scaled before) ── compress ── all-reduce ── wait ── decompress ── divided, or scaled ── bucket

On a GPU the all-reduce is in the engine's own stream, and `wait` holds up the program's stream and not the program. All
else is in the program's: it takes as long as a copy, and would compete with backward for the same memory elsewhere.

An algorithm that needs collectives of its own replaces `InFlight` as a whole, as `parcel` does. When a bucket is
launched, and when it is waited for, is decided in `reducer` and `in_flight`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.casts import CastCompression, Compression, Travels, is_narrow, wire_dtype
from ..compression.custom import CustomCompression
from ..ops.reduction import Reduction
from .bucket import Bucket
from .flags import count_of, count_there
from .scaling import AS_IT_IS, Scaling
from .step_trace import NO_TRACK, BucketTrace, captures
from .wire_memory import Wires

# Where a bucket is scaled and cast in one pass. On a CPU that is slower than in two: PyTorch makes a copy for it.
SCALES_ON_THE_WAY = frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are combined; the same on every rank."""

    compression: Travels
    op: ReduceOp
    gradient_predivide_factor: float
    cap_bytes: int
    sparse_as_dense: bool
    step_on_arrival: bool = False

    def signature(self) -> tuple[object, ...]:
        """What two ranks compare; a compression of the user's own by its words, or else its type's name."""
        scaling = (self.op, self.gradient_predivide_factor)
        return (repr(self.compression), *scaling, self.cap_bytes, self.sparse_as_dense, self.step_on_arrival)

    @property
    def packs(self) -> bool:
        """Whether a compression of the user's own packs the gradients."""
        return isinstance(self.compression, CustomCompression)

    def of_wires(self) -> Reduction:
        """What is then done to the wires."""
        predivide = self.gradient_predivide_factor if self.op is Average else 1.0
        return Reduction(self.op, 1.0 / predivide, predivide)

    def of_bystander(self) -> Settings:
        """Those of a rank that takes part in nothing: its gradients stay bit for bit what they are."""
        return replace(self, compression=Compression.none, op=Sum)

    def scaling(self, dtype: torch.dtype, size: int) -> Scaling:
        """What is done before and after the sum of gradients of this dtype over so many ranks."""
        if self.packs:
            # It is done to the wires.
            return AS_IT_IS
        return self.scaling_of_wire(wire_dtype(self.compression, dtype.to_real()), size)

    def scaling_of_wire(self, dtype: torch.dtype, size: int) -> Scaling:
        """The same where it is this dtype that travels."""
        if self.op is not Average or size == 1:
            return AS_IT_IS
        predivide = self.gradient_predivide_factor
        if predivide == 1.0 and is_narrow(dtype):
            # So that it overflows no sooner than its terms do.
            return Scaling(1.0 / size, float(size))
        return Scaling(1.0 / predivide, predivide)


class InFlight:
    """The all-reduce of a bucket under way, and all that must outlive it."""

    def __init__(
        self,
        bucket: Bucket,
        group: Group,
        settings: Settings,
        wires: Wires,
        track: BucketTrace = NO_TRACK,
        *,
        name: str = "a bucket",
    ) -> None:
        """``name`` is the bucket's, by which errors and stalls tell it from others."""
        self.bucket = bucket
        self._group = group
        self._track = track
        self._scaling = settings.scaling(bucket.plan.dtype, group.size)
        self._cast = _cast_of(settings.compression, bucket)
        # By what the wire is multiplied on its way back, as if all ranks took part.
        self._factor_back = 1.0
        if self._cast is not None and self._scaling.over is not None:
            self._factor_back = self._scaling.over / group.size
            self._scaling = replace(self._scaling, over=float(group.size))
        self._wires = wires
        with track.compressing():
            on_the_way = self._cast is not None and bucket.plan.device.type in SCALES_ON_THE_WAY
            buffer, scale = bucket.seal(leave_scale=on_the_way)
            self._out = as_real(buffer)
            # What is scaled: all but the flags, which are counts.
            self._gradients = as_real(buffer[: bucket.plan.grad_numel])
            # Held until finish(): the engine reads and writes this memory meanwhile.
            if self._cast is None:
                self._wire = self._out
            else:
                self._memory = wires.take(group, self._out.numel(), self._cast.dtype, self._out.device)
                self._wire = self._memory.tensor
                self._cast.convert(self._out, scale, self._gradients.numel(), self._wire)
        self._work = group.all_reduce(self._wire, f"the all-reduce of the {bucket.plan.describe()} ({name})")
        track.launched(self._work, self._wire)

    failure: Exception | None = None
    """What other ranks would have to be told of: nothing here fails on one rank alone."""

    @property
    def holds_wire(self) -> bool:
        """Whether it takes memory beside the bucket's, of a kind that is scarce until `finish`.

        On a GPU the program runs ahead of what it launches: were it to wait there for a wire, nothing would travel
        during backward.
        """
        return self._wire is not self._out and self._wire.device.type == "cpu"

    def is_completed(self) -> bool:
        """Whether `finish` would not have to wait."""
        # What a CUDA graph captures does not happen yet, and cannot be asked.
        return not captures(self._wire.device) and self._work.is_completed()

    def finish(self) -> None:
        """Block until done; leave the average in the bucket, and so in every gradient that is a view of it."""
        with self._track.waiting():
            self._work.wait()
        self.bucket.accept()
        if self._cast is not None:
            self._cast.convert(self._wire, self._factor_back, self._gradients.numel(), self._out)
            self._wires.give_back(self._memory)
        if self._scaling.over is not None:
            self._average()
        self.bucket.hold()

    def _average(self) -> None:
        """Make of the sum the average over those that count: all, unless ranks sit out (see `join`)."""
        presence, size = self.bucket.presence, self._group.size
        if presence.device.type == "cpu":
            self._scaling.finish(self._gradients, count_of(presence, size))
        else:
            # On the device, which is not waited for: what is multiplied or divided by 1 is not read.
            self._scaling.finish_there(self._gradients, count_there(presence, size))


def _cast_of(compression: Travels, bucket: Bucket) -> CastCompression | None:
    """How the bucket is cast to its wire, if that is all there is to be done."""
    real = bucket.plan.dtype.to_real()
    return compression if isinstance(compression, CastCompression) and compression.casts(real) else None


def as_real(buffer: Tensor) -> Tensor:
    """A flat tensor's numbers, with complex ones as pairs of real ones, in the same memory."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
