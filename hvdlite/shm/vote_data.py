"""
`VoteData`: one slot of the data that ranks write beside their votes, at most `PAYLOAD_BYTES` of each rank.

    every rank ── write ── vote ── a go ── elements, reduced: every rank reads all ranks' data

`board` says when a slot is written and read; `ops.direct` reads it. A thread whose call was handed over to another may
go on to read its slot: what it makes then is dropped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arithmetic import Arithmetic

_REMEMBERED = 256


class VoteData:
    """One rank's view of a slot."""

    def __init__(self, rank: int, pieces: Sequence[Tensor]) -> None:
        """``pieces`` are the bytes of the slot, by rank."""
        self._rank, self._pieces = rank, pieces
        self._own = pieces[rank].data_ptr()
        self._elements: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._arithmetics: dict[tuple[object, torch.dtype], Arithmetic] = {}

    def write(self, address: int, nbytes: int) -> None:
        """Copies this rank's data, ``nbytes`` at ``address``."""
        ctypes.memmove(self._own, address, nbytes)

    def copy(self) -> VoteData:
        """Returns the same data in memory of this process, for another thread."""
        return VoteData(self._rank, [piece.clone() for piece in self._pieces])

    def elements(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Returns the first elements of each rank's data, in rank order: views of the slot."""
        key = (dtype, numel)
        found = self._elements.get(key)
        if found is None:
            if len(self._elements) >= _REMEMBERED:
                self._elements.clear()
            nbytes = numel * dtype.itemsize
            found = self._elements[key] = [piece[:nbytes].view(dtype) for piece in self._pieces]
        return found

    def reduced(self, op: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns all ranks' tensors of this shape, reduced by an op of torch.distributed as `reductions` does it."""
        arithmetic = self._arithmetics.get((op, dtype))
        if arithmetic is None:
            arithmetic = Arithmetic(op, dtype, len(self._pieces))
            # The memory of those that have some is for one thread at a time; a thread that was handed over may go on.
            if not arithmetic.is_wide:
                self._arithmetics[op, dtype] = arithmetic
        result = torch.empty(shape, dtype=dtype, device="cpu")
        arithmetic.into(self.elements(dtype, result.numel()), result.view(-1), is_apart=True)
        return result
