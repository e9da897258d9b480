"""
`BetweenHosts`: the base of the exchanges that send something shorter between hosts than the gradients themselves.

    bucket ── summed within the host ── shard of each local rank ── between hosts, its own way ── gathered in the host

The part between hosts is the subclasses': `encoded`, `low_rank_exchange` and `top_k_exchange`. On a single host nothing
is shortened. `stages` runs the stages of the buckets, so that those of several buckets overlap with each other and with
backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.work import Work
from ..log import log
from .builtin_exchanges import AllReduce, as_real
from .exchange import Exchange, ExchangeWork, Gradients, Links
from .flags import ParticipantCount
from .plan import ALIGNMENT_BYTES, BucketPlan
from .residuals import MEAN, Residuals, reals, spans
from .settings import Settings
from .stages import StageRunner


class BetweenHosts(Exchange):
    """Averages or sums a bucket in full precision within each host, and in a subclass's own way between hosts."""

    legs = 2
    aligned = True

    def __init__(self, settings: Settings, form: object) -> None:
        """``form`` is the compression, whose repr names it in messages and states."""
        self._settings = settings
        self._form = form
        self._residuals = Residuals()
        self._runner = StageRunner()
        # For ranks of a single host.
        self._plain = AllReduce(replace(settings, codec=None))
        self._has_told = False

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """Returns the factor of gradients before they are summed, as in `Settings.scaling`."""
        return self._settings.scaling(dtype, size).before

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Starts the stages of one bucket; on a GPU launches all of them."""
        if not links.legs:
            if not self._has_told and links.all.rank == 0:
                log.info("%r has no effect: all ranks are on one host, so gradients are sent as they are", self._form)
            self._has_told = True
            return self._plain.begin(gradients, links)
        what = f"the {self.word} of the {gradients.what}"
        stages = self._stages(gradients, links, what, self._launch_beside(gradients.plan, links, what))
        if gradients.plan.device.type == "cpu":
            return ExchangeWork([links.all.watched(self._runner.start(stages), what)])
        for work in stages:
            work.wait()
        return ExchangeWork()

    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Divides the sum where the result is an average."""
        if begun.kept is not None:
            self._plain.finish(gradients, begun, count)
        else:
            scaling = self._settings.scaling(gradients.plan.dtype, gradients.ranks)
            scaling.finish(as_real(gradients.flat), count)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was not sent of this rank's gradients so far, by the names of parameters."""
        residuals = self._residuals.state_dict()
        return {"codec": repr(self._form), "residuals": residuals} if residuals else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a dict that `state_dict` returned on this rank. Raises ValueError for one of another exchange."""
        if state and state.get("codec") != repr(self._form):
            raise ValueError(
                f"the checkpoint has the state of {state.get('codec', 'another exchange')}, and the optimizer has "
                f"compression={self._form!r}: make it with the same, or delete the key 'hvdlite' from the state_dict"
            )
        self._residuals.load_state_dict(state.get("residuals", {}))

    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int]) -> None:
        """Raises ValueError if a residual is longer than its parameter, or there is no such parameter."""
        for name, kinds in state.get("residuals", {}).items():
            most, ends = numels.get(name), [start + len(values) for start, _, values in kinds.values()]
            if most is None or max(ends, default=0) > most:
                has = "no such parameter" if most is None else f"one of {most} numbers"
                raise ValueError(
                    f"the checkpoint has what {self._form!r} has kept for {name!r}, up to its number {max(ends)}, and "
                    f"the optimizer has {has}: it is that of another model; delete the key 'hvdlite' from the "
                    "state_dict to begin without it"
                )

    def consolidate(self, plans: Sequence[BucketPlan], links: Links) -> dict[str, Any]:
        """Returns the mean of all ranks' residuals, as a state."""
        means = {name: {MEAN: kept} for name, kept in self._residuals.means(plans, links.all).items()}
        return {"codec": repr(self._form), "residuals": means} if means else {}

    # -- the stages of a bucket

    def _launch_beside(self, plan: BucketPlan, links: Links, what: str) -> Beside | None:
        """Launches what a subclass sends to all ranks beside a bucket, in the order of the buckets."""
        return None

    def _stages(self, gradients: Gradients, links: Links, what: str, beside: Beside | None) -> Iterator[Work]:
        if not gradients.plan.slices:
            # Only flags are left in it, which are sent beside it.
            return
        first, second = links.legs
        # In `data` the writes of these stages are not counted as changes that the user has made.
        flat = as_real(gradients.flat.data)
        used = Used.of(gradients)
        within = first.within
        bounds = self._bounds(gradients.plan, within.size)
        start, stop = bounds[within.rank], bounds[within.rank + 1]
        shard = flat
        if within.size > 1:
            counts = [stop - start for start, stop in pairwise(bounds)]
            shard = flat.new_empty(stop - start)
            yield within.reduce_scatter(shard, flat, counts, what)
        yield from self._between(Shard(gradients.plan, shard, start, used, beside), links, what)
        if within.size > 1:
            shards, work = second.within.begin_all_gather(shard, what, [n * flat.element_size() for n in counts])
            yield work
            for (start, stop), data in zip(pairwise(bounds), shards, strict=True):
                flat[start:stop].copy_(data.view(flat.dtype))

    @abstractmethod
    def _between(self, shard: Shard, links: Links, what: str) -> Iterator[Work]:
        """Replaces this host's sum in ``shard.values`` by that of all hosts, in stages."""

    def _residual(self, kind: str, shard: Shard, start: int, values: Tensor, links: Links) -> Tensor:
        """Returns the residual of ``values``, which begin at ``start`` of the bucket. Change it in place."""
        scale = self.scale_before(shard.plan.dtype, links.all.size)
        return self._residuals.take(kind, shard.plan, start, values, scale, links.legs[0].within.size)

    def _bounds(self, plan: BucketPlan, parts: int) -> list[int]:
        """Returns where the shard of each of a host's ranks begins, and the last one ends, in real numbers."""
        return split(plan.grad_numel * reals(plan), parts, ALIGNMENT_BYTES // plan.dtype.to_real().itemsize)


class Shard(NamedTuple):
    """The part of a bucket that this rank sends between hosts: ``values`` begin at its real number ``start``."""

    plan: BucketPlan
    values: Tensor
    start: int
    used: Used
    beside: Beside | None


class Beside(NamedTuple):
    """Numbers that are being sent beside a bucket."""

    values: Tensor
    work: Work


class Used(NamedTuple):
    """The parameters of a bucket that this rank has not used in this step, as (start, stop) in its real numbers."""

    unused: list[tuple[int, int]]

    @classmethod
    def of(cls, gradients: Gradients) -> Used:
        """Reads the flags of a bucket, which must not be summed yet."""
        counts = as_real(gradients.counts)[:: reals(gradients.plan)]
        flags = counts[: len(gradients.plan.slices)].tolist()
        return cls([span for span, flag in zip(spans(gradients.plan), flags, strict=True) if flag == 0])

    def missing(self, shard: Tensor, start: int) -> list[slice]:
        """Returns the parts of a shard, which begins at ``start``, that no rank of the host has used."""
        found = []
        for first, last in self.unused:
            part = slice(max(first - start, 0), min(last - start, shard.numel()))
            if part.start < part.stop and not shard[part].any():
                found.append(part)
        return found


def split(numel: int, count: int, multiple: int) -> list[int]:
    """Returns the bounds of ``count`` parts of about equal size, each a multiple of ``multiple`` but for the last."""
    each = -(-numel // (count * multiple)) * multiple
    return [min(number * each, numel) for number in range(count + 1)]
