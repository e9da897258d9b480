"""
`NormClipper`: clips gradients by their global norm in the step, as `torch.nn.utils.clip_grad_norm_` does, to the bit.

    averages of a bucket ── measure (while other buckets are still being sent) ── step: clip ── the wrapped step

`averaging_optimizer` creates one for ``max_norm=``. All ranks have equal averages, so each computes the same norm by
itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class _Measured(NamedTuple):
    grad: Tensor
    version: int
    norm: Tensor


class NormClipper:
    """Scales gradients down so that their global 2-norm is at most ``max_norm``."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        # The norm before the last clipping. None before the first.
        self.norm: Tensor | None = None
        # By the parameter's `id`, for gradients that have been measured in this step.
        self._measured: dict[int, _Measured] = {}

    @torch.no_grad()
    def measure(self, params: Iterable[Tensor]) -> None:
        """Measures the gradients of these parameters already. `clip` measures those that are missing or have changed.

        Does nothing on a GPU, where one launch for all gradients is faster.
        """
        for param in params:
            grad = param.grad
            if grad is not None and grad.device.type == "cpu":
                self._measured[id(param)] = _Measured(grad, grad._version, torch.linalg.vector_norm(_values_of(grad)))

    @torch.no_grad()
    def clip(self, params: Sequence[Tensor]) -> None:
        """Clips the gradients of all parameters, in this order. Waits for no other rank, and for no GPU."""
        having = [param for param in params if param.grad is not None]
        grads = [param.grad for param in having if param.grad is not None]
        is_on_cpu = all(grad.device.type == "cpu" for grad in grads)
        if is_on_cpu and len({grad.dtype for grad in grads}) == 1:
            # What `get_total_norm` does on a CPU.
            norm = torch.linalg.vector_norm(torch.stack([self._norm_of(param) for param in having]))
        else:
            norm = get_total_norm([_values_of(grad) for grad in grads])
        self._measured.clear()
        self.norm = norm
        # PyTorch multiplies by min(this, 1), and to multiply by 1 changes nothing. On a GPU, to look would wait for it.
        if not (is_on_cpu and bool(self.max_norm / (norm + 1e-6) >= 1.0)):
            clip_grads_with_norm_(having, self.max_norm, norm)

    @staticmethod
    def squares_of(parts: Sequence[Tensor]) -> float:
        """Returns the sum of the squares of the gradients of these parts of parameters, in float64."""
        grads = [part.grad for part in parts if part.grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=_wide(grad)).to(grads[0].device) for grad in grads]
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    @torch.no_grad()
    def clip_parts(self, parts: Sequence[Tensor], norm: Tensor) -> None:
        """Clips the gradients of parts of parameters, where ``norm`` is that of all gradients, also on other ranks."""
        self.norm = norm
        clip_grads_with_norm_(parts, self.max_norm, norm)

    def _norm_of(self, param: Tensor) -> Tensor:
        grad, measured = param.grad, self._measured.get(id(param))
        assert grad is not None, "the caller has looked"
        if measured is not None and measured.grad is grad and measured.version == grad._version:
            return measured.norm
        norm: Tensor = torch.linalg.vector_norm(_values_of(grad))
        return norm


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _values_of(grad: Tensor) -> Tensor:
    """Returns the gradient, or the values of a sparse one, whose norm PyTorch 2.11 cannot compute itself."""
    return grad.coalesce().values() if grad.is_sparse else grad
