"""What a rank has after a step, and how two of that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Record:
    """``rates`` are the learning rates of the inner optimizer's groups, ``scale`` is that of the GradScaler."""

    at: int
    params: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    rates: tuple[float, ...]
    scale: float | None


def record(at: int, params: Mapping[str, Tensor], inner: torch.optim.Optimizer, scale: float | None = None) -> Record:
    """Copies what a rank has."""
    return Record(
        at,
        {name: param.detach().clone() for name, param in params.items()},
        {name: _copy(param.grad) for name, param in params.items()},
        tuple(float(group["lr"]) for group in inner.param_groups),
        scale,
    )


def _copy(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return grad.detach().coalesce().clone() if grad.is_sparse else grad.detach().clone()


def difference_of(got: Tensor | None, expected: Tensor | None, tolerance: float) -> str | None:
    """Returns how a tensor differs from what is expected; None if it does not."""
    if got is None or expected is None:
        if got is expected:
            return None
        return f"is {shown(got)}, and should be {shown(expected)}"
    if got.is_sparse != expected.is_sparse:
        return f"is {'' if got.is_sparse else 'not '}sparse: {shown(got)}, and should be {shown(expected)}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = got.to_dense().to(wide), expected.to_dense().to(wide)
    if one.shape != other.shape:
        return f"has shape {tuple(one.shape)}, and should have {tuple(other.shape)}"
    same = (one == other) | (one.isnan() & other.isnan())
    if math.isinf(tolerance) or bool((same | ((one - other).abs() <= tolerance)).all()):
        return None
    return f"is {shown(got)}, and should be {shown(expected)} within {tolerance:.2g}"


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors have the same bits."""
    if one is None or other is None:
        return one is other
    if one.is_sparse or other.is_sparse:
        if not (one.is_sparse and other.is_sparse):
            return False
        return is_same(one.indices(), other.indices()) and is_same(one.values(), other.values())
    return one.shape == other.shape and (
        torch.equal(one, other) or (torch.equal(one.isnan(), other.isnan()) and torch.equal(*_without_nan(one, other)))
    )


def _without_nan(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return one.nan_to_num(0.0, float("inf"), float("-inf")), other.nan_to_num(0.0, float("inf"), float("-inf"))


def shown(tensor: Tensor | None) -> str:
    """Returns a tensor's first values."""
    if tensor is None:
        return "None"
    return str([_rounded(value) for value in tensor.to_dense().flatten().tolist()[:8]])


def _rounded(value: complex) -> complex:
    if isinstance(value, complex):
        return complex(float(f"{value.real:.7g}"), float(f"{value.imag:.7g}"))
    return float(f"{value:.7g}")
