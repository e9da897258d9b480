"""Sample tensors in every dtype and shape that any rank can compute for every rank, and the expected reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

import hvdlite as hvd

WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*WHOLE, *FLOATS, *COMPLEX, torch.bool]
SHAPES = [(), (0,), (5,), (4, 0), (3, 2), (2, 1, 3)]


def sample(rank: int, dtype: torch.dtype, shape: Sequence[int], *, positive: bool = False) -> Tensor:
    """Makes a rank's tensor of small numbers; sums and products over four ranks are exact in every dtype."""
    numel = torch.Size(shape).numel()
    numbers = (torch.arange(numel) * (rank + 1) + rank) % 3 + 1
    if dtype is torch.bool:
        return (numbers == 2).reshape(shape)
    if dtype is not torch.uint8 and not positive:
        numbers = torch.where(torch.arange(numel) % 2 == rank % 2, numbers, -numbers)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers % 2).double()).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def combined(op: hvd.ReduceOp, tensors: Sequence[Tensor]) -> Tensor:
    """Computes the expected result of reducing all ranks' tensors."""
    dtype, size = tensors[0].dtype, len(tensors)
    if op in (hvd.Min, hvd.Max):
        return reduce(torch.minimum if op is hvd.Min else torch.maximum, tensors)
    wide = [tensor.to(_wide(dtype)) for tensor in tensors]
    total = reduce(torch.mul if op is hvd.Product else torch.add, wide)
    if op is hvd.Average:
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        total = torch.div(total, size, rounding_mode="trunc" if is_whole else None)
    return total.to(dtype)


def close(got: Tensor, expected: Tensor) -> None:
    """Asserts equal dtype, shape and numbers, except for the rounding of an average."""
    if got.dtype == expected.dtype and torch.equal(got, expected):
        # The usual case, checked much faster than below.
        return
    rough = got.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=2e-2 if rough else 1e-6, atol=2e-2 if rough else 1e-6)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
