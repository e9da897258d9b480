"""
`TopKExchange`: averages gradients between hosts of which each sends only its largest.

    this host's sum ── its largest values and their places ── sent to all hosts ── added up

`between_hosts` has what comes before and after, and `compression.top_k` the selection. What a host has not sent is
added to its next sum, as in Deep Gradient Compression (arXiv 1712.01887).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..buckets.exchange import Links
from ..buckets.settings import Settings
from ..comm.work import Work
from ..compression.top_k import TopK
from .between_hosts import BetweenHosts, Shard
from .residuals import OWN, replace_if_finite


class TopKExchange(BetweenHosts):
    """Averages or sums the largest values of each host between hosts, and all of them within each."""

    def __init__(self, settings: Settings, form: TopK) -> None:
        super().__init__(settings, form)
        self._top_k = form

    def _between(self, shard: Shard, links: Links, what: str) -> Iterator[Work]:
        across, values = links.legs[0].across, shard.values
        residual = self._residual(OWN, shard, shard.start, values, links)
        wanted = self._top_k.added(values, residual)
        # What nobody on this host has used stays zero, and keeps its residual for when it is used again.
        missing = shard.used.missing(values, shard.start)
        for part in missing:
            wanted[part].zero_()
        wire, places, sent = self._top_k.encode(wanted)
        sizes = [self._top_k.nbytes(len(values))] * across.size
        wires, work = across.begin_all_gather(wire, what, sizes)
        if sent is not None:
            wanted[places] -= sent.to(wanted.dtype)
            for part in missing:
                wanted[part].copy_(residual[part])
        yield work
        total = values.zero_() if values.dtype == wanted.dtype else torch.zeros_like(wanted)
        for each in wires:
            self._top_k.add_decoded(each, total)
        if total is not values:
            values.copy_(total)
        # Only now, since no rank uses what was sent where another one had something that is not finite, or where a sum
        # is too large for the gradients' dtype.
        replace_if_finite(residual, wanted, values)
