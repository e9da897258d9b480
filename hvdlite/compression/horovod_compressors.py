"""
Compressions in Horovod's style: classes whose two static methods take one tensor and pass a context along.

    tensor ── compress ── (wire, context) ── ... ── decompress(wire, context) ── tensor

They are for programs written for Horovod, which derive from these classes or call their methods. hvdlite accepts them
wherever it takes a compression: `casts` maps these to its own, and `custom` calls classes that users have derived.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The base class of Horovod's compressions. Your own overrides these two static methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Returns the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Returns the decompressed tensor; ``ctx`` is the context that `compress` returned."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors uncompressed."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Casts floating-point tensors that are wider than ``dtype`` to it. Sends other tensors uncompressed."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        is_wider = tensor.is_floating_point() and tensor.element_size() > cls.dtype.itemsize
        return (tensor.to(cls.dtype) if is_wider else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Casts floating-point tensors to float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Casts floating-point tensors to bfloat16, which Horovod does not have."""

    dtype = torch.bfloat16


class Compression:
    """The built-in compressions, under Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
