"""
`EncodedExchange`: averages gradients between hosts in a format that cannot be summed, such as int8 with scales.

    this host's sum ── encoded ── sent between hosts ── decoded and summed

A rank encodes only its shard of its host's sum. Two hosts send each other everything (an all-gather). Three or more
first send each host its part of the shard (an all-to-all), which sums it, encodes the sum, and sends it to all (an
all-gather), as ZeRO++ does (arXiv 2306.10209).

`between_hosts` has what comes before and after; `compression.codecs` the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..comm.work import Work
from ..compression.codecs import Codec, add_decoded, encode_all, wire_bytes, working_dtype
from .between_hosts import BetweenHosts, Shard, split
from .exchange import Links
from .residuals import OWN, SUM
from .settings import Settings


class EncodedExchange(BetweenHosts):
    """Averages or sums a bucket by a `Codec` between hosts, and in its own dtype within each."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        super().__init__(settings, codec)
        self._codec = codec

    def _between(self, shard: Shard, links: Links, what: str) -> Iterator[Work]:
        first, second = (leg.across for leg in links.legs)
        codec, values = self._codec, shard.values
        if first.size == 2:
            wire = self._encode(shard, [0, values.numel()], links)
            wires, work = first.begin_all_gather(wire, what, [wire.numel()] * 2)
            yield work
            add_decoded(codec, wires, values)
            return
        bounds = split(values.numel(), first.size, codec.block)
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        wire = self._encode(shard, bounds, links)
        own = sizes[first.rank]
        wires, work = first.begin_all_to_all(wire, sizes, [own] * first.size, what)
        yield work
        begin, end = bounds[first.rank], bounds[first.rank + 1]
        total = torch.empty(end - begin, dtype=working_dtype(values.dtype), device=values.device)
        add_decoded(codec, wires, total)
        wire = torch.empty(own, dtype=torch.uint8, device=values.device)
        residual = self._residual(SUM, shard, shard.start + begin, total, links) if codec.error_feedback else None
        encode_all(codec, total, wire, residual)
        wires, work = second.begin_all_gather(wire, what, sizes)
        yield work
        for (begin, end), each in zip(pairwise(bounds), wires, strict=True):
            add_decoded(codec, [each], values[begin:end])

    def _encode(self, shard: Shard, bounds: Sequence[int], links: Links) -> Tensor:
        """Returns the wire of a shard, with its parts one after the other."""
        codec, values = self._codec, shard.values
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
        residual = self._residual(OWN, shard, shard.start, values, links) if codec.error_feedback else None
        # What nobody on this host has used stays zero, and keeps its residual for when it is used again.
        missing = [] if residual is None else shard.used.missing(values, shard.start)
        kept = [] if residual is None else [(part, residual[part].clone()) for part in missing]
        for part, _ in kept:
            assert residual is not None, "it has parts"
            residual[part].zero_()
        at = 0
        for (begin, end), size in zip(pairwise(bounds), sizes, strict=True):
            own = None if residual is None else residual[begin:end]
            encode_all(codec, values[begin:end], wire[at : at + size], own)
            at += size
        for part, before in kept:
            assert residual is not None, "as above"
            residual[part].copy_(before)
        return wire
