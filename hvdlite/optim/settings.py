"""
`Settings`: how an optimizer's arguments combine gradients; `Scaling`: the factors that make sums averages.

    Settings (equal on all ranks) ── Scaling, for a dtype:  gradients × before ── summed ── × over / how many ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.casts import Compression, ResolvedCompression, is_narrow
from ..compression.custom import CustomCompression
from ..compression.kernels import divide, divide_by, scale_by
from ..ops.reduction import Reduction
from .exchange import Exchange
from .flags import ParticipantCount


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors of an average: the terms times ``before``; the sum times ``over``, divided by the number of ranks.

    These are all ranks, or those that take part. ``over`` is None where it is to stay a sum. Where it is 1 there is no
    product, and the average is the sum divided: of equal gradients that very gradient.
    """

    before: float = 1.0
    over: float | None = None

    def finish(self, total: Tensor, count: ParticipantCount) -> None:
        """Make a flat tensor of floats, which has been summed, the average over so many ranks.

        Where the count is on a GPU, the tensor is there too, and nothing waits for it.
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


AS_IT_IS = Scaling()


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are combined; the same on every rank."""

    compression: ResolvedCompression
    op: ReduceOp
    gradient_predivide_factor: float
    cap_bytes: int
    sparse_as_dense: bool
    step_on_arrival: bool = False
    # What makes the exchange, where the user has given one.
    exchange: Callable[[], Exchange] | None = None

    def signature(self, exchange: Exchange) -> tuple[object, ...]:
        """What two ranks compare, with the exchange that was made by these settings.

        A compression, or exchange, of the user's own by its words, or else its type's name.
        """
        how = repr(self.compression if self.exchange is None else exchange)
        scaling = (self.op, self.gradient_predivide_factor)
        return (how, *scaling, self.cap_bytes, self.sparse_as_dense, self.step_on_arrival)

    @property
    def packs(self) -> bool:
        """Whether a compression of the user's own packs the gradients."""
        return isinstance(self.compression, CustomCompression)

    def of_wires(self) -> Reduction:
        """What is then done to the wires."""
        predivide = self.gradient_predivide_factor if self.op is Average else 1.0
        return Reduction(self.op, 1.0 / predivide, predivide)

    def leaves_gradients(self, size: int) -> bool:
        """Whether gradients stay where autograd has put them: a rank alone casts and exchanges nothing."""
        return size == 1 and self.compression is Compression.none and self.exchange is None

    def of_bystander(self) -> Settings:
        """Those of a rank that takes part in nothing: its gradients stay bit for bit what they are."""
        return replace(self, compression=Compression.none, op=Sum, exchange=None)

    def scaling(self, dtype: torch.dtype, size: int) -> Scaling:
        """What is done before and after the all-reduce of gradients of this dtype over so many ranks."""
        return self.scaling_of_wire(self.compression.wire_dtype(dtype.to_real()), size)

    def scaling_of_wire(self, dtype: torch.dtype, size: int) -> Scaling:
        """The same where it is this dtype that travels."""
        if self.op is not Average or size == 1:
            return AS_IT_IS
        predivide = self.gradient_predivide_factor
        if predivide == 1.0 and is_narrow(dtype):
            # So that it overflows no sooner than its terms do.
            return Scaling(1.0 / size, float(size))
        return Scaling(1.0 / predivide, predivide)
