"""
Compressions in Horovod's manner: a class whose two static methods take one tensor and pass a context along.

    tensor ── compress ── (wire, context) ── ... ── decompress(wire, context) ── tensor

For programs that were written for Horovod, and that wrote such classes themselves or call these methods. Where a
compression is wanted these classes will do too: see `casts`, and `custom` for those that are not known here.
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
