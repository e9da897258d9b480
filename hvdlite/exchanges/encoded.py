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

from ..buckets.exchange import Links
from ..buckets.settings import Settings
from ..comm.work import Work
from ..compression.codecs import Codec, wire_bytes, working_dtype
from .between_hosts import BetweenHosts, Shard, split
from .residuals import OWN, SUM


class EncodedExchange(BetweenHosts):
    """Averages or sums a bucket by a `Codec` between hosts, and in its own dtype within each."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        super().__init__(settings, codec)
        self._codec = codec
        # By a bucket's first parameter: the wires of two hosts, one after the other in the order of their ranks.
        self._wires: dict[str, Tensor] = {}

    @property
    def has_residuals(self) -> bool:
        """Whether ranks have kept something of their gradients that was not sent yet."""
        return super().has_residuals and self._codec.error_feedback

    def _between(self, shard: Shard, links: Links, what: str) -> Iterator[Work]:
        first, second = (leg.across for leg in links.legs)
        codec, values = self._codec, shard.values
        if first.size == 2:
            yield from self._swap(shard, links, what)
            return
        bounds = split(values.numel(), first.size, codec.block)
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        begin, end = bounds[first.rank], bounds[first.rank + 1]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
        sums = shard.start + begin, shard.start + end
        self._encode(OWN, shard, shard.start, values, bounds, links, wire, sums)
        own = sizes[first.rank]
        wires, work = first.begin_all_to_all(wire, sizes, [own] * first.size, what)
        yield work
        total = torch.empty(end - begin, dtype=working_dtype(values.dtype), device=values.device)
        codec.add_decoded(wires, total)
        wire = torch.empty(own, dtype=torch.uint8, device=values.device)
        self._encode(SUM, shard, sums[0], total, [0, total.numel()], links, wire)
        wires, work = second.begin_all_gather(wire, what, sizes)
        yield work
        factor = shard.averaging.factor()
        for (begin, end), each in zip(pairwise(bounds), wires, strict=True):
            codec.add_decoded([each], values[begin:end], factor)

    def _swap(self, shard: Shard, links: Links, what: str) -> Iterator[Work]:
        """Does `_between` for two hosts."""
        codec, values, across = self._codec, shard.values, links.legs[0].across
        name, nbytes = shard.plan.slices[0].spec.name, wire_bytes(codec, values.numel())
        # Kept between steps, since memory that is new to the kernel costs as much as encoding. After a step that fails
        # an engine may still use it, and it is not used again.
        both = self._wires.pop(name, None)
        if both is None or both.numel() != 2 * nbytes or both.device != values.device:
            both = torch.empty(2 * nbytes, dtype=torch.uint8, device=values.device)
        wires = both[:nbytes], both[nbytes:]
        own, other = wires[across.rank], wires[1 - across.rank]
        self._encode(OWN, shard, shard.start, values, [0, values.numel()], links, own)
        yield across.begin_swap(own, what, other)
        codec.add_decoded(wires, values, shard.averaging.factor())
        self._wires[name] = both

    def _encode(
        self,
        kind: str,
        shard: Shard,
        start: int,
        values: Tensor,
        bounds: Sequence[int],
        links: Links,
        wire: Tensor,
        sums: tuple[int, int] = (0, 0),
    ) -> None:
        """Writes the wire of ``values``, which begin at ``start`` of the bucket and are encoded between ``bounds``.

        ``kind`` is that of their residual, and ``sums`` is as in `Residuals.take`.
        """
        codec = self._codec
        sizes = [wire_bytes(codec, stop - begin) for begin, stop in pairwise(bounds)]
        residual = self._residual(kind, shard, start, values, links, sums) if codec.error_feedback else None
        # What nobody has used, on this host or in a sum on any, stays zero, and keeps its residual for when it is used
        # again.
        missing = [] if residual is None else shard.used.missing(values, start)
        kept = [] if residual is None else [(part, residual[part].clone()) for part in missing]
        for part, _ in kept:
            assert residual is not None, "it has parts"
            residual[part].zero_()
        at = 0
        for (begin, end), size in zip(pairwise(bounds), sizes, strict=True):
            own = None if residual is None else residual[begin:end]
            codec.encode_all(values[begin:end], wire[at : at + size], own)
            at += size
        for part, before in kept:
            assert residual is not None, "as above"
            residual[part].copy_(before)
