"""
How long a step takes on more ranks than there are, by the latency-bandwidth model. Pure functions of what was measured.

    all-reduce of S bytes on n ranks, a ring:   T(n, S) = 2 (n - 1) α + 2 (n - 1) / n × S β
    bucket i is ready at                        r(i) = forward + backward × (bytes of buckets 1 … i) / (of all)
    and averaged at                             e(i) = max(r(i), e(i - 1)) + T(n, bytes of bucket i)
    step                                        max(forward + backward, e(last)) + update
    efficiency on n ranks                       step alone / step on n
    throughput                                  n × step alone / step on n: in what one rank does alone

α is the latency of one message in seconds, β the seconds of a byte. Each rank has the same batch however many there
are. Buckets travel one after the other, while backward goes on; what that takes of the cores that compute, the model
leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .trainings import Parts

MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Link:
    """``alpha_s`` seconds for a message, ``beta_s`` for each byte."""

    alpha_s: float
    beta_s: float

    def all_reduce_s(self, ranks: int, nbytes: float) -> float:
        """Seconds of an all-reduce between so many ranks."""
        return 2 * (ranks - 1) * self.alpha_s + 2 * (ranks - 1) / ranks * nbytes * self.beta_s


def fit(points: Sequence[tuple[int, float]], ranks: int) -> Link:
    """The link that explains times (bytes, seconds) of all-reduces between so many ranks, two at least.

    Least squares of relative errors; neither α nor β is negative.
    """
    # T = a + b S, each point weighed by 1 / T².
    weights = [1 / seconds**2 for _, seconds in points]
    w = sum(weights)
    x = sum(weight * nbytes for weight, (nbytes, _) in zip(weights, points, strict=True))
    y = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True))
    xx = sum(weight * nbytes**2 for weight, (nbytes, _) in zip(weights, points, strict=True))
    xy = sum(weight * nbytes * seconds for weight, (nbytes, seconds) in zip(weights, points, strict=True))
    determinant = w * xx - x * x
    slope = (w * xy - x * y) / determinant if determinant > 0 else 0.0
    constant = (y - slope * x) / w
    if slope < 0:
        slope, constant = 0.0, y / w
    elif constant < 0:
        slope, constant = xy / xx, 0.0
    return Link(constant / (2 * (ranks - 1)), slope / (2 * (ranks - 1) / ranks))


@dataclass(frozen=True, slots=True)
class Workstep:
    """A step without communication, and the bytes of its buckets on the wire, in the order in which they are full."""

    parts: Parts
    bucket_bytes: tuple[int, ...]

    @property
    def alone_s(self) -> float:
        """The step of one rank."""
        return sum(self.parts)


def step_s(step: Workstep, link: Link, ranks: int) -> float:
    """Seconds of a step on so many ranks."""
    forward, backward, update = step.parts
    total, full, averaged_at = sum(step.bucket_bytes), 0, 0.0
    for nbytes in step.bucket_bytes:
        full += nbytes
        ready_at = forward + backward * full / total
        averaged_at = max(ready_at, averaged_at) + link.all_reduce_s(ranks, nbytes)
    return max(forward + backward, averaged_at) + update


def throughput(step: Workstep, link: Link, ranks: int) -> float:
    """Of so many ranks, in what one does alone."""
    return ranks * step.alone_s / step_s(step, link, ranks)


@dataclass(frozen=True, slots=True)
class Prediction:
    """For ``ranks``; ``added`` is what one rank more would add, of what one does alone."""

    ranks: int
    step_s: float
    efficiency: float
    throughput: float
    added: float


def predict(step: Workstep, link: Link, ranks: int) -> Prediction:
    """What to expect of so many ranks."""
    here = throughput(step, link, ranks)
    added = throughput(step, link, ranks + 1) - here
    return Prediction(ranks, step_s(step, link, ranks), here / ranks, here, added)


def stops_paying_at(step: Workstep, link: Link, least_added: float, most: int = MOST_RANKS) -> int | None:
    """From how many ranks on one more always adds less than that; None if it adds more up to ``most``."""
    values = [throughput(step, link, ranks) for ranks in range(1, most + 2)]
    found = None
    for ranks in range(most, 0, -1):
        if values[ranks] - values[ranks - 1] >= least_added:
            break
        found = ranks
    return found
