"""
Casts gradients to 16 bits for the wire: `Compression.none`, `.fp16`, `.bf16`, and the `Compressor` interface for a
user's own. Formats that cannot be summed as they are, such as 4 bits with a scale, are an `optim.exchange.Exchange`.

    bucket ── compress (one cast) ── wire ── summed over ranks ── decompress ── bucket

A wire of 16 bits carries what has been scaled before, in the bucket's own precision: an average of values that fit the
wire does not overflow it, and each value is rounded once. The sum of wider ones is divided. Compressions of a user's
own are called by `custom`. An `Exchange` can also keep error feedback for each parameter. Parameters and optimizer
state keep their dtype; only what travels is smaller.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..values import shown
from .custom import CustomCompression
from .horovod_compressors import BF16Compressor, FP16Compressor, NoneCompressor
from .horovod_compressors import Compressor as HorovodCompressor
from .kernels import scale_cast


@runtime_checkable
class Compressor(Protocol):
    """Turns floats into what is summed across ranks, and back.

    In an optimizer they are the gradients of a bucket, one after the other in a flat buffer, and nothing else; of an
    operation each tensor alone, in its shape. They are not scaled: the wire is, by its own dtype. An average is the sum
    of the wires, divided; integers are truncated towards zero, and of 16 bits floats are divided before the sum.
    """

    def compress(self, buffer: Tensor) -> Tensor:
        """The wire, perhaps in fewer bytes, of the same dtype and size on every rank; may be ``buffer`` itself."""
        ...

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        """Write the wire, summed or averaged, into ``out``, the buffer that ``compress`` was given."""
        ...


# What users may pass: one of these, or of Horovod's manner, as its class or an object of it.
AnyCompression: TypeAlias = Compressor | HorovodCompressor | type[HorovodCompressor]


class NoCompression:
    """The bucket travels as it is; the wire is the bucket's own memory."""

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        assert wire is out, "compress gave the buffer itself"

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which floats of this one travel."""
        return dtype

    def __repr__(self) -> str:
        return "Compression.none"


class CastCompression:
    """The bucket travels in a narrower floating dtype; buckets that are no wider travel as they are."""

    def __init__(self, dtype: torch.dtype, name: str) -> None:
        self.dtype = dtype
        self._name = name

    def casts(self, dtype: torch.dtype) -> bool:
        """Whether buffers of this dtype travel in the narrower one."""
        return dtype.itemsize > self.dtype.itemsize

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which floats of this one travel."""
        return self.dtype if self.casts(dtype) else dtype

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.wire_dtype(buffer.dtype))

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        if wire is not out:
            out.copy_(wire)

    @staticmethod
    def convert(source: Tensor, factor: float, scaled_numel: int, out: Tensor) -> None:
        """Cast a buffer into its wire, or that into the buffer, and scale the first elements on the way."""
        if factor == 1.0:
            out.copy_(source)
        else:
            scale_cast(source[:scaled_numel], factor, out[:scaled_numel])
            out[scaled_numel:].copy_(source[scaled_numel:])

    def __repr__(self) -> str:
        return self._name


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether floats of it are scaled before they are summed, since the sum of a few may overflow it."""
    return dtype.itemsize <= 2


class Compression:
    """The compressions that come with hvdlite; anything with the two methods of `Compressor` will do."""

    none = NoCompression()
    fp16 = CastCompression(torch.float16, "Compression.fp16")
    bf16 = CastCompression(torch.bfloat16, "Compression.bf16")


# How tensors travel, once it is known what the user has passed.
ResolvedCompression: TypeAlias = NoCompression | CastCompression | CustomCompression


def check_compression(compression: object) -> ResolvedCompression:
    """How tensors travel, or a TypeError that lists the ways there are.

    Of Horovod's manner (see `horovod_compressors`) is a class, or an object of such a class.
    """
    if type(compression) in (NoCompression, CastCompression):
        return compression  # type: ignore[return-value]  # mypy does not take it from the line above
    if compression is NoneCompressor:
        return Compression.none
    if compression is FP16Compressor:
        return Compression.fp16
    if compression is BF16Compressor:
        return Compression.bf16
    if isinstance(compression, Compressor):
        return CustomCompression(compression, takes_each=isinstance(compression, (type, HorovodCompressor)))
    raise TypeError(
        f"compression={shown(compression)} is not a compression: use hvd.Compression.none, hvd.Compression.fp16 "
        "or hvd.Compression.bf16, an object with compress(buffer) and decompress(wire, out), or a class in Horovod's "
        "manner, with static methods compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx)"
    )
