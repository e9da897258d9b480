"""
Which size of buckets suits a model on its engines: a line through what was measured, and the cap of the shortest step.

    bytes, seconds ── fit ── Line (seconds of a bucket = alpha + beta · bytes), one for each engine
    parameters, lines ── choose ── the caps that there are to choose from, how long a step is with each, the best

Pure values and functions: what they are given is measured in `probe`, and what comes of it is told in `autotune`.

How long a step is. Gradients become ready in the order of backward, evenly by their bytes; a bucket is ready with the
last of its own; it travels when those before it in the plan have, and takes as long as its engine's line says. Small
buckets cost their latencies, large ones have backward wait for none of it and the step for the last. How long backward
is, nobody knows before the first; taken here is that it lasts as long as all bytes travel, without the latencies. That
is where the cap matters most: under a longer backward all but the last bucket is hidden anyway, behind a shorter one
the wire is busy from end to end whatever its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from .plan import BucketPlan, ParamSpec, plan_buckets

SMALLEST_CAP_BYTES = 64 * 2**10
_SHORTEST_S = 1e-9


@dataclass(frozen=True, order=True, slots=True)
class Engine:
    """What carries a bucket: by the device type and the dtype of its gradients, such as ``cpu`` and ``float32``."""

    device_type: str
    dtype: str

    @classmethod
    def of(cls, part: ParamSpec | BucketPlan) -> Engine:
        """That of a parameter's gradient, or of a bucket."""
        return cls(part.device.type, str(part.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Line:
    """A bucket of so many bytes takes ``alpha_s + beta_s · bytes`` seconds; neither is negative."""

    alpha_s: float
    beta_s: float

    def time_s(self, nbytes: int) -> float:
        """Seconds that a bucket of so many bytes takes."""
        return self.alpha_s + self.beta_s * nbytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cap, how many buckets it makes, and the seconds from the begin of backward to the last average."""

    cap_bytes: int
    buckets: int
    step_s: float


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> Line:
    """The line that the measured times are nearest to.

    Of all lines through two of the points (or one and a latency or a bandwidth alone) the one with the least sum of
    relative deviations: a latency of microseconds counts as much as a large bucket's milliseconds, and a size at which
    something else took the machine counts for no more than one point.
    """
    points = [(nbytes, max(time_s, _SHORTEST_S)) for nbytes, time_s in zip(sizes, times_s, strict=True)]
    lines = [Line(time_s, 0.0) for _, time_s in points]
    lines += [Line(0.0, time_s / nbytes) for nbytes, time_s in points if nbytes]
    for (few, sooner_s), (many, later_s) in combinations(sorted(points), 2):
        if few < many:
            beta_s = (later_s - sooner_s) / (many - few)
            alpha_s = sooner_s - beta_s * few
            if alpha_s >= 0 and beta_s >= 0:
                lines.append(Line(alpha_s, beta_s))
    return min(lines, key=lambda line: sum(abs(line.time_s(nbytes) / time_s - 1) for nbytes, time_s in points))


def candidates(
    specs: Sequence[ParamSpec], groups: Sequence[Sequence[str]], line_of: Mapping[Engine, Line]
) -> list[Candidate]:
    """Each power of two from 64 KiB to the first that a bucket of all gradients fits into, with what it leads to."""
    total = sum(plan.nbytes for plan in plan_buckets(specs, cap_bytes=0, groups=groups) if not plan.asleep)
    cap_bytes = SMALLEST_CAP_BYTES
    caps = [cap_bytes]
    while cap_bytes < total:
        cap_bytes *= 2
        caps.append(cap_bytes)
    return [_candidate(specs, groups, line_of, cap_bytes) for cap_bytes in caps]


def best(among: Sequence[Candidate]) -> Candidate:
    """The one of the shortest step; of equals, the one of the fewest buckets, and then of the smallest cap."""
    return min(among, key=lambda candidate: (candidate.step_s, candidate.buckets, candidate.cap_bytes))


def _candidate(
    specs: Sequence[ParamSpec], groups: Sequence[Sequence[str]], line_of: Mapping[Engine, Line], cap_bytes: int
) -> Candidate:
    plans = [plan for plan in plan_buckets(specs, cap_bytes=cap_bytes, groups=groups) if not plan.asleep]
    return Candidate(cap_bytes, len(plans), step_s(specs, plans, line_of))


def step_s(specs: Sequence[ParamSpec], plans: Sequence[BucketPlan], line_of: Mapping[Engine, Line]) -> float:
    """Seconds from the begin of backward to the last average, with these buckets."""
    travelling = {piece.spec.name for plan in plans for piece in plan.slices}
    computed, backward_s = 0, 0.0
    computed_at: dict[str, int] = {}
    for spec in reversed(specs):
        if spec.name in travelling:
            nbytes = spec.numel * spec.dtype.itemsize
            computed += nbytes
            computed_at[spec.name] = computed
            backward_s += line_of[Engine.of(spec)].beta_s * nbytes
    done_s = 0.0
    for plan in plans:
        last = max((computed_at[piece.spec.name] for piece in plan.slices), default=0)
        ready_s = backward_s * last / computed if computed else 0.0
        done_s = max(ready_s, done_s) + line_of[Engine.of(plan)].time_s(plan.nbytes)
    return done_s
