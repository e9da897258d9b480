"""
`BetweenHosts`: the base of the exchanges that send something shorter between hosts than the gradients themselves.

    bucket ── summed within the host ── shard of each local rank ── between hosts, its own way ── gathered in the host

The part between hosts is the subclasses': `host_sums` and `low_rank_exchange`. On a single host nothing is shortened.
`stages` runs the stages of the buckets, so that those of several buckets overlap with each other and with
backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, ExchangeWork, Gradients, Links
from ..buckets.flags import ParticipantCount
from ..buckets.plan import ALIGNMENT_BYTES, BucketPlan
from ..buckets.settings import Settings
from ..comm.flat_bytes import as_real
from ..comm.group import Group
from ..comm.work import Work
from ..compression.codecs import working_dtype
from ..log import log
from .builtin_exchanges import AllReduce
from .residuals import MEAN, Residuals, gaps, reals, spans
from .stages import StageRunner

# The parts of a state that are by the names of parameters, also those of a subclass.
_BY_NAME = ("residuals", "numels", "q", "steps")


class BetweenHosts(Exchange):
    """Averages or sums a bucket in full precision within each host, and in a subclass's own way between hosts."""

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
        # By the first parameter: the buckets that were sent. And what a loaded state says of its parameters' numbers.
        self._plans: dict[str, BucketPlan] = {}
        self._loaded_numels: dict[str, int] = {}
        # Whether buckets were sent between hosts.
        self._has_encoded = False

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """Returns the factor of gradients before they are summed, as in `Settings.scaling`."""
        return self._settings.scaling(dtype, size).before

    def open_links(self, group: Group) -> Links:
        """Opens two legs, since the stages of several buckets are on their way at the same time."""
        return Links.in_legs(group, 2)

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Starts the stages of one bucket; on a GPU launches all of them."""
        if not links.legs:
            if not self._has_told and links.all.rank == 0:
                log.info("%r has no effect: all ranks are on one host, so gradients are sent as they are", self._form)
            self._has_told = True
            return self._plain.begin(gradients, links)
        self._has_encoded = True
        what = f"the {self.word} of the {gradients.what}"
        averaging = Averaging(self._settings, gradients)
        stages = self._stages(gradients, links, what, averaging, self._launch_beside(gradients.plan, links, what))
        if gradients.plan.device.type == "cpu":
            return _SentBetweenHosts(gradients, [links.all.watched(self._runner.start(stages), what)], averaging)
        for work in stages:
            work.wait()
        return _SentBetweenHosts(gradients, (), averaging)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was not sent of this rank's gradients so far, by the names of parameters."""
        residuals = self._residuals.state_dict()
        return self._state(residuals, self._numels(residuals)) if residuals else {}

    def _state(self, residuals: Mapping[str, Any], numels: Mapping[str, int]) -> dict[str, Any]:
        return {"codec": repr(self._form), "residuals": residuals, "numels": numels}

    def _numels(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the real numbers of these parameters' gradients, as far as they are known."""
        known = {**self._loaded_numels, **_numels_of(self._plans.values())}
        return {name: known[name] for name in names if name in known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a dict that `state_dict` returned on this rank. Raises ValueError for one of another exchange."""
        if state and state.get("codec") != repr(self._form):
            raise ValueError(
                f"the checkpoint has the state of {state.get('codec', 'another exchange')}, and the optimizer has "
                f"compression={self._form!r}: make it with the same, or delete the key 'hvdlite' from the state_dict"
            )
        self._residuals.load_state_dict(state.get("residuals", {}))
        self._loaded_numels = dict(state.get("numels", {}))
        self._plans.clear()

    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int]) -> None:
        """Raises ValueError if a parameter has another number of elements, or there is no such parameter."""
        for name, numel in state.get("numels", {}).items():
            if numels.get(name) != numel:
                has = f"one of {numels[name]} numbers" if name in numels else "no such parameter"
                raise ValueError(
                    f"the checkpoint has what {self._form!r} has kept for {name!r}, of {numel} numbers, and the "
                    f"optimizer has {has}: it is that of another model; delete the key 'hvdlite' from the state_dict "
                    "to begin without it"
                )

    def rescale(self, factor: float) -> None:
        """Multiplies what was not sent of gradients, which the next step adds to gradients of another scale."""
        self._residuals.rescale(factor)

    def consolidate(self, plans: Sequence[BucketPlan], links: Links) -> dict[str, Any]:
        """Returns the mean of all ranks' residuals, as a state."""
        means = {name: {MEAN: kept} for name, kept in self._residuals.means(plans, links.all).items()}
        return self._state(means, _numels_of(plans)) if means else {}

    def without(self, state: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Returns a state without what was not sent of the gradients of these parameters."""
        left = {
            key: {name: value for name, value in of_all.items() if name not in names}
            for key, of_all in state.items()
            if key in _BY_NAME
        }
        return {**state, **left} if any(left.values()) else {}

    # -- a step that may be taken back

    @property
    def has_residuals(self) -> bool:
        return self._has_encoded

    def begin_step(self) -> None:
        self._residuals.begin_step()

    def end_step(self) -> None:
        self._residuals.end_step()

    def take_step_back(self) -> None:
        """Restores the state at `begin_step`, and gives up the stages of its buckets."""
        self._runner.give_up()
        self._residuals.take_step_back()

    # -- the stages of a bucket

    def _launch_beside(self, plan: BucketPlan, links: Links, what: str) -> Beside | None:
        """Launches what a subclass sends to all ranks beside a bucket, in the order of the buckets."""
        return None

    def _stages(
        self, gradients: Gradients, links: Links, what: str, averaging: Averaging, beside: Beside | None
    ) -> Iterator[Work]:
        if not gradients.plan.slices:
            # Only flags are left in it, which are sent beside it.
            return
        self._plans[gradients.plan.slices[0].spec.name] = gradients.plan
        first, second = links.legs
        # In `data` the writes of these stages are not counted as changes that the user has made.
        flat = as_real(gradients.flat.data)
        unused = _unused(gradients)
        # What was not finite in an earlier step may have reached them, and would reach all that is encoded with them.
        for start, stop in gaps(gradients.plan):
            flat[start:stop].zero_()
        within = first.within
        bounds = self._bounds(gradients.plan, within.size)
        start, stop = bounds[within.rank], bounds[within.rank + 1]
        self._residuals.set_rest_apart(gradients.plan, start, stop)
        scale = self.scale_before(gradients.plan.dtype, links.all.size)
        rest = self._residuals.add_rest(gradients.plan, flat, scale, unused)
        shard = flat
        if within.size > 1:
            counts = [stop - start for start, stop in pairwise(bounds)]
            shard = flat.new_empty(stop - start)
            yield within.reduce_scatter(shard, flat, counts, what)
        kept = self._residuals, scale, within.size, unused
        yield from self._between(
            BucketShard(gradients.plan, shard, start, *kept, averaging.factor, beside), links, what
        )
        if within.size > 1:
            shards, work = second.within.begin_all_gather(shard, what, [n * flat.element_size() for n in counts])
            yield work
            for (start, stop), data in zip(pairwise(bounds), shards, strict=True):
                flat[start:stop].copy_(data.view(flat.dtype))
        self._residuals.keep_where_not_finite(rest, flat)

    @abstractmethod
    def _between(self, shard: BucketShard, links: Links, what: str) -> Iterator[Work]:
        """Replaces this host's sum in ``shard.values`` by that of all hosts, in stages.

        It may multiply the sum by `BucketShard.factor` while it writes it, in which it then may not leave out anything.
        """

    def _bounds(self, plan: BucketPlan, parts: int) -> list[int]:
        """Returns where the shard of each of a host's ranks begins, and the last one ends, in real numbers."""
        return split(plan.grad_numel * reals(plan), parts, ALIGNMENT_BYTES // plan.dtype.to_real().itemsize)


class _SentBetweenHosts(ExchangeWork):
    """A bucket whose stages are running, or have been launched."""

    def __init__(self, gradients: Gradients, works: Sequence[Work], averaging: Averaging) -> None:
        super().__init__(gradients, works)
        self._averaging = averaging

    def finish(self, count: ParticipantCount) -> None:
        """Divides the sum where the result is an average, unless that is done."""
        if not self._averaging.is_done:
            self._averaging.scaling.finish(as_real(self.gradients.flat), count)


class BucketShard(NamedTuple):
    """The part of a bucket that this rank sends between hosts, and what it has not sent of earlier ones."""

    plan: BucketPlan
    # They begin at the real number ``start`` of the bucket.
    values: Tensor
    start: int
    residuals: Residuals
    # The factor of the gradients, and the number of the host's ranks.
    scale: float
    ranks: int
    # The parameters that this rank has not used in this step, as (start, stop) in the bucket's real numbers.
    unused: Sequence[tuple[int, int]]
    # Returns what the sums must be multiplied by: see `Averaging.factor`.
    factor: Callable[[], float]
    beside: Beside | None

    @property
    def name(self) -> str:
        """The bucket's first parameter."""
        return self.plan.slices[0].spec.name

    def residual(self, kind: str, values: Tensor, at: int = 0, sums: tuple[int, int] = (0, 0)) -> Tensor:
        """Returns the residual of ``values``, which begin at ``at`` of the shard. Change it in place.

        ``kind`` is `residuals.OWN`, or `residuals.SUM` for this rank's part of a sum. ``sums`` is where that part
        begins and ends in the shard.
        """
        first, last = sums
        sums = self.start + first, self.start + last
        return self.residuals.take(kind, self.plan, self.start + at, values, self.scale, self.ranks, sums)

    def missing(self, values: Tensor, at: int = 0) -> list[slice]:
        """Returns the parts of ``values``, from ``at`` on, that no rank of the host has used: they keep residuals."""
        found, start = [], self.start + at
        for first, last in self.unused:
            part = slice(max(first - start, 0), min(last - start, values.numel()))
            if part.start < part.stop and not values[part].any():
                found.append(part)
        return found


class Averaging:
    """How sums of a bucket become averages. To multiply while they are written takes no further pass over memory."""

    def __init__(self, settings: Settings, gradients: Gradients) -> None:
        plan = gradients.plan
        self.scaling = settings.scaling(plan.dtype, gradients.ranks)
        # Whether the result will be averages, for which nothing is left to do.
        self.is_done = False
        # Sums of 16-bit floats are rounded before they are multiplied. On a GPU the count would have to be waited for.
        can = plan.device.type == "cpu" and working_dtype(plan.dtype.to_real()) == plan.dtype.to_real()
        self._counting = gradients.counting if can else None

    def factor(self) -> float:
        """Returns what all sums must be multiplied by; or 1, and `finish` divides. All ranks call it, or none."""
        factor = None if self._counting is None else self.scaling.factor(self._counting())
        self.is_done = factor is not None
        return 1.0 if factor is None else factor


class Beside(NamedTuple):
    """Numbers that are being sent beside a bucket."""

    values: Tensor
    work: Work


def _unused(gradients: Gradients) -> list[tuple[int, int]]:
    """Reads the flags of a bucket, which must not be summed yet."""
    counts = as_real(gradients.counts)[:: reals(gradients.plan)]
    flags = counts[: len(gradients.plan.slices)].tolist()
    return [span for span, flag in zip(spans(gradients.plan), flags, strict=True) if flag == 0]


def _numels_of(plans: Iterable[BucketPlan]) -> dict[str, int]:
    return {
        piece.spec.name: stop - start
        for plan in plans
        for piece, (start, stop) in zip(plan.slices, spans(plan), strict=True)
    }


def split(numel: int, count: int, multiple: int) -> list[int]:
    """Returns the bounds of ``count`` parts of about equal size, each a multiple of ``multiple`` but for the last."""
    each = -(-numel // (count * multiple)) * multiple
    return [min(number * each, numel) for number in range(count + 1)]
