"""
`HostSum`: sums values over hosts in a format that cannot be summed itself: by a codec, or the largest values alone.

    EncodedSum   2 hosts: encode ── swap ── decode and add
                 more:    encode ── all-to-all ── decode and add ── encode ── all-gather ── decode
    LargestSum   largest values and their places ── all-gather ── add

Three hosts or more send each host its part of the values, which sums it, encodes the sum, and sends it to all, as
ZeRO++ does (arXiv 2306.10209). What a wire cannot hold is added to the next values (error feedback): a `Shard` has it.
All ranks get equal bits: sums are in rank order.

`HostSumExchange` averages gradients by a `HostSum` (see `between_hosts` for what comes before and after), and
`steps.outer_bucket` outer gradients. `compression.codecs` and `compression.approximations` have the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..buckets.exchange import Links
from ..buckets.settings import Settings
from ..comm.group import Group
from ..comm.work import Work
from ..compression.approximations import TopK
from ..compression.codecs import Codec, wire_bytes, working_dtype
from .between_hosts import BetweenHosts, BucketShard, split
from .residuals import OWN, SUM, replace_if_finite


class Shard(Protocol):
    """What a rank sends of its host's values, and what it has not sent of earlier ones, as in `BucketShard`."""

    @property
    def values(self) -> Tensor: ...
    @property
    def name(self) -> str: ...
    def residual(self, kind: str, values: Tensor, at: int = 0, sums: tuple[int, int] = (0, 0)) -> Tensor: ...
    def missing(self, values: Tensor, at: int = 0) -> list[slice]: ...
    def factor(self) -> float: ...


class EncodedSum:
    def __init__(self, codec: Codec, *, reuses_wires: bool) -> None:
        """``reuses_wires``: for the next values of the same name, since new memory costs as much as encoding."""
        self._codec = codec
        self.keeps_residuals = codec.error_feedback
        """Whether there are residuals once something was sent, on every rank."""
        self._reuses_wires = reuses_wires
        # By name: the wires of two hosts, one after the other in the order of their ranks.
        self._wires: dict[str, Tensor] = {}

    def stages(self, shard: Shard, across: Sequence[Group], what: str) -> Iterator[Work]:
        """Launches the collective of each stage and yields its work; at the end ``shard.values`` are the sums.

        They are multiplied by ``shard.factor()``, which is called once all ranks have begun. ``across`` has two groups
        of the same ranks, or one if these are two ranks.
        """
        first, codec, values = across[0], self._codec, shard.values
        if first.size == 2:
            yield from self._swap(shard, first, what)
            return
        bounds = split(values.numel(), first.size, codec.block)
        sizes = [wire_bytes(codec, stop - start) for start, stop in pairwise(bounds)]
        begin, end = bounds[first.rank], bounds[first.rank + 1]
        wire = torch.empty(sum(sizes), dtype=torch.uint8, device=values.device)
        self._encode(shard, OWN, values, bounds, wire, sums=(begin, end))
        own = sizes[first.rank]
        wires, work = first.begin_all_to_all(wire, sizes, [own] * first.size, what)
        yield work
        total = torch.empty(end - begin, dtype=working_dtype(values.dtype), device=values.device)
        codec.add_decoded(wires, total)
        wire = torch.empty(own, dtype=torch.uint8, device=values.device)
        self._encode(shard, SUM, total, [0, total.numel()], wire, at=begin)
        wires, work = across[1].begin_all_gather(wire, what, sizes)
        yield work
        by = shard.factor()
        for (begin, end), each in zip(pairwise(bounds), wires, strict=True):
            codec.add_decoded([each], values[begin:end], by)

    def _swap(self, shard: Shard, across: Group, what: str) -> Iterator[Work]:
        codec, values = self._codec, shard.values
        nbytes = wire_bytes(codec, values.numel())
        # After a step that fails an engine may still use them, and they are not used again.
        both = self._wires.pop(shard.name, None)
        if both is None or both.numel() != 2 * nbytes or both.device != values.device:
            both = torch.empty(2 * nbytes, dtype=torch.uint8, device=values.device)
        wires = both[:nbytes], both[nbytes:]
        own, other = wires[across.rank], wires[1 - across.rank]
        self._encode(shard, OWN, values, [0, values.numel()], own)
        # Unlike an all-gather, which over gloo copies what is sent and what is received, this copies nothing.
        sizes = [0 if rank == across.rank else nbytes for rank in range(2)]
        _, work = across.begin_all_to_all(own, sizes, sizes, what, other)
        yield work
        codec.add_decoded(wires, values, shard.factor())
        if self._reuses_wires:
            self._wires[shard.name] = both

    def _encode(
        self,
        shard: Shard,
        kind: str,
        values: Tensor,
        bounds: Sequence[int],
        wire: Tensor,
        *,
        at: int = 0,
        sums: tuple[int, int] = (0, 0),
    ) -> None:
        """Writes the wire of ``values``, with the parts between ``bounds`` one after the other."""
        codec = self._codec
        residual = shard.residual(kind, values, at, sums) if codec.error_feedback else None
        # What nobody has used, on this host or in a sum on any, stays zero, and keeps its residual for when it is used
        # again.
        before = []
        if residual is not None:
            before = [(residual[part], residual[part].clone()) for part in shard.missing(values, at)]
            for part, _ in before:
                part.zero_()
        place = 0
        for begin, end in pairwise(bounds):
            sent = wire[place : place + wire_bytes(codec, end - begin)]
            codec.encode_all(values[begin:end], sent, None if residual is None else residual[begin:end])
            place += len(sent)
        for part, copy in before:
            part.copy_(copy)


class LargestSum:
    """Sums the largest values of each host. What it has not sent it adds to its next (arXiv 1712.01887)."""

    keeps_residuals = True

    def __init__(self, form: TopK) -> None:
        self._form = form

    def stages(self, shard: Shard, across: Sequence[Group], what: str) -> Iterator[Work]:
        """Does as `EncodedSum.stages`, but does not multiply: it does not call ``factor``."""
        form, group, values = self._form, across[0], shard.values
        residual = shard.residual(OWN, values)
        wanted = form.added(values, residual)
        # What nobody on this host has used stays zero, and keeps its residual for when it is used again.
        missing = shard.missing(values)
        for part in missing:
            wanted[part].zero_()
        wire, places, sent = form.encode(wanted)
        wires, work = group.begin_all_gather(wire, what, [form.nbytes(len(values))] * group.size)
        if sent is not None:
            wanted[places] -= sent.to(wanted.dtype)
            for part in missing:
                wanted[part].copy_(residual[part])
        yield work
        total = values.zero_() if values.dtype == wanted.dtype else torch.zeros_like(wanted)
        for each in wires:
            form.add_decoded(each, total)
        if total is not values:
            values.copy_(total)
        # Only now, since no rank uses what was sent where another one had something that is not finite, or where a sum
        # is too large for the values' dtype.
        replace_if_finite(residual, wanted, values)


# Sums values over hosts, in stages. All ranks take equally many.
HostSum: TypeAlias = EncodedSum | LargestSum


def host_sum(form: Codec | TopK, *, reuses_wires: bool) -> HostSum:
    return LargestSum(form) if isinstance(form, TopK) else EncodedSum(form, reuses_wires=reuses_wires)


class HostSumExchange(BetweenHosts):
    """Averages or sums a bucket by a `HostSum` between hosts, and in its own dtype within each."""

    def __init__(self, settings: Settings, form: Codec | TopK) -> None:
        super().__init__(settings, form)
        self._sum = host_sum(form, reuses_wires=True)

    @property
    def has_residuals(self) -> bool:
        return super().has_residuals and self._sum.keeps_residuals

    def _between(self, shard: BucketShard, links: Links, what: str) -> Iterator[Work]:
        return self._sum.stages(shard, [leg.across for leg in links.legs], what)
