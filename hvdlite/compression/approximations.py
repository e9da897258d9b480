"""
What is sent of gradients over slow links in place of all numbers: `LowRank`, products of thin matrices, and `TopK`.

    LowRank  M (rows × cols) ── M Q ── P, summed ── orthonormal ── Pᵀ M ── Qᵀ, summed ── P Qᵀ, the sum of all M, nearly
    TopK     values (numel,) ── largest ── places (count,) ── encode ── places as int32, then values as bfloat16

`exchanges.low_rank_exchange` sends P and Q, and keeps Q and what they do not hold for the next step, as PyTorch's
`powerSGD_hook` does (PowerSGD, arXiv 1905.13727). All ranks must make the same bits of equal sums, on any CPU: so
`orthonormal` and `products` consist of single additions, multiplications, divisions and roots in a fixed order,
without matrix products.

`exchanges.host_sums` sends the largest values, and keeps the others for the next step. They are those of a whole
bucket, and not of each block: so the loss falls much faster. Sorting would take longer than all else, so a threshold
is taken from a sample.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..values import MOST, real_number, shown, whole_number
from .codecs import Codec, elements_at_a_time

# Rows of a matrix that are multiplied at a time: fewer take longer.
_LEAST_ROWS = 16

# What is left of a vector is rounding error if subtracting the vectors before it has left less than this part.
_NOISE = 1e-6


class LowRank:
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


# The size of the sample; no sample is taken of fewer than four times as many values.
_SAMPLE = 16 * 1024

# How many more than the wanted values should pass the threshold, since a sample is not exact.
_MARGIN = 1.25

_BYTES = 6


class TopK:
    def __init__(self, density: object, error_decay: object = 1.0) -> None:
        part = real_number(density)
        if part is None or not 0 < part <= 1:
            raise ValueError(
                f"topk: density={shown(density)} is not the part of the gradients to send: above 0, and 1 at most"
            )
        self.density = part
        decay = real_number(error_decay)
        if decay is None or not 0 <= decay <= 1:
            raise ValueError(
                f"topk: error_decay={shown(error_decay)} is not the part of what was not sent that is kept for the "
                "next time: from 0 to 1"
            )
        self.error_decay = decay

    def added(self, values: Tensor, residual: Tensor) -> Tensor:
        """Returns ``values`` and what is left of the ``residual`` as a new tensor, of the dtype of the residual."""
        if self.error_decay == 1.0:
            return residual + values
        # Product and sum are separate operations, so that all processors get the same bits.
        return residual.mul(self.error_decay).add_(values)

    def count(self, numel: int) -> int:
        return math.ceil(self.density * numel)

    def nbytes(self, numel: int) -> int:
        return _BYTES * self.count(numel)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the wire of ``values``, and the places and values in it; NaN and None if some are not finite."""
        count = self.count(values.numel())
        places = torch.zeros(count, dtype=torch.int32, device=values.device)
        sent = torch.zeros(count, dtype=torch.bfloat16, device=values.device)
        largest = _largest(values, count)
        places[: len(largest)].copy_(largest)
        sent[: len(largest)].copy_(values[largest])
        # The sum may overflow where all terms are finite, but it is faster.
        is_finite = math.isfinite(float(values.sum())) or bool(values.isfinite().all())
        is_finite = is_finite and bool(sent.isfinite().all())
        if not is_finite:
            sent.fill_(math.nan)
        wire = torch.cat([places.view(torch.uint8), sent.view(torch.uint8)])
        return wire, largest, sent[: len(largest)] if is_finite else None

    def add_decoded(self, wire: Tensor, out: Tensor) -> None:
        count = len(wire) // _BYTES
        places = wire[: 4 * count].view(torch.int32)
        # A wire with fewer values has zeros for the place 0 at its end.
        out.index_add_(0, places, wire[4 * count :].view(torch.bfloat16).to(out.dtype))

    def __repr__(self) -> str:
        decay = "" if self.error_decay == 1.0 else f", error_decay={self.error_decay}"
        return f"Compression.topk(density={self.density}{decay})"


def _largest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the ``count`` largest values, or of somewhat fewer where the sample was not typical."""
    sizes = values.abs()
    if len(sizes) < 4 * _SAMPLE:
        return torch.topk(sizes, count, sorted=False).indices
    # An odd step, so that it meets all columns of a matrix.
    sample = sizes[:: len(sizes) // _SAMPLE | 1]
    wanted = min(len(sample), math.ceil(_MARGIN * count * len(sample) / len(sizes)))
    threshold = torch.topk(sample, wanted, sorted=False).values.min()
    candidates = torch.nonzero(sizes >= threshold).view(-1)
    if len(candidates) <= count:
        return candidates
    return candidates[torch.topk(sizes[candidates], count, sorted=False).indices]


# What is sent between hosts in place of gradients, cast or not.
Encoding: TypeAlias = Codec | LowRank | TopK
EncodingTypes = (Codec, LowRank, TopK)
