"""
Compressions whose wires can be summed: `Compression.none`, `.fp16`, `.bf16`, and the `Compressor` of a user's own.

    bucket ── compress (one cast) ── wire ── summed over ranks ── decompress ── bucket

A *wire* is the tensor that is sent. Values for a 16-bit wire are scaled before the cast, in the bucket's own precision.
So an average of values that fit the wire does not overflow it, and each value is rounded once. Wider wires are summed,
and the sum is divided. Parameters and optimizer state keep their dtype.

`exchanges.builtin_exchanges` (gradients) and `ops.reduction` (operations' tensors) do the casts; `custom` calls a
user's own compression. A format that cannot be summed, such as int4 with a scale, is a `codecs.Codec`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..values import shown
from .approximations import Encoding, EncodingTypes, LowRank, TopK
from .codecs import Int4, Int8
from .custom import BF16Compressor, CustomCompression, FP16Compressor, NoneCompressor
from .custom import Compressor as HorovodCompressor
from .kernels import scale_cast


@runtime_checkable
class Compressor(Protocol):
    """The interface of a user's own compression: turns floats into a wire, which is summed over the ranks, and back.

    An optimizer passes the gradients of a bucket, one after the other in a flat buffer. An operation passes each tensor
    alone, in its shape. The values are not scaled: hvdlite scales the wire, according to its dtype. An average is the
    sum of the wires, divided. Averages of integers are truncated towards zero. 16-bit floats are divided before the
    sum.
    """

    def compress(self, buffer: Tensor) -> Tensor:
        """Returns the wire, of the same dtype and size on every rank. It may be ``buffer`` itself."""
        ...

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        """Writes the wire, summed or averaged, into ``out``, the buffer that ``compress`` was given."""
        ...


# The types of compression that users may pass; one in Horovod's style as a class or an instance.
AnyCompression: TypeAlias = Compressor | HorovodCompressor | type[HorovodCompressor] | Encoding


class NoCompression:
    def compress(self, buffer: Tensor) -> Tensor:
        return buffer

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        assert wire is out, "compress gave the buffer itself"

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def __repr__(self) -> str:
        return "Compression.none"


class CastCompression:
    """Casts a bucket to a narrower floating dtype. Buckets that are not wider are sent in their own dtype."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        self.dtype = dtype
        self._name = name

    def casts(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize > self.dtype.itemsize

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.casts(dtype) else dtype

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.wire_dtype(buffer.dtype))

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        if wire is not out:
            out.copy_(wire)

    @staticmethod
    def convert(source: Tensor, factor: float, scaled_numel: int, out: Tensor) -> None:
        """Casts ``source`` into ``out``, either way, and scales the first ``scaled_numel`` elements by ``factor``."""
        if factor == 1.0:
            out.copy_(source)
        else:
            scale_cast(source[:scaled_numel], factor, out[:scaled_numel])
            out[scaled_numel:].copy_(source[scaled_numel:])

    def __repr__(self) -> str:
        return self._name


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether floats of this dtype must be scaled before they are summed, since the sum of a few may overflow."""
    return dtype.itemsize <= 2


class Compression:
    """The built-in compressions. Any object with the two methods of `Compressor` is one too, and any `Codec`.

    ``int8``, ``int4``, `powersgd` and `topk` are for the gradients of a `DistributedOptimizer`, between hosts with slow
    links.
    """

    none = NoCompression()
    fp16 = CastCompression(torch.float16, "Compression.fp16")
    bf16 = CastCompression(torch.bfloat16, "Compression.bf16")
    int8 = Int8()
    int4 = Int4()

    @staticmethod
    def powersgd(rank: int = 4, start_step: int = 1000, min_ratio: float = 2.0) -> LowRank:
        """Returns PowerSGD (arXiv 1905.13727): gradients of matrices are sent as products of two thin ones.

        ``rank`` is the number of columns of both. The first ``start_step`` steps, which decide more than later ones,
        are not compressed. Gradients of one dimension are never, and neither are those that this would make less than
        ``min_ratio`` times shorter. What the product does not hold is added to the next step's gradients.
        """
        return LowRank(rank, start_step, min_ratio)

    @staticmethod
    def topk(density: float = 0.01, error_decay: float = 1.0) -> TopK:
        """Returns top-k (arXiv 1712.01887): of each bucket only the largest values are sent, with their places.

        ``density`` is the part of the values that is sent, above 0 and 1 at most. Each takes 6 bytes. The others are
        added to the next step's gradients, times ``error_decay``, from 0 to 1. Below 1 it forgets: 0.95 for the outer
        gradients of `DiLoCo` without momentum is SparseLoCo (arXiv 2508.15706).
        """
        return TopK(density, error_decay)


# A compression after `check_compression`.
ResolvedCompression: TypeAlias = NoCompression | CastCompression | CustomCompression


def check_compression(compression: object, own: str = ".none, .fp16 or .bf16") -> ResolvedCompression:
    """Returns hvdlite's own form of the compression that a user has passed. Raises TypeError if it is none.

    ``own`` has the names in `Compression` that the caller takes. A compression in Horovod's style (see
    `custom`) may be a class or an instance of one.
    """
    if type(compression) in (NoCompression, CastCompression):
        return compression  # type: ignore[return-value]  # mypy does not take it from the line above
    if compression is NoneCompressor:
        return Compression.none
    if compression is FP16Compressor:
        return Compression.fp16
    if compression is BF16Compressor:
        return Compression.bf16
    if isinstance(compression, EncodingTypes):
        raise ValueError(
            f"compression={compression!r} makes wires that cannot be summed: it is for the gradients of an "
            "hvd.DistributedOptimizer; use hvd.Compression.fp16 or .bf16 here"
        )
    if isinstance(compression, Compressor):
        return CustomCompression(compression, takes_each=isinstance(compression, (type, HorovodCompressor)))
    raise TypeError(
        f"compression={shown(compression)} is not a compression: use hvd.Compression{own}, an object with "
        "compress(buffer) and decompress(wire, out), or a class in Horovod's manner, with static methods "
        "compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx)"
    )
