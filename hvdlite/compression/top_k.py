"""
`TopK`: the largest numbers of a gradient with their places, instead of all of them, for slow links between hosts.

    values (numel,) ── largest ── places (count,) ── encode ── places as int32, then values as bfloat16

`exchanges.host_sums` sends the wires, and keeps what is not in them for the next step. The largest are those of a
whole bucket, and not of each block: so the loss falls much faster. Sorting would take longer than all else, so a
threshold is taken from a sample.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from ..values import real_number, shown
from .codecs import Codec
from .low_rank import LowRank

# The size of the sample; no sample is taken of fewer than four times as many values.
_SAMPLE = 16 * 1024

# How many more than the wanted values should pass the threshold, since a sample is not exact.
_MARGIN = 1.25

_BYTES = 6


class TopK:
    """The settings of top-k; see `Compression.topk`."""

    def __init__(self, density: object, error_decay: object = 1.0) -> None:
        part = real_number(density)
        if part is None or not 0 < part <= 1:
            raise ValueError(
                f"topk: density={shown(density)} is not the part of the gradients to send: above 0, and 1 at most"
            )
        self.density = part
        decay = real_number(error_decay)
        if decay is None or not 0 <= decay <= 1:
            raise ValueError(
                f"topk: error_decay={shown(error_decay)} is not the part of what was not sent that is kept for the "
                "next time: from 0 to 1"
            )
        self.error_decay = decay

    def added(self, values: Tensor, residual: Tensor) -> Tensor:
        """Returns ``values`` and what is left of the ``residual`` as a new tensor, of the dtype of the residual."""
        if self.error_decay == 1.0:
            return residual + values
        # Product and sum are separate operations, so that all processors get the same bits.
        return residual.mul(self.error_decay).add_(values)

    def count(self, numel: int) -> int:
        """Returns how many of ``numel`` values are sent."""
        return math.ceil(self.density * numel)

    def nbytes(self, numel: int) -> int:
        """Returns the size of the wire of ``numel`` values."""
        return _BYTES * self.count(numel)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the wire of flat ``values``, and the places and values that it has, at most `count`.

        Where ``values`` are not finite, the wire has NaN, and the third is None.
        """
        count = self.count(values.numel())
        places = torch.zeros(count, dtype=torch.int32, device=values.device)
        sent = torch.zeros(count, dtype=torch.bfloat16, device=values.device)
        largest = _largest(values, count)
        places[: len(largest)].copy_(largest)
        sent[: len(largest)].copy_(values[largest])
        # The sum may overflow where all terms are finite, but it is faster.
        is_finite = math.isfinite(float(values.sum())) or bool(values.isfinite().all())
        is_finite = is_finite and bool(sent.isfinite().all())
        if not is_finite:
            sent.fill_(math.nan)
        wire = torch.cat([places.view(torch.uint8), sent.view(torch.uint8)])
        return wire, largest, sent[: len(largest)] if is_finite else None

    def add_decoded(self, wire: Tensor, out: Tensor) -> None:
        """Adds the values of a wire to ``out``."""
        count = len(wire) // _BYTES
        places = wire[: 4 * count].view(torch.int32)
        # A wire with fewer values has zeros for the place 0 at its end.
        out.index_add_(0, places, wire[4 * count :].view(torch.bfloat16).to(out.dtype))

    def __repr__(self) -> str:
        decay = "" if self.error_decay == 1.0 else f", error_decay={self.error_decay}"
        return f"Compression.topk(density={self.density}{decay})"


def _largest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the ``count`` largest values, or of somewhat fewer where the sample was not typical."""
    sizes = values.abs()
    if len(sizes) < 4 * _SAMPLE:
        return torch.topk(sizes, count, sorted=False).indices
    # An odd step, so that it meets all columns of a matrix.
    sample = sizes[:: len(sizes) // _SAMPLE | 1]
    wanted = min(len(sample), math.ceil(_MARGIN * count * len(sample) / len(sizes)))
    threshold = torch.topk(sample, wanted, sorted=False).values.min()
    candidates = torch.nonzero(sizes >= threshold).view(-1)
    if len(candidates) <= count:
        return candidates
    return candidates[torch.topk(sizes[candidates], count, sorted=False).indices]


# What is sent between hosts in place of gradients, cast or not.
Encoding: TypeAlias = Codec | LowRank | TopK
EncodingTypes = (Codec, LowRank, TopK)
