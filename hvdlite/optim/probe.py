"""
How long buckets of a few sizes take between the ranks: measured together, with one answer on all of them.

    a bucket of zeros ── `in_flight`, as in training ── seconds, several times ── median ── the slowest rank's

What follows from it is in `tuning`. Every rank must measure the same at the same time; how often, and how far up, they
find out by common numbers alone, so that their collectives pair up however their clocks differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..comm.group import Group
from ..comm.reduce_op import Max
from ..ops.failures import raise_together
from .bucket import Bucket
from .exchange import Links
from .flags import RankAndSize
from .in_flight import InFlight
from .plan import ParamSpec, plan_buckets
from .settings import Settings
from .strategies import AllReduce, PackedAllReduce

SIZES = tuple(kib * 2**10 for kib in (4, 32, 256, 1024, 4096, 16384))
"""Bytes of gradients; of two of them at least there is always a time, and of those larger than the model never."""

MOST_TIMES, FEWEST_TIMES = 9, 3


@dataclass(frozen=True, slots=True)
class Measured:
    """The bytes of the buckets that were sent, and the seconds that each took on the slowest rank."""

    sizes: tuple[int, ...]
    medians_s: tuple[float, ...]


def measure(
    group: Group, settings: Settings, like: ParamSpec, *, most_bytes: int, limit_s: float, clock: Callable[[], float]
) -> Measured:
    """Send buckets of gradients ``like`` this one, of up to ``most_bytes``, until about ``limit_s`` have passed.

    On a slow link the larger sizes are left out. What lasts longer than the limit can only be the two smallest sizes.
    """
    probe = _Probe(group, settings, like, clock)
    # An engine may open its connections only now.
    probe.send(probe.make_bucket(SIZES[0]))
    begin_s = clock()
    sizes: list[int] = []
    medians_s: list[float] = []
    for nbytes in [each for each in SIZES if each <= max(most_bytes, SIZES[1])]:
        left_s = limit_s - probe.slowest_s(clock() - begin_s)
        if len(sizes) > 1 and left_s < (1 + FEWEST_TIMES) * medians_s[-1] * nbytes / sizes[-1]:
            break
        bucket = probe.make_bucket(nbytes)
        # The first has to come by its memory, and is not counted.
        first_s = probe.slowest_s(probe.send(bucket))
        times = MOST_TIMES if first_s <= 0 else min(MOST_TIMES, max(FEWEST_TIMES, int(left_s / 4 / first_s)))
        sizes.append(bucket.plan.nbytes)
        medians_s.append(probe.slowest_s(statistics.median(probe.send(bucket) for _ in range(times))))
    return Measured(tuple(sizes), tuple(medians_s))


class _Probe:
    """Sends buckets that belong to no model."""

    def __init__(self, group: Group, settings: Settings, like: ParamSpec, clock: Callable[[], float]) -> None:
        self._group = group
        self._settings = settings
        self._like = like
        self._clock = clock
        self._exchange = PackedAllReduce(settings) if settings.packs else AllReduce(settings)
        self._links = Links(group, by_host=False)

    def make_bucket(self, nbytes: int) -> Bucket:
        """One with the gradient of one parameter, of which there is nothing but the shape."""
        dtype, device = self._like.dtype, self._like.device
        shape = (nbytes // dtype.itemsize,)
        spec = ParamSpec("autotune's probe", shape, (1,), dtype, device, trainable=True)
        ranks = RankAndSize(self._group.rank, self._group.size)
        (plan,) = plan_buckets([spec], cap_bytes=0, aligned=self._exchange.aligned, count_slots=ranks.count_slots)
        param = torch.zeros(1, dtype=dtype, device=device).expand(shape)
        before = self._exchange.scale_before(dtype, self._group.size)
        return Bucket(plan, [param], ranks=ranks, scale=before, densify=False, memory=self._group.zeros)

    def send(self, bucket: Bucket) -> float:
        """The seconds that it took, from full to averaged, by this rank's clock."""
        begin_s = self._clock()
        bucket.expect()
        in_flight = InFlight(bucket, self._exchange, self._links, name="a trial of autotune")
        in_flight.finish()
        if self._exchange.tells_failures:
            raise_together(self._group, in_flight.failure, "the end of a trial of autotune")
        bucket.release()
        if bucket.plan.device.type != "cpu":
            torch.accelerator.synchronize(bucket.plan.device)
        return self._clock() - begin_s

    def slowest_s(self, own_s: float) -> float:
        """The largest of all ranks' numbers."""
        wire = torch.tensor([own_s], dtype=torch.float64)
        self._group.all_reduce(wire, "comparing times for autotune", Max).wait()
        return float(wire.item())
