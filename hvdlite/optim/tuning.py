"""
Chooses the cap of the buckets from measured times: fits a line to each engine's, and predicts a step for each cap.

    bytes, seconds ── fit ── Line (a bucket takes alpha + beta · bytes), one for each engine
    parameters, lines ── candidates ── the predicted step for each cap ── best

Pure values and functions: `probe` measures the times, `autotune` applies and logs the choice.

The model of a step: gradients become ready in the order of backward, evenly by their bytes, and a bucket with the last
of its gradients. Buckets travel one after the other, each for as long as its engine's line says. Small buckets cost
many latencies; with large ones the step waits for the last. The length of backward is not known before the first step
and is assumed to be the time that all bytes travel, without latencies. There the cap matters most: a longer backward
hides all but the last bucket anyway, and in a shorter one the link is busy from end to end whatever the cap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from .plan import BucketPlan, ParamSpec, plan_buckets

SMALLEST_CAP_BYTES = 64 * 2**10
_SHORTEST_S = 1e-9


@dataclass(frozen=True, order=True, slots=True)
class GradientType:
    """The device type and the dtype of the gradients that it carries, such as ``cpu`` and ``float32``."""

    device_type: str
    dtype: str

    @classmethod
    def of(cls, part: ParamSpec | BucketPlan) -> GradientType:
        """The engine of a parameter's gradient, or of a bucket."""
        return cls(part.device.type, str(part.dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Line:
    """The time of a bucket on an engine: a latency and the seconds of a byte, neither of them negative."""

    alpha_s: float
    beta_s: float

    def time_s(self, nbytes: int) -> float:
        """Seconds that a bucket takes."""
        return self.alpha_s + self.beta_s * nbytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cap, the number of its buckets, and the predicted seconds from the start of backward to the last average."""

    cap_bytes: int
    buckets: int
    step_s: float


def fit(sizes: Sequence[int], times_s: Sequence[float]) -> Line:
    """The line with the least sum of relative deviations from the measured times.

    The candidates are the lines through two of the points, and through one of them with a latency or a bandwidth alone.
    Relative deviations let a latency of microseconds count as much as milliseconds of a large bucket; their sum, rather
    than that of squares, lets a size at which the machine was busy count as one point only.
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
    specs: Sequence[ParamSpec], groups: Sequence[Sequence[str]], line_of: Mapping[GradientType, Line]
) -> list[Candidate]:
    """The powers of two from 64 KiB to the first that holds all gradients, each with its predicted step."""

    def trained(cap_bytes: int) -> list[BucketPlan]:
        return [plan for plan in plan_buckets(specs, cap_bytes=cap_bytes, groups=groups) if not plan.asleep]

    total = sum(plan.nbytes for plan in trained(0))
    found: list[Candidate] = []
    while not found or found[-1].cap_bytes < total:
        cap_bytes = SMALLEST_CAP_BYTES << len(found)
        plans = trained(cap_bytes)
        found.append(Candidate(cap_bytes, len(plans), step_s(specs, plans, line_of)))
    return found


def best(among: Sequence[Candidate]) -> Candidate:
    """The candidate with the shortest step; of equals, the one with the fewest buckets, then with the smallest cap."""
    return min(among, key=lambda candidate: (candidate.step_s, candidate.buckets, candidate.cap_bytes))


def step_s(specs: Sequence[ParamSpec], plans: Sequence[BucketPlan], line_of: Mapping[GradientType, Line]) -> float:
    """Predicted seconds from the start of backward to the last average, with these buckets."""
    travelling = {piece.spec.name for plan in plans for piece in plan.slices}
    computed, backward_s = 0, 0.0
    computed_at: dict[str, int] = {}
    for spec in reversed(specs):
        if spec.name in travelling:
            nbytes = spec.numel * spec.dtype.itemsize
            computed += nbytes
            computed_at[spec.name] = computed
            backward_s += line_of[GradientType.of(spec)].beta_s * nbytes
    done_s = 0.0
    for plan in plans:
        last = max((computed_at[piece.spec.name] for piece in plan.slices), default=0)
        ready_s = backward_s * last / computed if computed else 0.0
        done_s = max(ready_s, done_s) + line_of[GradientType.of(plan)].time_s(plan.nbytes)
    return done_s
