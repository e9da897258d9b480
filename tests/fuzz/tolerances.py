"""How far a rank's numbers may be from those of one process, by dtype and by what the gradients travel as."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .program import Wrapped

_OF_DTYPE = {
    torch.float64: 1e-11,
    torch.float32: 4e-6,
    torch.bfloat16: 4e-2,
    torch.float16: 4e-3,
    torch.complex64: 4e-6,
    torch.complex128: 1e-11,
}

# By a word in the compression. Where it does not tell codecs from casts, only between hosts do codecs have an effect.
_OF_CAST = {"bf16": 2e-2, "fp16": 3e-3, "Rounding": 1e-6}
_OF_CODEC = {"int8": 0.1, "int4": 0.8, "topk": math.inf, "powersgd": math.inf}

# Twice the step of float16's smallest numbers, which casts, divisions and each rank's part may miss by a half.
_LEAST_HALVES = 2.4e-7


class Tolerance:
    """The tolerances of one optimizer; they are relative to the largest of the gradients that are averaged."""

    def __init__(self, wrapped: Wrapped, hosts: int, *, frees: bool) -> None:
        """``frees``: gradients are gone after a step, and were not compared in each."""
        compression = str(wrapped.option("compression", ""))
        self._wire = max((of for word, of in _OF_CAST.items() if word in compression), default=0.0)
        self._codec = max((of for word, of in _OF_CODEC.items() if word in compression and hosts > 1), default=0.0)
        self._least = _LEAST_HALVES if "fp16" in compression else 1e-300
        self._frees = frees
        # The largest first step, in learning rates: RMSprop's is 1 / sqrt(1 - alpha).
        self._first_step = 10 if wrapped.kind == "RMSprop" else 1
        self._dtypes: set[torch.dtype] = set()
        self._largest: dict[str, float] = {}
        # That of all steps.
        self._largest_ever = 0.0
        # The largest of a rank's sums of passes in this step, by rank and parameter.
        self._peaks: dict[tuple[int, str], float] = {}
        # With a codec numbers share a scale, and what rounding has taken from earlier steps is added.
        self._largest_of_all = 0.0

    def see_pass(self, rank: int, name: str, grad: Tensor, *, is_first: bool) -> None:
        """Notes the sum of a rank's passes so far, from which another pass may take nearly all away."""
        earlier = 0.0 if is_first else self._peaks.get((rank, name), 0.0)
        self._peaks[rank, name] = max(earlier, _size_of(grad))

    def see(self, name: str, grads: Mapping[int, Tensor | None], divisor: float) -> None:
        """Notes the gradients by rank that the next average is made of."""
        sizes = [
            max(_size_of(grad), self._peaks.pop((rank, name), 0.0)) for rank, grad in grads.items() if grad is not None
        ]
        largest = sum(sizes) / divisor
        if not all(bool(grad.to_dense().isfinite().all()) for grad in grads.values() if grad is not None):
            # A codec may make NaN of infinities, and of numbers beside them.
            self._largest_of_all = math.inf
        self._largest[name] = largest
        self._dtypes.update(grad.dtype for grad in grads.values() if grad is not None)
        self._largest_of_all = max(self._largest_of_all, largest)
        self._largest_ever = max(self._largest_ever, self._largest_of_all)

    def of_grad(self, name: str, param: Tensor, clipped: Sequence[Tensor] = ()) -> float:
        """``clipped``: the parameters whose gradients' norm all have been multiplied by something of."""
        rel = max([self._wire, _OF_DTYPE[param.dtype], *(_OF_DTYPE[each.dtype] for each in clipped)])
        largest = self._largest.get(name, 0.0)
        lossy = self._codec * self._largest_of_all if self._codec else 0.0
        least = max(self._least, _LEAST_HALVES) if param.dtype is torch.float16 else self._least
        return rel * largest + lossy + least

    def of_param(self, param: Tensor, rate: float) -> float:
        """The same optimizer has had the same gradients."""
        others = [_OF_DTYPE[dtype] for dtype in self._dtypes] if self._frees else []
        # A gradient that rounding takes away is then a whole step less, where steps do not depend on its size.
        lost = 4 * self._first_step * rate if self._frees and max([self._wire, self._codec, *others]) > 1e-4 else 0.0
        if self._frees and self._codec and math.isinf(self._largest_of_all):
            return math.inf
        size = float(param.detach().abs().nan_to_num(0, 0, 0).max()) if param.numel() else 0.0
        return (
            max(_OF_DTYPE[param.dtype], self._wire, min(self._codec, 1e9), *others) * (size + 10 * rate) + lost + 1e-300
        )

    def of_state(self, state: Tensor, param: Tensor) -> float:
        """Of a tensor in the optimizer's state of this parameter, which has moments of gradients, or sums."""
        if self._codec:
            return math.inf
        rel = max([self._wire, _OF_DTYPE[param.dtype], *(_OF_DTYPE[each] for each in self._dtypes)])
        # Steps may have cancelled each other.
        return 10 * rel * max(_size_of(state), self._largest_ever, self._largest_ever**2) + 1e-300

    def of_joined(self, param: Tensor, rate: float) -> float:
        """The gradients were not compared on the way."""
        return 20 * self.of_param(param, rate)


def _size_of(grad: Tensor) -> float:
    return float(grad.to_dense().abs().nan_to_num(0, 0, 0).max()) if grad.numel() else 0.0
