"""
Batch normalization by the mean and variance of all ranks' batches, as if one process had the whole batch.

    forward  ── measure(batch) ── Moments (count, mean, spread) ── gathered from all ranks, merge ── normalized
    backward ── gradient_sums(batch) ── all-reduced, over the count ── input_gradient(batch)

Each direction is one operation of the process set. Forwards of layers with a name pair up by it; others pair up in the
order of their calls, which is the same on all ranks since every forward waits for all. A backward pairs up with its
forward in any order. Pairing does not count the layers that a rank has built, so a rank may build an extra model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..calls.operation import Execution, Kind, Operation
from ..comm.group import Group
from ..errors import UnsupportedError
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set
from ..runtime.process_set import ProcessSet, check_process_set
from .base import submit, title
from .sendable import check_sendable

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_FORWARD, _BACKWARD = Kind("sync_batch_norm"), Kind("sync_batch_norm_backward")

_forwards = itertools.count(1)


class SyncBatchNorm(_BatchNorm):
    """Normalizes with the statistics of the batches of all ranks of a process set; batch sizes may differ.

    Inputs have 2 dimensions or more, on CPU or GPU; the second is the channels. Arguments, parameters, buffers and
    ``state_dict()`` are those of `torch.nn.BatchNorm2d` and the like; ``name`` is for messages. In training, every rank
    of the set must call it, even without samples, and each waits for all. In evaluation, on a rank outside the set, and
    with one rank, it is plain batch normalization. Half-precision inputs are computed in float32. The gradients of
    weight and bias are those of the rank's own batch, for a `DistributedOptimizer` to average.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = check_process_set(process_set, "SyncBatchNorm")
        title(Kind("SyncBatchNorm"), name)
        self.name = name

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
        """Replaces every BatchNorm layer inside, also `torch.nn.SyncBatchNorm`, by one that synchronizes.

        Returns the module, or its replacement if it is such a layer itself. Parameters and buffers remain the same
        tensors, so an optimizer may already hold them; hooks and all other attributes are kept too.
        """
        check_process_set(process_set, "SyncBatchNorm.convert_sync_batchnorm")
        return _convert(cls, module, process_set, "", {})

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes a batch."""
        input = check_sendable(input, self._title())
        self._check_input_dim(input)
        group = self.process_set.membership().group if self.training else None
        if group is None or group.size == 1:
            self._check_plain_dtype(input)
            return super().forward(input)
        return self._synchronized(input, group)

    def extra_repr(self) -> str:
        ranks = "" if self.process_set is global_process_set else f", process_set={self.process_set}"
        return f"{super().extra_repr()}{ranks}"  # type: ignore[no-untyped-call]  # torch's

    def _check_input_dim(self, input: Tensor) -> None:
        what = self._title()
        if input.dtype not in _FLOATS:
            raise ValueError(f"{what}: the input is of {input.dtype}: pass floats, as input.float()")
        if input.is_inference() and not torch.is_inference_mode_enabled() and torch.is_grad_enabled():
            raise ValueError(f"{what}: the input was made in torch.inference_mode() and has no gradient: clone() it")
        if input.dim() < 2:
            # Horovod's words.
            raise ValueError(f"{what}: expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features or self.num_features == 0:
            raise UnsupportedError(
                f"{what}: expected {self.num_features} channels, one at least, in the second dimension, "
                f"got input of shape {tuple(input.shape)}"
            )

    def _check_plain_dtype(self, input: Tensor) -> None:
        """Refuses dtypes that PyTorch does not mix: it takes half precision in a float32 layer, and nothing else."""
        own = self.running_mean if self.weight is None else self.weight
        if own is not None and own.dtype != input.dtype and not (input.dtype.itemsize == 2 and own.dtype.itemsize == 4):
            raise ValueError(
                f"{self._title()}: the input is of {input.dtype}, and the layer of {own.dtype}: convert one of them"
            )

    def _title(self) -> str:
        return "SyncBatchNorm" if self.name is None else f"SyncBatchNorm {self.name!r}"

    def _synchronized(self, input: Tensor, group: Group) -> Tensor:
        moments, forward_name = self._gather(input, group)
        if moments.count == 1:
            raise ValueError("Expected more than 1 value per channel when training, got 1 on all ranks together")
        self._track(moments)
        dtype = computed_in(input.dtype)
        # Not typed in every version of torch.
        untyped: Any = _Normalize
        normalized: Tensor = untyped.apply(
            input,
            self.weight,
            self.bias,
            moments.mean.to(dtype),
            moments.variance.to(dtype),
            self.eps,
            moments.count,
            forward_name,
            self.process_set,
        )
        return normalized

    def _gather(self, input: Tensor, group: Group) -> tuple[Moments, str]:
        """Returns the moments of all ranks' batches, and the name that all ranks use for this forward."""
        mine = measure(input)
        packed = torch.cat([mine.mean, mine.spread])
        same = {
            "dtype": str(input.dtype),
            "device": input.device.type,
            "num_features": self.num_features,
            "eps": self.eps,
            # Whether this rank will run the backward, in which the others wait for it.
            "input_requires_grad": torch.is_grad_enabled() and input.requires_grad,
        }
        own = [f"{self.name or 'a layer'}, forward {next(_forwards)}", mine.count]

        def run(execution: Execution) -> tuple[Moments, str]:
            parts = execution.group.all_gather(packed, execution.what, [packed.nbytes] * group.size)
            moments = [
                Moments(count, *part.view(packed.dtype).chunk(2))
                for (_, count), part in zip(execution.owns, parts, strict=True)
            ]
            return merge(moments), execution.owns[0][0]

        operation = Operation(_FORWARD, run, self.name, same, own)
        return cast("tuple[Moments, str]", submit(operation, self.process_set, [packed]).wait())

    def _track(self, moments: Moments) -> None:
        if not self.track_running_stats or moments.count == 0:
            return
        assert self.num_batches_tracked is not None, "it is there where statistics are tracked"
        assert self.running_mean is not None, "likewise"
        assert self.running_var is not None, "likewise"
        self.num_batches_tracked.add_(1)
        share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, latest in ((self.running_mean, moments.mean), (self.running_var, moments.unbiased_variance)):
            running.copy_((1 - share) * running.double() + share * latest)


class _Normalize(torch.autograd.Function):
    """Normalizes a batch by statistics to which every rank's batch has contributed."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: int,
        forward_name: str,
        process_set: ProcessSet,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps, ctx.count, ctx.forward_name, ctx.process_set = eps, count, forward_name, process_set
        if input.numel() == 0:
            return torch.empty_like(input)
        return F.batch_norm(input, mean, variance, _like(weight, mean), _like(bias, mean), False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        own_sum, own_dot = gradient_sums(grad, input, mean, variance, ctx.eps)
        grad_input = None
        if needs_input:
            totals = _add_up(torch.stack([own_sum, own_dot]).double(), ctx.forward_name, ctx.process_set)
            grad_input = input_gradient(grad, input, weight, mean, variance, ctx.eps, totals / max(1, ctx.count))
        return (
            grad_input,
            own_dot.to(weight.dtype) if needs_weight else None,
            own_sum.to(mean.dtype if weight is None else weight.dtype) if needs_bias else None,
            *[None] * 6,
        )


def _add_up(sums: Tensor, forward_name: str, process_set: ProcessSet) -> Tensor:
    def run(execution: Execution) -> Tensor:
        execution.group.all_reduce(sums, execution.what).wait()
        return sums

    return cast("Tensor", submit(Operation(_BACKWARD, run, forward_name), process_set, [sums]).wait())


def _like(parameter: Tensor | None, mean: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(mean.dtype)


_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def _convert(
    cls: type[SyncBatchNorm], module: nn.Module, process_set: ProcessSet, path: str, seen: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in seen:
        # A layer in two places is converted once.
        return seen[module]
    converted = _converted(cls, module, process_set, path) if isinstance(module, _BatchNorm) else module
    seen[module] = seen[converted] = converted
    for name, child in list(converted._modules.items()):
        if child is not None:
            converted._modules[name] = _convert(cls, child, process_set, f"{path}.{name}" if path else name, seen)
    return converted


def _converted(cls: type[SyncBatchNorm], layer: _BatchNorm, process_set: ProcessSet, path: str) -> SyncBatchNorm:
    kind, place = type(layer).__name__, f"{path!r} is" if path else "the module is"
    if type(layer).forward not in _PLAIN_FORWARDS:
        raise ValueError(
            f"convert_sync_batchnorm: {place} a {kind}, which overrides forward(), and that would be lost: replace "
            "it with a subclass of hvd.SyncBatchNorm"
        )
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ValueError(
            f"convert_sync_batchnorm: {place} a {kind} without initialized parameters: run a batch through it first"
        )
    converted = cls.__new__(cls)
    converted.__dict__.update(layer.__dict__)
    converted.process_set = process_set
    converted.name = path or None
    return converted


# -- the numerics: per-channel values are in float64, and no differences of large sums are taken


@dataclass(frozen=True, slots=True)
class Moments:
    """Per channel: the number of values, their mean, and the sum of their squared distances from it; in float64."""

    count: int
    mean: Tensor
    spread: Tensor

    @property
    def variance(self) -> Tensor:
        """The variance over all values, by which a batch is normalized."""
        return self.spread / max(1, self.count)

    @property
    def unbiased_variance(self) -> Tensor:
        """The variance that running statistics use."""
        return self.spread / max(1, self.count - 1)


def measure(part: Tensor) -> Moments:
    """Returns the moments of a tensor whose second dimension is the channels; zeros for an empty one."""
    channels = part.size(1)
    values = part.detach().to(computed_in(part.dtype))
    count = values.numel() // channels
    if count == 0:
        nothing = torch.zeros(channels, dtype=torch.float64, device=part.device)
        return Moments(0, nothing, nothing)
    if values.is_cuda:
        variance, mean = torch.var_mean(values, [0, *range(2, values.dim())], correction=0)
        return Moments(count, mean.double(), variance.double() * count)
    # Ten times as fast as var_mean on a CPU; the second pass makes it as exact.
    rows = values.movedim(1, -1).reshape(-1, channels)
    near = rows.mean(0)
    distances = rows - near
    rest = distances.mean(0).double()
    return Moments(count, near.double() + rest, distances.square_().sum(0).double() - count * rest.square())


def merge(parts: Sequence[Moments]) -> Moments:
    """Returns the moments of all parts' values together; there must be at least one part."""
    count = sum(part.count for part in parts)
    means = torch.stack([part.mean for part in parts])
    weights = means.new_tensor([[part.count / max(1, count)] for part in parts])
    mean = (weights * means).sum(0)
    between = (weights * (means - mean).square()).sum(0) * count
    return Moments(count, mean, torch.stack([part.spread for part in parts]).sum(0) + between)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a batch of this dtype is normalized."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def gradient_sums(grad: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sums, over this rank's batch, the output's gradient, and its products with the normalized input; per channel."""
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if grad.is_cuda:
        # Of contiguous 16-bit batches PyTorch's kernel rounds terms to 16 bits: sums are off by a thousandth.
        grad, input = grad.to(mean.dtype), input.to(mean.dtype)
    # With constant statistics, the gradients of bias and weight are these sums. The operation on a GPU needs a weight,
    # and statistics that its forward pass has saved: if they are empty, it takes the constant ones.
    saved = mean.new_empty(0)
    _, dot, total = torch.ops.aten.native_batch_norm_backward(
        grad, input, torch.ones_like(mean), mean, variance, saved, saved, False, eps, [False, True, True]
    )
    return total, dot


def input_gradient(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, variance: Tensor, eps: float, averages: Tensor
) -> Tensor:
    """Returns the input's gradient; ``averages`` are all ranks' `gradient_sums` per value of a channel."""
    shape = [1, -1] + [1] * (input.dim() - 2)
    inverse = (variance.double() + eps).rsqrt()
    scale = inverse if weight is None else inverse * weight.double()
    of_grad, of_dot = averages

    def spread_out(value: Tensor) -> Tensor:
        return value.to(mean.dtype).view(shape)

    result = input.to(mean.dtype) - spread_out(mean)
    result.mul_(spread_out(-of_dot * inverse * scale)).addcmul_(grad.to(mean.dtype), spread_out(scale))
    return result.sub_(spread_out(of_grad * scale)).to(input.dtype)


keep_outside_graphs(globals())
