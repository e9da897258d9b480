"""
Reduces several ranks' memory: any op and dtype, in one fixed order, rounded once.

    the same elements of all ranks ── in the dtype that keeps them exact enough ── one result

`reductions` decides which elements, and of whose memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# So many elements at once, so that those of all ranks stay in a core's cache from the first pass to the last.
BLOCK_BYTES = 256 * 1024

# torch's own stubs know only some of them.
_Op: Any = dist.ReduceOp.RedOpType

# In these numbers the same for all ranks' headers.
OPS: tuple[Any, ...] = (
    _Op.SUM, _Op.AVG, _Op.PRODUCT, _Op.MIN, _Op.MAX, _Op.BAND, _Op.BOR, _Op.BXOR, _Op.PREMUL_SUM,
)  # fmt: skip
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip

_BITWISE = {_Op.BAND: torch.bitwise_and, _Op.BOR: torch.bitwise_or, _Op.BXOR: torch.bitwise_xor}
_BINARY: dict[Any, Callable[..., Tensor]] = {
    _Op.SUM: torch.add,
    _Op.AVG: torch.add,
    _Op.PREMUL_SUM: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    **_BITWISE,
}
# Narrow ones are added in a wider one and rounded once, at the end; torch cannot add the unsigned ones at all.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    **{dtype: torch.float32 for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize == 1},
}
_SCALING = frozenset({_Op.AVG, _Op.PREMUL_SUM})


class Arithmetic:
    """One op on one dtype over some ranks; a ValueError if there is no such thing."""

    def __init__(self, op: Any, dtype: torch.dtype, size: int, factor: float | None = None) -> None:
        """``factor`` is that of PREMUL_SUM, by which every term is multiplied."""
        _require_defined(op, dtype)
        self._combine = _BINARY[op]
        self.dtype = dtype
        self._size = size
        # The sum of terms that are multiplied is the sum, multiplied; in a wider dtype nothing overflows by it.
        self._factor = 1.0 / size if op == _Op.AVG else factor
        self._divisor = size if op == _Op.AVG else None
        self._flips = dtype == torch.uint64 and op in (_Op.MIN, _Op.MAX)
        # Of two terms torch itself adds narrow floats in float32, and rounds once.
        is_plain = size <= 2 and dtype in (torch.float16, torch.bfloat16) and op not in _SCALING
        self._wide = None if is_plain else _WIDE.get(dtype)
        self._scratch: list[Tensor] = []

    def into(self, terms: Sequence[Tensor], result: Tensor, *, is_apart: bool = False) -> None:
        """Combine equally long flat tensors, at most a block; ``result`` may be one of them, unless it ``is_apart``."""
        if self._wide is not None:
            self._into_wide(terms, result)
            return
        if self.dtype == torch.uint64:
            terms, result = [term.view(torch.int64) for term in terms], result.view(torch.int64)
        if self._flips:
            flipped = [torch.bitwise_xor(term, _LOWEST) for term in terms]
            self._chain(flipped, flipped[0])
            torch.bitwise_xor(flipped[0], _LOWEST, out=result)
            return
        # The first two terms are read before the result is written, those after them are not.
        if len(terms) <= 2 or is_apart or result is terms[0]:
            self._chain(terms, result)
        else:
            total = self._memory(result.dtype, result.numel())
            self._chain(terms, total)
            result.copy_(total)
        if self._divisor is not None:
            result.div_(self._divisor)
        elif self._factor is not None:
            result.mul_(self._factor)

    def _chain(self, terms: Sequence[Tensor], total: Tensor) -> None:
        if len(terms) == 1:
            if total is not terms[0]:
                total.copy_(terms[0])
            return
        self._combine(terms[0], terms[1], out=total)
        for term in terms[2:]:
            self._combine(total, term, out=total)

    def _into_wide(self, terms: Sequence[Tensor], result: Tensor) -> None:
        assert self._wide is not None, "checked by the caller"
        numel = result.numel()
        total, term_wide = self._memory(self._wide, numel), self._memory(self._wide, numel, 1)
        total.copy_(terms[0])
        for term in terms[1:]:
            term_wide.copy_(term)
            self._combine(total, term_wide, out=total)
        if self._divisor is not None:
            total.div_(self._divisor)
        elif self._factor is not None:
            total.mul_(self._factor)
        result.copy_(total)

    def _memory(self, dtype: torch.dtype, numel: int, number: int = 0) -> Tensor:
        while len(self._scratch) <= number or self._scratch[number].numel() < numel:
            del self._scratch[number:]
            self._scratch.append(torch.empty(numel, dtype=dtype))
        return self._scratch[number][:numel]


_LOWEST = -(2**63)


def factor_of(op: dist.ReduceOp) -> float | None:
    """The factor of PREMUL_SUM; None for the other ops."""
    state: Any = op.__getstate__()  # (kind, factor)
    return float(state[1]) if len(state) > 1 and state[1] is not None else None


def _require_defined(op: Any, dtype: torch.dtype) -> None:
    if op not in _BINARY:
        raise ValueError(f"hvdshm cannot reduce by {op}")
    if dtype not in DTYPES:
        raise ValueError(f"hvdshm cannot reduce {dtype}")
    name = str(op).rpartition(".")[2]
    inexact = dtype.is_floating_point or dtype.is_complex
    if op in _BITWISE and inexact:
        raise ValueError(f"{name} is for integers and bool, and the tensor is {dtype}")
    if op in _SCALING and not inexact:
        raise ValueError(f"{name} is for floating-point tensors, and the tensor is {dtype}")
    if op in (_Op.MIN, _Op.MAX) and dtype.is_complex:
        raise ValueError(f"{name} has no meaning for {dtype}")
