"""What a rank has after a step, and how two of that differ."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .prelude import grads_of


@dataclass(frozen=True)
class Record:
    """``rates`` are the learning rates of the inner optimizer's groups, ``scale`` is that of the GradScaler.

    ``before`` are gradients right before the step, where the program reads them. ``state`` is a whole state dict.
    """

    at: int
    params: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    rates: tuple[float, ...]
    scale: float | None
    before: dict[str, Tensor | None] | None = None
    state: dict[str, Any] | None = None


def record(
    at: int,
    params: Mapping[str, Tensor],
    inner: torch.optim.Optimizer,
    scale: float | None = None,
    before: dict[str, Tensor | None] | None = None,
    state: dict[str, Any] | None = None,
) -> Record:
    """Copies what a rank has."""
    return Record(
        at,
        {name: param.detach().clone() for name, param in params.items()},
        grads_of(params),
        tuple(float(group["lr"]) for group in inner.param_groups),
        scale,
        before,
        copy.deepcopy(state),
    )


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


def difference_of_states(
    got: Mapping[str, Any], expected: Mapping[str, Any], tolerance_of: Callable[[int, Tensor], float]
) -> str | None:
    """Returns how a state dict differs; ``tolerance_of`` a parameter's number and a tensor of its expected state."""
    if got["param_groups"] != expected["param_groups"]:
        return f"has groups {got['param_groups']}, and should have {expected['param_groups']}"
    one, other = ({key: each for key, each in state["state"].items() if each} for state in (got, expected))
    if [(key, each.keys()) for key, each in sorted(one.items())] != [
        (key, each.keys()) for key, each in sorted(other.items())
    ]:
        return f"has {[*map(list, one.values())]} of {[*one]}, and not {[*map(list, other.values())]} of {[*other]}"
    for number, each in other.items():
        for key, value in each.items():
            own = torch.as_tensor(one[number][key])
            wanted = torch.as_tensor(value)
            if own.dtype != wanted.dtype:
                return f"{number}.{key} has {own.dtype}, and should have {wanted.dtype}"
            said = difference_of(own, wanted, tolerance_of(number, wanted))
            if said is not None:
                return f"{number}.{key} {said}"
    return None


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
