"""
The numbers of batch normalization, of a batch that lies in parts: each measured where it is, and brought together.

    measure(part) ── Moments (count, mean, spread) ── merge ── Moments of the whole
    gradient_sums(part) ── added up, over the count ── input_gradient(part)

Pure functions of tensors; the parts come together in `batch_norm`. In float64 where it costs nothing, that is once
there is one number for each channel, and without differences of large sums: as exact as the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """Of each channel: how many values, their mean, and the sum of their squared distances from it; in float64."""

    count: int
    mean: Tensor
    spread: Tensor

    @property
    def variance(self) -> Tensor:
        """Over all values, by which a batch is normalized."""
        return self.spread / max(1, self.count)

    @property
    def unbiased_variance(self) -> Tensor:
        """What running statistics keep."""
        return self.spread / max(1, self.count - 1)


def measure(part: Tensor) -> Moments:
    """Those of a tensor whose second dimension is the channels; of no values, zeros."""
    channels = part.size(1)
    values = part.detach().to(computed_in(part.dtype))
    count = values.numel() // channels
    if count == 0:
        nothing = torch.zeros(channels, dtype=torch.float64, device=part.device)
        return Moments(0, nothing, nothing)
    if values.is_cuda:
        variance, mean = torch.var_mean(values, [0, *range(2, values.dim())], correction=0)
        return Moments(count, mean.double(), variance.double() * count)
    # Ten times as fast as var_mean on a CPU, and one pass more makes it as exact.
    rows = values.movedim(1, -1).reshape(-1, channels)
    near = rows.mean(0)
    distances = rows - near
    rest = distances.mean(0).double()
    return Moments(count, near.double() + rest, distances.square_().sum(0).double() - count * rest.square())


def merge(parts: Sequence[Moments]) -> Moments:
    """Those of all parts' values together; at least one part."""
    count = sum(part.count for part in parts)
    means = torch.stack([part.mean for part in parts])
    weights = means.new_tensor([[part.count / max(1, count)] for part in parts])
    mean = (weights * means).sum(0)
    between = (weights * (means - mean).square()).sum(0) * count
    return Moments(count, mean, torch.stack([part.spread for part in parts]).sum(0) + between)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """What a batch of this dtype is normalized in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def gradient_sums(grad: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Over this rank's batch: of the output's gradient, and of its products with the normalized input."""
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # As if the statistics were constants: the gradients of bias and weight are these sums.
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        grad, input, None, mean, variance, None, None, False, eps, [False, True, True]
    )
    return total, dot


def input_gradient(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float, averages: Tensor
) -> Tensor:
    """``averages``, over all values of all ranks, are of what `gradient_sums` sums."""
    shape = [1, -1] + [1] * (input.dim() - 2)
    inverse = (variance.double() + eps).rsqrt()
    scale = inverse if weight is None else inverse * weight.double()
    of_grad, of_dot = averages

    def spread_out(value: Tensor) -> Tensor:
        return value.to(mean.dtype).view(shape)

    result = input.to(mean.dtype) - spread_out(mean)
    result.mul_(spread_out(-of_dot * inverse * scale)).addcmul_(grad.to(mean.dtype), spread_out(scale))
    return result.sub_(spread_out(of_grad * scale)).to(input.dtype)
