"""
What a bucket looks like on the wire: `Compression.none`, `.fp16`, `.bf16`.

    bucket, scaled ── compress (one cast) ── wire ── summed over ranks ── decompress ── bucket

Scaling comes first, in the bucket's own precision: an average of values that fit the wire does not
overflow it, and each value is rounded once. The seam is `Compressor`: two methods on whole flat buffers.
Parameters and optimizer state keep their dtype; only what travels is smaller.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..values import shown
from .codec import BF16Compressor, FP16Compressor, NoneCompressor, PerTensor
from .codec import Compressor as HorovodCompressor
from .kernels import scale_cast


@runtime_checkable
class Compressor(Protocol):
    """Turns a flat buffer into what is summed across ranks, and back."""

    def compress(self, buffer: Tensor) -> Tensor:
        """The wire, perhaps in fewer bytes; may be ``buffer`` itself."""
        ...

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        """Write the summed wire into ``out``, the buffer that ``compress`` was given."""
        ...


# What users may pass: one of these, or of Horovod's manner, as its class or an object of it.
AnyCompression: TypeAlias = Compressor | HorovodCompressor | type[HorovodCompressor]


class NoCompression:
    """The bucket travels as it is; the wire is the bucket's own memory."""

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        assert wire is out, "compress gave the buffer itself"

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

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.dtype) if self.casts(buffer.dtype) else buffer

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


class Compression:
    """The compressions that come with hvdlite; anything with the two methods of `Compressor` will do."""

    none = NoCompression()
    fp16 = CastCompression(torch.float16, "Compression.fp16")
    bf16 = CastCompression(torch.bfloat16, "Compression.bf16")


def check_compression(compression: object) -> Compressor:
    """The compressor, or a TypeError that lists the ones there are.

    One of Horovod's manner (see `codec`) is brought into this one: a class, or an object of such a class.
    """
    if compression is NoneCompressor:
        return Compression.none
    if compression is FP16Compressor:
        return Compression.fp16
    if compression is BF16Compressor:
        return Compression.bf16
    if isinstance(compression, Compressor):
        in_horovods_manner = isinstance(compression, (type, HorovodCompressor))
        return PerTensor(compression) if in_horovods_manner else compression
    raise TypeError(
        f"compression={shown(compression)} is not a compression: use hvd.Compression.none, hvd.Compression.fp16 "
        "or hvd.Compression.bf16, an object with compress(buffer) and decompress(wire, out), or a class in Horovod's "
        "manner, with static methods compress(tensor) -> (tensor, ctx) and decompress(tensor, ctx)"
    )
