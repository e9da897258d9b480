"""`horovod.torch.compression`: the compressors, and the base class for a program's own."""

from hvdlite.compression.horovod_compressors import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
