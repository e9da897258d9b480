"""
Chooses the size of an optimizer's buckets by measuring how long buckets of a few sizes take between its ranks.

    measure: all-reduces of zeros ── seconds ── fit: TimeModel (latency and bandwidth)   once per device type and dtype
    candidates: the predicted step for each size ── rank 0 takes the shortest, logs it and sends it to every rank

`optimizer` passes `tuned_cap` to the reducer, and `own_engine` calls it once the optimizer's engine is open.

The model of a step: backward produces gradients at a constant rate in bytes, and takes as long as sending all of them
without latency, where the size matters most. A bucket is ready when its last gradient is. Buckets are sent one after
the other, and each takes the time that its line predicts.

The log has one line of JSON for each optimizer; see `_conclude`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import torch
from hvdlite_wire import safe_paths
from torch import Tensor

from ..buckets.exchange import Gradients, Links
from ..buckets.flags import ParticipantCount
from ..buckets.plan import BucketPlan, ParamSpec, plan_buckets
from ..buckets.settings import Settings
from ..comm.group import Group
from ..comm.reduce_op import Max
from ..exchanges.exchange_state import exchange_of
from ..log import log
from ..ops.base import raise_together
from .own_engine import require_same_model

LIMIT_S = 1.0
"""Approximate limit in seconds for all measurements together."""

SIZES = tuple(kib * 2**10 for kib in (4, 32, 256, 1024, 4096, 16384))
"""Bucket sizes in bytes to measure. The first two are always measured; of the rest, none larger than the model."""

MOST_TIMES, FEWEST_TIMES = 9, 3
SMALLEST_CAP_BYTES = 64 * 2**10
_SHORTEST_S = 1e-9


class GradientType(NamedTuple):
    """The device type and dtype of gradients, such as ``cpu`` and ``float32``. A bucket holds one type only."""

    device_type: str
    dtype: str

    @classmethod
    def of(cls, part: ParamSpec | BucketPlan) -> GradientType:
        """Returns the type of a parameter's gradient, or of a bucket."""
        return cls(part.device.type, str(part.dtype).removeprefix("torch."))


class TimeModel(NamedTuple):
    """A linear model of a bucket's time: ``alpha_s`` latency plus ``beta_s`` seconds per byte, neither negative."""

    alpha_s: float
    beta_s: float

    def time_s(self, nbytes: int) -> float:
        """Returns the predicted seconds of a bucket of ``nbytes``."""
        return self.alpha_s + self.beta_s * nbytes


class Candidate(NamedTuple):
    """A bucket cap and its prediction. ``step_s``, from backward's start to the last average, is first, for `min`."""

    step_s: float
    buckets: int
    cap_bytes: int


def tuned_cap(
    group: Group,
    settings: Settings,
    named: Sequence[tuple[str, Tensor]],
    groups: Sequence[Sequence[str]],
    *,
    path: str | None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Measures, and returns the bucket cap in bytes for these parameters. Every rank of the group must call it.

    Rank 0 appends a line of JSON to the file ``path``. A group of one rank measures nothing and keeps the cap of
    ``settings``. Raises MismatchError on every rank if the ranks' parameters differ, and OSError on every rank if rank
    0 cannot write the file.
    """
    specs = [ParamSpec.of(name, param) for name, param in named]
    require_same_model(group, [(spec.name, spec.describe()) for spec in specs])
    like = {GradientType.of(spec): spec for spec in specs}
    totals: Counter[GradientType] = Counter()
    for plan in _travelling(specs, 0) if group.size > 1 else []:
        totals[GradientType.of(plan)] += plan.nbytes
    measured = {
        kind: measure(group, settings, like[kind], most_bytes=total, limit_s=LIMIT_S / len(totals), clock=clock)
        for kind, total in totals.items()
    }
    chosen: tuple[int, str | None] = settings.cap_bytes, None
    if group.rank == 0:
        report = _conclude(group, settings, specs, groups, measured)
        try:
            if path is not None:
                safe_paths.append(path, json.dumps(report) + "\n")
            chosen = report["cap_bytes"], None
        except OSError as error:
            chosen = 0, f"the log of autotune cannot be written on {group.describe_rank(0)}: {error}"
    cap_bytes, problem = group.all_gather_json(chosen, "autotune")[0]
    if problem is not None:
        raise OSError(problem)
    return int(cap_bytes)


def measure(
    group: Group, settings: Settings, like: ParamSpec, *, most_bytes: int, limit_s: float, clock: Callable[[], float]
) -> dict[int, float]:
    """Returns the seconds that a bucket takes on the slowest rank, by its size in bytes. Every rank must call it.

    The buckets have the dtype and device of ``like``. Sizes go up to ``most_bytes``, or as far as ``limit_s`` allows.
    """
    # Ranks decide how often and how large to send by the slowest rank's times alone: by their own clocks they might
    # decide differently, and their collectives would no longer pair up.
    exchange, links = exchange_of(settings, group.size), Links(group)
    count = ParticipantCount.of_all(group.size)
    sizes = [nbytes // like.dtype.itemsize for nbytes in SIZES if nbytes <= max(most_bytes, SIZES[1])]
    specs = [replace(like, name="autotune's probe", shape=(numel,), stride=(1,)) for numel in sizes]
    plans = [plan_buckets([spec], cap_bytes=0)[0] for spec in specs]
    memory = group.zeros(plans[-1].numel, like.dtype, like.device)

    def send(plan: BucketPlan) -> float:
        """Averages one bucket, and returns the seconds that it took on this rank."""
        what, flat = f"{plan.describe()} (a trial of autotune)", memory[: plan.grad_numel]
        gradients = Gradients(
            plan, flat, lambda: [flat], what=what, flat_with_counts=memory[: plan.numel], ranks=group.size
        )
        begin_s = clock()
        begun = exchange.begin(gradients, links)
        begun.wait()
        begun.finish(count)
        if exchange.tells_failures:
            raise_together(group, begun.failure, "the end of a trial of autotune")
        if like.device.type != "cpu":
            torch.accelerator.synchronize(like.device)
        return clock() - begin_s

    def slowest(own_s: float) -> float:
        """Returns the maximum over all ranks. Waits for them."""
        wire = torch.tensor([own_s], dtype=torch.float64, device="cpu")
        group.all_reduce(wire, "comparing times for autotune", Max).wait()
        return float(wire.item())

    # Not timed: an engine may open its connections only at the first collective.
    send(plans[0])
    start_s = clock()
    times_s: dict[int, float] = {}
    for plan in plans:
        left_s = limit_s - slowest(clock() - start_s)
        if len(times_s) > 1 and left_s < (1 + FEWEST_TIMES) * fit(times_s).time_s(plan.nbytes):
            break
        # The first send of a size also allocates memory, so it only decides how often to repeat.
        first_s = max(slowest(send(plan)), _SHORTEST_S)
        times = min(MOST_TIMES, max(FEWEST_TIMES, int(left_s / 4 / first_s)))
        times_s[plan.nbytes] = slowest(statistics.median(send(plan) for _ in range(times)))
    return times_s


def fit(times_s: Mapping[int, float]) -> TimeModel:
    """Returns the line with the least sum of relative deviations from ``times_s``, the measured seconds by bytes.

    It tries every line through two points, and every line through one that has only a latency or only a bandwidth.
    Relative, so that a small bucket's microseconds count, and not squared, so that no size measured on a busy machine
    dominates.
    """
    points = [(nbytes, max(time_s, _SHORTEST_S)) for nbytes, time_s in times_s.items()]
    lines = [TimeModel(time_s, 0.0) for _, time_s in points]
    for (few, sooner_s), (many, later_s) in combinations(sorted([(0, 0.0), *points]), 2):
        beta_s = (later_s - sooner_s) / (many - few)
        lines.append(TimeModel(sooner_s - beta_s * few, beta_s))
    possible = [line for line in lines if min(line) >= 0]
    return min(possible, key=lambda line: sum(abs(line.time_s(nbytes) / time_s - 1) for nbytes, time_s in points))


def candidates(
    specs: Sequence[ParamSpec], groups: Sequence[Sequence[str]], line_of: Mapping[GradientType, TimeModel]
) -> list[Candidate]:
    """Returns the caps from 64 KiB in powers of two up to the first that holds all gradients, with their steps."""
    total = sum(plan.nbytes for plan in _travelling(specs, 0, groups))
    found: list[Candidate] = []
    while not found or found[-1].cap_bytes < total:
        cap_bytes = SMALLEST_CAP_BYTES << len(found)
        plans = _travelling(specs, cap_bytes, groups)
        found.append(Candidate(step_s(specs, plans, line_of), len(plans), cap_bytes))
    return found


def step_s(specs: Sequence[ParamSpec], plans: Sequence[BucketPlan], line_of: Mapping[GradientType, TimeModel]) -> float:
    """Returns the predicted seconds from the start of backward to the last average, with these buckets."""
    travelling = {piece.spec.name for plan in plans for piece in plan.slices}
    order = [spec for spec in reversed(specs) if spec.name in travelling]
    sizes = [spec.numel * spec.dtype.itemsize for spec in order]
    computed_at = dict(zip([spec.name for spec in order], accumulate(sizes), strict=True))
    backward_s = sum(line_of[GradientType.of(spec)].beta_s * nbytes for spec, nbytes in zip(order, sizes, strict=True))
    pace_s = backward_s / max(1, sum(sizes))
    done_s = 0.0
    for plan in plans:
        ready_s = pace_s * max((computed_at[piece.spec.name] for piece in plan.slices), default=0)
        done_s = max(ready_s, done_s) + line_of[GradientType.of(plan)].time_s(plan.nbytes)
    return done_s


def _travelling(specs: Sequence[ParamSpec], cap_bytes: int, groups: Sequence[Sequence[str]] = ()) -> list[BucketPlan]:
    """Plans buckets, and returns those that are sent in every step (not those of frozen parameters)."""
    return [plan for plan in plan_buckets(specs, cap_bytes=cap_bytes, groups=groups) if not plan.is_frozen]


def _conclude(
    group: Group,
    settings: Settings,
    specs: Sequence[ParamSpec],
    groups: Sequence[Sequence[str]],
    measured: Mapping[GradientType, Mapping[int, float]],
) -> dict[str, Any]:
    """Fits lines, chooses ``cap_bytes``, and returns the entry for the log with that choice in it."""
    line_of = {kind: fit(times_s) for kind, times_s in measured.items()}
    among = candidates(specs, groups, line_of) if measured else []
    cap_bytes = min(among).cap_bytes if among else settings.cap_bytes
    size = f"buckets of at most {cap_bytes / 2**20:g} MiB"
    if among:
        lines = [
            f"{kind.device_type} {kind.dtype}: {line.alpha_s * 1e6:.4g} µs + {line.beta_s * 2**20 * 1e6:.4g} µs per MiB"
            for kind, line in line_of.items()
        ]
        log.info("autotune: %s, %d of them (an all-reduce takes: %s)", size, min(among).buckets, "; ".join(lines))
    else:
        log.info("autotune: a single rank has nothing to measure: %s", size)
    engines = [
        {
            **kind._asdict(),
            "bytes": list(times_s),
            "medians_s": list(times_s.values()),
            "alpha_s": line_of[kind].alpha_s,
            "beta_s_per_byte": line_of[kind].beta_s,
        }
        for kind, times_s in measured.items()
    ]
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": group.size,
        "compression": repr(settings.compression),
        "engines": engines,
        "candidates": [candidate._asdict() for candidate in among],
        "cap_bytes": cap_bytes,
    }
