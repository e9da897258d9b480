"""
`Settings`: the arguments by which an optimizer combines gradients. `Scaling`: the factors that turn sums into averages.

    Settings (equal on all ranks) ── Scaling, for a dtype:  gradients × before ── summed ── × over / number of ranks

`optimizer` creates the settings; steps, exchanges and `sparse_gather` read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.casts import Compression, ResolvedCompression, is_narrow
from ..compression.codecs import words_of_wires
from ..compression.kernels import divide, divide_by, scale_by
from ..compression.top_k import Encoding
from ..ops.reduction import Reduction
from .exchange import Exchange
from .flags import ParticipantCount
from .outer import AnyOuter, compared_words
from .shares import Sharing


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors of an average: each term is multiplied by ``before``, and the sum by ``over`` / number of ranks.

    The number of ranks is that of all, or of those that take part. ``over`` None: the result is a sum. ``over`` 1: the
    sum is only divided, so the average of equal gradients is exactly that gradient.
    """

    before: float = 1.0
    over: float | None = None

    def finish(self, total: Tensor, count: ParticipantCount) -> None:
        """Turns a flat tensor of sums into averages over ``count`` ranks, in place.

        If the count is on a GPU, the tensor must be there too, and this does not wait for the GPU.
        """
        if self.over is None:
            return
        if not count.is_on_host:
            if self.over == 1.0:
                divide_by(total, count.there().to(total.dtype))
            else:
                scale_by(total, (self.over / count.there()).to(total.dtype))
        elif self.over == 1.0:
            divide(total, int(count))
        elif self.over != int(count):
            total.mul_(self.over / int(count))

    def factor(self, count: ParticipantCount) -> float | None:
        """Returns what sums can be multiplied by for the very bits of `finish`, or None if only dividing makes these.

        Waits for the device that the count is on.
        """
        if self.over is None:
            return 1.0
        if self.over != 1.0:
            return self.over / int(count)
        divisor = int(count)
        # The inverse of a power of two is exact.
        return 1.0 / divisor if divisor & (divisor - 1) == 0 else None


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments by which gradients are combined, equal on every rank."""

    compression: ResolvedCompression
    op: ReduceOp
    gradient_predivide_factor: float
    cap_bytes: int
    sparse_as_dense: bool
    step_on_arrival: bool = False
    # The user's factory of exchanges, if there is one.
    exchange: Callable[[], Exchange] | None = None
    # What is sent between hosts, if it is not the gradients, cast or not. Then there is no other compression.
    codec: Encoding | None = None
    # The global norm to which gradients are clipped, or None.
    max_norm: float | None = None
    # How hosts train apart, if they do.
    outer: AnyOuter | None = None
    # How ranks share the optimizer's work, if they do.
    shard: Sharing | None = None

    def compared(self, exchange: Exchange) -> dict[str, str]:
        """Returns the words of each argument that ranks compare. ``exchange`` was made by these settings."""
        return {
            "compression": words_of_wires(self.codec or self.compression),
            "exchange": repr(None if self.exchange is None else exchange),
            "op": self.op.name,
            "gradient_predivide_factor": repr(self.gradient_predivide_factor),
            "the bucket cap in bytes": repr(self.cap_bytes),
            "sparse_as_dense": repr(self.sparse_as_dense),
            "step_on_arrival": repr(self.step_on_arrival),
            "max_norm": repr(self.max_norm),
            "outer": compared_words(self.outer),
            "shard": "None" if self.shard is None else self.shard.describe(),
        }

    def of_wires(self) -> Reduction:
        """Returns the reduction to apply to the wires of a user's own compression."""
        predivide = self.gradient_predivide_factor if self.op is Average else 1.0
        return Reduction(self.op, 1.0 / predivide, predivide)

    def leaves_gradients(self, size: int) -> bool:
        """Whether gradients stay where autograd has put them, as on a single rank that neither casts nor exchanges.

        With a codec they do not: its exchange has the state of worlds with more ranks. Masters are those of buckets.
        """
        is_plain = self.compression is Compression.none and self.codec is None and self.exchange is None
        return size == 1 and is_plain and not (self.shard is not None and self.shard.master)

    def for_nonmember(self) -> Settings:
        """Returns the settings of a rank outside the process set, whose gradients stay bit-identical."""
        return replace(self, compression=Compression.none, op=Sum, exchange=None, codec=None, outer=None, shard=None)

    def scaling(self, dtype: torch.dtype, size: int) -> Scaling:
        """Returns the scaling of gradients of this dtype, before and after their sum over ``size`` ranks."""
        return self.scaling_of_wire(self.compression.wire_dtype(dtype.to_real()), size)

    def scaling_of_wire(self, dtype: torch.dtype, size: int) -> Scaling:
        """Returns the same for gradients that are sent in this dtype."""
        if self.op is not Average or size == 1:
            return Scaling()
        predivide = self.gradient_predivide_factor
        if predivide == 1.0 and is_narrow(dtype):
            # Scaled before the sum, so that the sum does not overflow unless its terms do.
            return Scaling(1.0 / size, float(size))
        return Scaling(1.0 / predivide, predivide)
