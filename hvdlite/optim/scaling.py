"""
How sums of gradients become averages: what is done before the sum, and what after it.

    gradients × before ── summed over the ranks ── × over / how many ranks

Which sums are to be averages, and when terms are scaled before, is in `wire`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..compression.kernels import divide, divide_by, scale_by


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a sum becomes an average: its terms times ``before``, and the sum times ``over``, divided by the ranks.

    These are all ranks, or those that take part. ``over`` is None where it is to stay a sum. Where it is 1 there is no
    product, and the average is the sum divided: of equal gradients that very gradient.
    """

    before: float = 1.0
    over: float | None = None

    def finish(self, total: Tensor, count: int) -> None:
        """Make a flat tensor that has been summed the average over so many ranks."""
        if self.over == 1.0:
            divide(total, count)
        elif self.over is not None and self.over != count:
            total.mul_(self.over / count)

    def finish_there(self, total: Tensor, count: Tensor) -> None:
        """The same where the count is on the tensor's device, which is not waited for."""
        if self.over == 1.0:
            divide_by(total, count.to(total.dtype))
        elif self.over is not None:
            scale_by(total, (self.over / count).to(total.dtype))


AS_IT_IS = Scaling()
