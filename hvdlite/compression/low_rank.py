"""
`LowRank`: gradients of matrices as products of two thin ones, for slow links: PowerSGD (arXiv 1905.13727).

    M (rows × cols) ── M Q ── P, summed ── orthonormal ── Pᵀ M ── Qᵀ, summed ── P Qᵀ, the sum of all M, nearly

`optim.low_rank_exchange` sends P and Q, and keeps Q and what they do not hold for the next step. The steps are those of
PyTorch's `powerSGD_hook`. All ranks must make the same bits of equal sums, on any CPU: so `orthonormal` and `product`
consist of single additions, multiplications, divisions and roots in a fixed order, without matrix products.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ..values import MOST, real_number, shown, whole_number

# Elements of a product that are made at a time, which stay in the cache.
_PIECE = 32 * 1024

# What is left of a vector is rounding error if subtracting the vectors before it has left less than this part.
_NOISE = 1e-6


class LowRank:
    """The settings of PowerSGD; see `Compression.powersgd`."""

    def __init__(self, rank: object, start_step: object, min_ratio: object) -> None:
        thickness, start, ratio = whole_number(rank), whole_number(start_step), real_number(min_ratio)
        if thickness is None or not 1 <= thickness <= MOST:
            raise ValueError(f"powersgd: rank={shown(rank)} is not a whole number of at least 1, such as 4")
        if start is None or not 0 <= start <= MOST:
            raise ValueError(f"powersgd: start_step={shown(start_step)} is not a number of steps: 0 or more")
        if ratio is None or not ratio > 0:
            raise ValueError(f"powersgd: min_ratio={shown(min_ratio)} is not a positive number, such as 2.0")
        self.rank, self.start_step, self.min_ratio = thickness, start, ratio

    def rank_of(self, rows: int, cols: int) -> int:
        """Returns the rank of the product for a matrix of this shape, or 0 if that would save too little."""
        rank = min(rows, cols, self.rank)
        return rank if (rows + cols) * rank * self.min_ratio < rows * cols else 0

    def __repr__(self) -> str:
        return f"Compression.powersgd(rank={self.rank}, start_step={self.start_step}, min_ratio={self.min_ratio})"


def seeded(name: str, rank: int, cols: int) -> Tensor:
    """Returns the first Qᵀ of the parameter with this name: normally distributed, in float32 and on the CPU."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rank, cols, generator=generator)


def orthonormal(batch: Sequence[Tensor]) -> list[Tensor]:
    """Returns, for each tensor of shape (rank, length), its rows made orthonormal, by Gram-Schmidt in float64.

    Rows that depend on those before them become zeros.
    """
    longest = 1 << (max(each.shape[1] for each in batch) - 1).bit_length()
    most = max(each.shape[0] for each in batch)
    rows = torch.zeros(len(batch), most, longest, dtype=torch.float64, device=batch[0].device)
    for place, each in enumerate(batch):
        rows[place, : each.shape[0], : each.shape[1]].copy_(each)
    for number in range(most):
        row, earlier = rows[:, number], rows[:, :number]
        length = _sum(row * row).sqrt_()
        # Twice, since once is not exact enough where rows nearly depend on each other.
        for _ in range(2 if number else 0):
            parts = _sum(earlier * row.unsqueeze(1))
            for other in range(number):
                row.sub_(parts[:, other].unsqueeze(1) * earlier[:, other])
        left = _sum(row * row).sqrt_()
        row.div_(left.unsqueeze(1))
        row.masked_fill_((left <= _NOISE * length).unsqueeze(1), 0.0)
    return [
        rows[place, : each.shape[0], : each.shape[1]].to(each.dtype).contiguous() for place, each in enumerate(batch)
    ]


def _sum(values: Tensor) -> Tensor:
    """Returns the sums over the last dimension, whose length is a power of two, by adding halves."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = torch.add(values[..., :half], values[..., half:])
    return values.squeeze(-1)


class Product:
    """Makes P Qᵀ, some rows at a time, from Pᵀ of shape (rank, rows) and Qᵀ of shape (rank, cols)."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        self._p, self._q = p, q
        rows, cols = p.shape[1], q.shape[1]
        # On a GPU all at once.
        self._step = rows if p.is_cuda else max(1, _PIECE // cols)
        self._sum = p.new_empty(min(self._step, rows), cols)
        self._term = torch.empty_like(self._sum)

    def pieces(self) -> list[tuple[int, int]]:
        """Returns the first and last row of each piece."""
        rows = self._p.shape[1]
        return [(start, min(start + self._step, rows)) for start in range(0, rows, self._step)]

    def piece(self, start: int, stop: int) -> Tensor:
        """Returns these rows of the product, in memory that the next call overwrites."""
        total, term = self._sum[: stop - start], self._term[: stop - start]
        for number, (column, row) in enumerate(zip(self._p[:, start:stop], self._q, strict=True)):
            if number == 0:
                torch.mul(column.unsqueeze(1), row, out=total)
            else:
                total.add_(torch.mul(column.unsqueeze(1), row, out=term))
        return total
