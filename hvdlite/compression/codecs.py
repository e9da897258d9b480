"""
Codecs: formats whose wires cannot be summed, such as int8 with a scale per block, for slow links between hosts.

    values ── encode ── wire (bytes) ── sent ── decode ── values, summed over the ranks by `optim.encoded`

A wire is encoded and decoded in pieces that stay in a core's cache, by `encode_all` and `add_decoded`. Decoding is the
same multiplication on every rank, and the sums are in rank order, so all ranks get equal bits.

The formats are those of CGX (arXiv 2111.08617) and ZeRO++ (arXiv 2306.10209): numbers are rounded to multiples of a
scale, which each block of neighbours has of its own. With error feedback (arXiv 1901.09847) a rank adds what rounding
has taken from a gradient to the next one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

# Elements that are encoded at a time: a piece and its copies stay in the cache, and are too few for OpenMP's threads.
_PIECE = 32 * 1024

# Blocks whose largest number is smaller are sent as zeros: a scale must have an inverse.
_TINY = 1e-30


class Codec(ABC):
    """The interface of a format that cannot be summed: turns floats into bytes, and these back into floats.

    It has no state, and gets whole blocks of `block` numbers: several, one after the other, in a flat tensor that is
    float32, or float64 for float64 gradients, on the gradients' device. Numbers that are not finite must decode to
    some that are not, so that a GradScaler finds them.
    """

    block: ClassVar[int] = 256
    """The number of elements that are encoded together. ``nbytes(block)`` must be a multiple of 4."""

    error_feedback: ClassVar[bool] = True
    """Whether what a wire cannot hold is kept, and added to the next step's gradients. It takes their memory."""

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Returns the size of the wire of ``numel`` values, a multiple of `block`."""

    @abstractmethod
    def encode(self, values: Tensor, out: Tensor) -> None:
        """Writes the wire of ``values`` into ``out``, a flat tensor of uint8. It may overwrite ``values``."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Writes the values of a wire into ``out``, of the dtype that `encode` was given."""

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


class _Scaled(Codec):
    """Rounds to multiples of a float32 scale per block, up to ``most`` times it: scales first, then the multiples."""

    most: ClassVar[float]

    def _multiples(self, values: Tensor, out: Tensor) -> Tensor:
        """Writes the scales into ``out``, and returns the multiples as floats, of shape (blocks, block)."""
        blocks = values.view(-1, self.block)
        largest = torch.amax(blocks.abs(), 1, keepdim=True)
        scales = out[: 4 * len(blocks)].view(torch.float32).view(-1, 1)
        scales.copy_(largest / self.most)
        scales.masked_fill_(~torch.isfinite(largest), math.nan)
        scales.masked_fill_(largest < _TINY, 0.0)
        inverse = torch.where(scales == 0, 0.0, scales.to(values.dtype).reciprocal())
        return torch.mul(blocks, inverse, out=blocks).round_()

    def _scales(self, wire: Tensor, blocks: int) -> Tensor:
        return wire[: 4 * blocks].view(torch.float32).view(-1, 1)


class Int8(_Scaled):
    """8-bit integers, and a scale for each 256 of them: about a quarter of float32."""

    most = 127.0

    def nbytes(self, numel: int) -> int:
        return numel + 4 * (numel // self.block)

    def encode(self, values: Tensor, out: Tensor) -> None:
        multiples = self._multiples(values, out)
        out[4 * len(multiples) :].view(torch.int8).view(multiples.shape).copy_(multiples)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        blocks = out.view(-1, self.block)
        blocks.copy_(wire[4 * len(blocks) :].view(torch.int8).view(blocks.shape))
        blocks.mul_(self._scales(wire, len(blocks)))

    def __repr__(self) -> str:
        return "Compression.int8"


class Int4(_Scaled):
    """4-bit integers from -7 to 7, and a scale for each 256 of them: about an eighth of float32.

    A byte has one number of the first half of its block in its low bits, and one of the second half in its high bits.
    """

    most = 7.0

    def nbytes(self, numel: int) -> int:
        return numel // 2 + 4 * (numel // self.block)

    def encode(self, values: Tensor, out: Tensor) -> None:
        multiples = self._multiples(values, out)
        codes = multiples.add_(8.0).to(torch.uint8)
        low, high = codes[:, : self.block // 2], codes[:, self.block // 2 :]
        packed = out[4 * len(codes) :].view(low.shape)
        torch.bitwise_left_shift(high, 4, out=packed)
        packed.bitwise_or_(low)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        blocks, half = out.view(-1, self.block), self.block // 2
        packed = wire[4 * len(blocks) :].view(-1, half)
        blocks[:, :half].copy_(packed & 15)
        blocks[:, half:].copy_(packed >> 4)
        blocks.sub_(8.0).mul_(self._scales(wire, len(blocks)))

    def __repr__(self) -> str:
        return "Compression.int4"


def wire_bytes(codec: Codec, numel: int) -> int:
    """Returns the size of the wire that `encode_all` writes for ``numel`` values, any number."""
    return codec.nbytes(-(-numel // codec.block) * codec.block)


def encode_all(codec: Codec, values: Tensor, wire: Tensor, residual: Tensor | None, factor: float = 1.0) -> None:
    """Writes the wire of flat ``values`` times ``factor``, and of ``residual``, which gets what the wire does not hold.

    Where that is not finite, the residual stays as it was. ``values`` are floats of any dtype, and stay unchanged.
    """
    whole = torch.empty(_piece_of(codec), dtype=working_dtype(values.dtype), device=values.device)
    for start, stop, sent in _pieces(codec, values.numel()):
        given = whole[: stop - start]
        padded = whole[: -(-(stop - start) // codec.block) * codec.block]
        padded[stop - start :].zero_()
        given.copy_(values[start:stop])
        if factor != 1.0:
            given.mul_(factor)
        if residual is None:
            codec.encode(padded, wire[sent])
            continue
        kept = residual[start:stop]
        wanted = given.add_(kept).clone()
        codec.encode(padded, wire[sent])
        codec.decode(wire[sent], padded)
        # The sum may overflow where all terms are finite, but it is faster.
        if math.isfinite(float(given.sum())) or bool(given.isfinite().all()):
            torch.sub(wanted, given, out=kept)


def add_decoded(codec: Codec, wires: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
    """Writes the sum of what equally long wires hold into flat ``out``, in the order of ``wires``, times ``factor``.

    It is rounded to the dtype of ``out`` once.
    """
    total = torch.empty(_piece_of(codec), dtype=working_dtype(out.dtype), device=out.device)
    term = torch.empty_like(total)
    for start, stop, sent in _pieces(codec, out.numel()):
        length = -(-(stop - start) // codec.block) * codec.block
        first, *others = (wire[sent] for wire in wires)
        codec.decode(first, total[:length])
        for other in others:
            codec.decode(other, term[:length])
            total[:length].add_(term[:length])
        if factor != 1.0:
            total[:length].mul_(factor)
        out[start:stop].copy_(total[: stop - start])


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the sums and residuals of gradients of ``dtype``, which is real."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _piece_of(codec: Codec) -> int:
    return max(1, _PIECE // codec.block) * codec.block


def _pieces(codec: Codec, numel: int) -> Iterator[tuple[int, int, slice]]:
    """Yields the first and last elements of each piece, and the bytes that it has in a wire."""
    piece, at = _piece_of(codec), 0
    for start in range(0, numel, piece):
        stop = min(start + piece, numel)
        nbytes = wire_bytes(codec, stop - start)
        yield start, stop, slice(at, at + nbytes)
        at += nbytes
