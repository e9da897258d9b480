"""`horovod.torch.compression`: the base class to derive from, and the compressions there are."""

from hvdlite.compression.horovod_compressors import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
