"""
`LowRank`: gradients of matrices as products of two thin ones, for slow links: PowerSGD (arXiv 1905.13727).

    M (rows × cols) ── M Q ── P, summed ── orthonormal ── Pᵀ M ── Qᵀ, summed ── P Qᵀ, the sum of all M, nearly

`exchanges.low_rank_exchange` sends P and Q, and keeps Q and what they do not hold for the next step. The steps are
those of PyTorch's `powerSGD_hook`. All ranks must make the same bits of equal sums, on any CPU: so `orthonormal` and
`products` consist of single additions, multiplications, divisions and roots in a fixed order, without matrix products.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..values import MOST, real_number, shown, whole_number
from .codecs import elements_at_a_time

# Rows of a matrix that are multiplied at a time: fewer take longer.
_LEAST_ROWS = 16

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
    return torch.randn(rank, cols, generator=generator, dtype=torch.float32, device="cpu")


def orthonormal(batch: Sequence[Tensor]) -> list[Tensor]:
    """Returns, for each tensor of shape (rank, length), its rows made orthonormal, as by Gram-Schmidt, in float64.

    Rows that depend on those before them become zeros.
    """
    longest = 1 << (max(each.shape[1] for each in batch) - 1).bit_length()
    most = max(each.shape[0] for each in batch)
    rows = torch.zeros(len(batch), most, longest, dtype=torch.float64, device=batch[0].device)
    for place, each in enumerate(batch):
        rows[place, : each.shape[0], : each.shape[1]].copy_(each)
    # Twice, since once is not exact enough where rows nearly depend on each other.
    for _ in range(2):
        _eliminate(rows)
    return [
        rows[place, : each.shape[0], : each.shape[1]].to(each.dtype).contiguous() for place, each in enumerate(batch)
    ]


def _eliminate(rows: Tensor) -> None:
    """Makes rows orthonormal in place, by Cholesky's decomposition of their products with each other."""
    count = rows.shape[1]
    gram = _gram(rows)
    least = gram.diagonal(dim1=1, dim2=2) * _NOISE**2
    for number in range(count):
        left = gram[:, number, number]
        scale = torch.where(left <= least[:, number], 0.0, left.sqrt().reciprocal()).view(-1, 1, 1)
        row = rows[:, number : number + 1].mul_(scale)
        if number + 1 < count:
            parts = gram[:, number + 1 :, number : number + 1] * scale
            rows[:, number + 1 :].sub_(parts * row)
            gram[:, number + 1 :, number + 1 :].sub_(parts * parts.mT)


def _gram(rows: Tensor) -> Tensor:
    """Returns the products of all rows with each other, of shape (matrices, rows, rows)."""
    at_a_time = max(1, elements_at_a_time() // (rows.shape[1] * rows.shape[2]))
    return torch.cat([_sum(some.unsqueeze(2) * rows.unsqueeze(1)) for some in torch.split(rows, at_a_time, 1)], 1)


def _sum(values: Tensor) -> Tensor:
    """Returns the sums over the last dimension, whose length is a power of two, by adding halves."""
    while values.shape[-1] > 1:
        values = torch.add(*values.chunk(2, -1))
    return values.squeeze(-1)


def times_matrix(p: Tensor, matrix: Tensor) -> Tensor:
    """Returns Pᵀ M of Pᵀ (rank, rows) and M (rows, cols). One thread does it in pieces, which stay in its cache."""
    if matrix.is_cuda or torch.get_num_threads() > 1:
        return torch.mm(p, matrix)
    step = max(_LEAST_ROWS, elements_at_a_time() // (2 * matrix.shape[1]))
    total = matrix.new_zeros(p.shape[0], matrix.shape[1])
    for part, rows in zip(torch.split(p, step, 1), torch.split(matrix, step), strict=True):
        total.addmm_(part, rows)
    return total


def rows_at_a_time(p: Tensor, q: Tensor) -> int:
    """Returns how many rows of P Qᵀ `products` makes at a time: on a GPU all."""
    return p.shape[1] if p.is_cuda else max(1, elements_at_a_time() // q.shape[1])


def products(p: Tensor, q: Tensor) -> Iterator[Tensor]:
    """Yields P Qᵀ, `rows_at_a_time`, of Pᵀ (rank, rows) and Qᵀ (rank, cols), in memory that the next ones overwrite."""
    step, cols = rows_at_a_time(p, q), q.unbind()
    total = p.new_empty(min(step, p.shape[1]), q.shape[1])
    term = torch.empty_like(total)
    for first, *others in zip(*(torch.split(row.unsqueeze(1), step) for row in p), strict=True):
        if len(first) < len(total):
            total, term = total[: len(first)], term[: len(first)]
        torch.mul(first, cols[0], out=total)
        for column, col in zip(others, cols[1:], strict=True):
            total.add_(torch.mul(column, col, out=term))
        yield total
