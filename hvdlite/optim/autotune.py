"""
The size of an optimizer's buckets, by measuring: one short probe, one answer on all ranks, told in log and file.

    same model? ── probe, for each engine that its gradients need ── rank 0: fit, choose, write ── every rank: the cap

The file has one line of JSON for each optimizer: ``at`` (UTC), ``ranks``, ``compression``; ``engines``, each with
``device_type``, ``dtype`` (of gradients), ``bytes`` and ``medians_s`` as measured, ``alpha_s`` and ``beta_s_per_byte``
as fitted; ``candidates``, each with ``cap_bytes``, ``buckets`` and ``step_s`` as predicted (see `tuning`); and the
chosen ``cap_bytes``. A later line is appended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, TypeVar

from torch import Tensor

from .. import files
from ..comm.group import Group
from ..log import log
from .gradient_hooks import require_same_model
from .plan import ParamSpec, plan_buckets
from .probe import Measured, measure
from .settings import Settings
from .tuning import Candidate, GradientType, Line, best, candidates, fit

LIMIT_S = 1.0
"""About how long the probe may take, over all engines."""

Answer = TypeVar("Answer")


def tuned_cap(
    group: Group,
    settings: Settings,
    named: Sequence[tuple[str, Tensor]],
    groups: Sequence[Sequence[str]],
    *,
    path: str | None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """The cap in bytes for these parameters over this group, whose engine nobody else uses meanwhile; waits for all.

    ``path`` is where rank 0 writes what was measured. Where a rank is alone there is nothing to measure, and the
    cap stays that of ``settings``. A MismatchError on every rank if one has other parameters, an OSError on every rank
    if rank 0 cannot write.
    """
    _by_rank_0(group, lambda: _append(path, ""))
    specs = [ParamSpec.of(name, param) for name, param in named]
    require_same_model(group, [(spec.name, spec.describe()) for spec in specs])
    measured: dict[GradientType, Measured] = {}
    if group.size > 1:
        nbytes_of = _needed(specs)
        for engine, nbytes in nbytes_of.items():
            like = next(spec for spec in specs if GradientType.of(spec) == engine)
            limit_s = LIMIT_S / len(nbytes_of)
            measured[engine] = measure(group, settings, like, most_bytes=nbytes, limit_s=limit_s, clock=clock)
    return _by_rank_0(group, lambda: _conclude(group, settings, specs, groups, measured, path))


def _needed(specs: Sequence[ParamSpec]) -> dict[GradientType, int]:
    """The bytes of gradients that each engine carries in a step."""
    nbytes_of: dict[GradientType, int] = {}
    for plan in plan_buckets(specs, cap_bytes=0):
        if not plan.asleep:
            nbytes_of[GradientType.of(plan)] = nbytes_of.get(GradientType.of(plan), 0) + plan.nbytes
    return nbytes_of


def _by_rank_0(group: Group, decide: Callable[[], Answer]) -> Answer:
    """What rank 0 alone decides, on every rank; its OSError as well."""
    outcome: tuple[Any, str | None] = None, None
    if group.rank == 0:
        try:
            outcome = decide(), None
        except OSError as error:
            outcome = None, f"the log of autotune cannot be written on {group.describe_rank(0)}: {error}"
    answer, problem = group.all_gather_json(outcome, "autotune")[0]
    if problem is not None:
        raise OSError(problem)
    decided: Answer = answer
    return decided


def _append(path: str | None, line: str) -> None:
    if path is not None:
        files.append(path, line)


def _conclude(
    group: Group,
    settings: Settings,
    specs: Sequence[ParamSpec],
    groups: Sequence[Sequence[str]],
    measured: Mapping[GradientType, Measured],
    path: str | None,
) -> int:
    line_of = {engine: fit(each.sizes, each.medians_s) for engine, each in measured.items()}
    among = candidates(specs, groups, line_of) if measured else []
    cap_bytes = best(among).cap_bytes if among else settings.cap_bytes
    _tell(cap_bytes, among, line_of)
    engines = [
        {
            **asdict(engine),
            "bytes": measured[engine].sizes,
            "medians_s": measured[engine].medians_s,
            "alpha_s": line.alpha_s,
            "beta_s_per_byte": line.beta_s,
        }
        for engine, line in line_of.items()
    ]
    report = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "ranks": group.size,
        "compression": repr(settings.compression),
        "engines": engines,
        "candidates": [asdict(candidate) for candidate in among],
        "cap_bytes": cap_bytes,
    }
    _append(path, json.dumps(report) + "\n")
    return cap_bytes


def _tell(cap_bytes: int, among: Sequence[Candidate], line_of: Mapping[GradientType, Line]) -> None:
    size = f"gradients travel in buckets of at most {cap_bytes / 2**20:g} MiB"
    if not among:
        log.info("autotune: one rank has nothing to measure; %s", size)
        return
    lines = "; ".join(
        f"{engine.device_type} {engine.dtype}: {line.alpha_s * 1e6:.4g} µs and {line.beta_s * 2**20 * 1e6:.4g} µs a MiB"
        for engine, line in line_of.items()
    )
    log.info("autotune: %s, %d of them (%s)", size, best(among).buckets, lines)
