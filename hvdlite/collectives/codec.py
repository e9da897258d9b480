"""
Compressions in Horovod's manner: a class whose two static methods take one tensor and pass a context along.

    tensor ── compress ── (wire, context) ── ... ── decompress(wire, context) ── tensor

For programs that were written for Horovod, and that wrote such classes themselves or call these methods. What a bucket
goes through is the seam in `compression`, which takes these classes too: `PerTensor` stands between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The base of Horovod's compressions; one of your own has these two static methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and whatever `decompress` needs besides."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What the tensor would be if it had travelled uncompressed; ``ctx`` is what `compress` gave."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Floating-point tensors travel in a narrower dtype, unless they are no wider; others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        is_wider = tensor.is_floating_point() and tensor.element_size() > cls.dtype.itemsize
        return (tensor.to(cls.dtype) if is_wider else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Floating-point tensors travel as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Floating-point tensors travel as bfloat16, which Horovod does not have."""

    dtype = torch.bfloat16


class Compression:
    """The compressions there are, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class PerTensor:
    """A compression of Horovod's manner where a `compression.Compressor` is wanted; it sees whole buckets."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec
        # By the wire that is under way; its owner holds it until it is decompressed.
        self._contexts: dict[int, Any] = {}

    def compress(self, buffer: Tensor) -> Tensor:
        pair = self._codec.compress(buffer)
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Tensor)):
            raise TypeError(f"compression={self!r}: compress(tensor) returned {type(pair).__name__}, not (tensor, ctx)")
        wire = pair[0].contiguous()
        self._contexts[id(wire)] = pair[1]
        return wire

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        result = self._codec.decompress(wire, self._contexts.pop(id(wire)))
        if result is not out:
            out.copy_(result.reshape(out.shape))

    def __repr__(self) -> str:
        kind = self._codec if isinstance(self._codec, type) else type(self._codec)
        return f"{kind.__module__}.{kind.__qualname__}"
