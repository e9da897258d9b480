"""
Reduces terms of several ranks, with any op and dtype, in one fixed order, rounded once.

Narrow dtypes are reduced in a wider one. `collectives` chooses the elements and the memory, and calls
`Arithmetic.into`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Resident data are reduced in blocks of this size, so that the blocks of all ranks stay in a core's cache.
BLOCK_BYTES = 256 * 1024

# torch's stubs lack some of the ops.
_Op: Any = dist.ReduceOp.RedOpType

# Operation headers have indices into these tables, which must be the same on all ranks.
OPS: tuple[Any, ...] = (
    _Op.SUM, _Op.AVG, _Op.PRODUCT, _Op.MIN, _Op.MAX, _Op.BAND, _Op.BOR, _Op.BXOR,
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
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    **_BITWISE,
}
# Narrow dtypes are reduced in a wider one, and rounded once at the end; torch cannot add unsigned integers at all.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    **{dtype: torch.float32 for dtype in DTYPES if dtype.is_floating_point and dtype.itemsize == 1},
}
_LOWEST = -(2**63)


class Arithmetic:
    """One op on one dtype over ``size`` ranks; a ValueError if it is not defined."""

    def __init__(self, op: Any, dtype: torch.dtype, size: int) -> None:
        _require_defined(op, dtype)
        # Compared between ranks in the operation's signature, besides the dtype.
        self.op_number = OPS.index(op)
        self._combine = _BINARY[op]
        self.dtype = dtype
        self._size = size
        # The sum is scaled, and not each term: in a wider dtype it does not overflow. The scalars are tensors, since
        # PyTorch would make one of a number at each call. For powers of two, multiplying by the inverse gives the same
        # bits as dividing, in half the time.
        self._factor = self._divisor = None
        if op == _Op.AVG and dtype.is_floating_point and size & (size - 1) == 0:
            self._factor = torch.tensor(1.0 / size, dtype=torch.float64, device="cpu")
        elif op == _Op.AVG:
            self._divisor = torch.tensor(float(size), dtype=torch.float64, device="cpu")
        self._flips = dtype == torch.uint64 and op in (_Op.MIN, _Op.MAX)
        # torch adds two narrow floats in float32, and rounds once.
        is_plain = size <= 2 and dtype in (torch.float16, torch.bfloat16) and op != _Op.AVG
        self._wide = None if is_plain else _WIDE.get(dtype)
        self._scratch: list[Tensor] = []

    @property
    def is_wide(self) -> bool:
        """Whether terms are reduced in a wider dtype, in memory of this object's own."""
        return self._wide is not None

    def into(self, terms: Sequence[Tensor], result: Tensor, *, is_apart: bool = False) -> None:
        """Reduces flat tensors of equal length into ``result``, which may be one of them unless ``is_apart``."""
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
        # The first two terms are read before the result is written, but the later ones are not.
        if len(terms) <= 2 or is_apart or result is terms[0]:
            self._chain(terms, result)
        else:
            total = self._memory(result.dtype, result.numel())
            self._chain(terms, total)
            result.copy_(total)
        self._scale(result)

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
        self._scale(total)
        result.copy_(total)

    def _scale(self, total: Tensor) -> None:
        if self._divisor is not None:
            total.div_(self._divisor)
        elif self._factor is not None:
            total.mul_(self._factor)

    def _memory(self, dtype: torch.dtype, numel: int, number: int = 0) -> Tensor:
        while len(self._scratch) <= number or self._scratch[number].numel() < numel:
            del self._scratch[number:]
            # It is written in later calls, too, which may be outside of `torch.inference_mode`.
            with torch.inference_mode(False):
                self._scratch.append(torch.empty(numel, dtype=dtype, device="cpu"))
        return self._scratch[number][:numel]


def _require_defined(op: Any, dtype: torch.dtype) -> None:
    if op not in _BINARY:
        raise ValueError(f"hvdshm does not support the reduction {op}")
    if dtype not in DTYPES:
        raise ValueError(f"hvdshm does not support the dtype {dtype}")
    name = str(op).rpartition(".")[2]
    inexact = dtype.is_floating_point or dtype.is_complex
    if op in _BITWISE and inexact:
        raise ValueError(f"{name} needs integers or bool, and the tensor is {dtype}")
    if op == _Op.AVG and not inexact:
        raise ValueError(f"{name} needs a floating-point tensor, and this one is {dtype}")
    if op in (_Op.MIN, _Op.MAX) and dtype.is_complex:
        raise ValueError(f"{name} is not defined for {dtype}")
