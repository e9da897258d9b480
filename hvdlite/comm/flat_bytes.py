"""
Tensors as flat bytes, and back: what travels, whatever it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as a flat tensor of bytes, without a copy."""
    # Not reshape(-1), which keeps the stride of a tensor of one element, whatever that is.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pieces_of(flat: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of a tensor's elements (or rows), as many as each of the counts says, one after the other."""
    stops = list(accumulate(counts))
    return [flat[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]
