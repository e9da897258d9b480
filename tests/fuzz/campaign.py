"""Runs many programs on one leg, one after the other, until a time or a number of them is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .drawing import draw_program
from .judge import Finding, examine
from .pool import Leg, Pool
from .program import Program
from .shrinking import shrink


@dataclass
class Result:
    """What a campaign has found: the first program of each kind of finding, and how many there were."""

    programs: int = 0
    seconds: float = 0.0
    # Those that ended in an error that the manual knows, and those with a step that `Unsettled` left out.
    refused: int = 0
    unsettled: int = 0
    findings: dict[str, tuple[Program, Finding]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def run(
    leg: Leg,
    seeds: Iterable[int],
    until_s: float = float("inf"),
    tell: Callable[[Program, Finding], None] = lambda program, finding: None,
    deadline_s: float = 20.0,
    stop_at: int | None = None,
    begins: Callable[[int], None] = lambda seed: None,
    shard: float = 0.3,
) -> Result:
    """Runs the programs of these seeds; ``tell`` is called with the first of each kind of finding.

    ``shard`` is that of `draw_program`. ``begins`` is called with each seed before its program runs. It ends after
    ``until_s``, or with ``stop_at`` kinds of findings.
    """
    result, begun = Result(), time.monotonic()
    with Pool(leg, deadline_s) as pool:
        for seed in seeds:
            if time.monotonic() > begun + until_s or len(result.findings) == stop_at:
                break
            begins(seed)
            program = draw_program(seed, leg.size, shard)
            verdict = examine(program, leg, pool)
            finding = verdict.finding
            result.programs += 1
            result.refused += verdict.is_refused
            result.unsettled += verdict.is_unsettled
            if finding is not None:
                result.counts[finding.kind] += 1
                if finding.kind not in result.findings:
                    result.findings[finding.kind] = (program, finding)
                    tell(program, finding)
    result.seconds = time.monotonic() - begun
    return result


def smallest(program: Program, finding: Finding, leg: Leg, limit_s: float = 60.0) -> tuple[Program, Finding]:
    """Returns a smaller program that fails in the same way, and how."""
    with Pool(leg, deadline_s=3.0) as pool:

        def fails(attempt: Program) -> bool:
            found = examine(attempt, leg, pool).finding
            return found is not None and found.family == finding.family

        small = shrink(program, fails, limit_s)
        return small, examine(small, leg, pool).finding or finding
