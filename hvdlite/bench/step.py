"""
`step`: whole training steps of some models, each trained in several ways that take turns, step by step.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from .errors import UsageError
from .memory_left import why_too_large
from .plot import Bar, Bars, Chart, is_own
from .progress import Progress
from .quantities import show_ratio, show_ratios, show_time
from .ranks import Ranks
from .report import Report
from .setting import Setting
from .spread import Spread, ratio_of
from .table import Table
from .turns import Samples, take_turns, timed
from .variants import VARIANTS, require_horovod
from .workloads import Workload

# Autograd, allocators and DDP, which orders its buckets anew after the first step, have settled by then.
WARM_UPS = 3
# A parameter, its gradient, a bucket or a wire.
_COPIES = 4


@dataclass
class Race:
    """One model; ``samples`` are seconds of a step by variant, unless it was ``skipped`` for a reason."""

    workload: Workload
    rows: int
    samples: Samples = field(default_factory=dict)
    skipped: str | None = None


class Step:
    """The command. Variants and models that were not asked for by name are left out where they cannot be had."""

    name = "step"

    def __init__(
        self,
        workloads: Sequence[Workload],
        variants: Sequence[str],
        rows: int | None,
        steps: int,
        *,
        named_models: bool,
        named_variants: bool,
    ) -> None:
        """``rows`` is the batch of each rank, the workload's own if None."""
        self.races = [Race(workload, rows or workload.rows) for workload in workloads]
        self._variants = list(variants)
        self._steps = steps
        self._named_variants = named_variants
        self._notes: list[str] = []
        self._setting = Setting()
        for race in self.races:
            try:
                race.workload.require()
            except UsageError as error:
                if named_models:
                    raise UsageError(f"--models: {error}") from None
                race.skipped = str(error)

    @property
    def turns(self) -> int:
        """How many turns all of it takes."""
        return len(self.races) * self._steps

    def prepare(self, ranks: Ranks) -> None:
        """Look for what only the ranks together can know; every rank must call it. Raises UsageErrors."""
        if "horovod" in self._variants:
            try:
                require_horovod(ranks)
            except UsageError as error:
                if self._named_variants:
                    raise UsageError(f"--variants: {error}") from None
                self._variants.remove("horovod")
                self._notes.append(f"left out: {error}")

    def run(self, ranks: Ranks, progress: Progress) -> None:
        """Measure; every rank must call it."""
        self._setting = ranks.setting
        for race in self.races:
            progress.begin(race.workload.name)
            # A model may be missing on one host alone.
            race.skipped = ranks.first(race.skipped)
            if race.skipped is None:
                model = race.workload.make(ranks.device)
                race.skipped = why_too_large(ranks, _COPIES * len(self._variants) * bytes_of(model))
            if race.skipped is None:
                self._run(race, model, ranks, progress)
            else:
                progress.advance(self._steps)
            gc.collect()

    def _run(self, race: Race, model: nn.Module, ranks: Ranks, progress: Progress) -> None:
        batch = race.workload.batch(race.rows, 1 + ranks.rank, ranks.device)
        with ExitStack() as stack:
            steps = {}
            for name in self._variants:
                training = VARIANTS[name](ranks, copy.deepcopy(model))
                stack.callback(training.close)
                steps[name] = partial(training.step, batch)
                for _ in range(WARM_UPS):
                    steps[name]()
            race.samples = {name: [] for name in steps}
            blocks = {name: partial(timed, ranks, step) for name, step in steps.items()}
            take_turns(ranks, blocks, self._steps, race.samples, progress)

    def report(self) -> Report:
        """What has been measured by now."""
        return report_of(self.races, self._setting, self._notes)


def bytes_of(model: nn.Module) -> int:
    """Those of the parameters."""
    return sum(param.numel() * param.dtype.itemsize for param in model.parameters())


def report_of(races: Sequence[Race], setting: Setting, notes: Sequence[str] = ()) -> Report:
    """The report of races, as far as they have got."""
    rows = [row for race in races for row in _rows(race)]
    header = ["model", "variant", "batch", "step", "quartiles", "× none", "× ddp", "steps"]
    lines = [
        [
            *(row["model"], row["variant"], str(row["batch"]), show_time(row["median_s"])),
            f"{show_time(row['low_s'])} … {show_time(row['high_s'])}",
            *(show_ratio(row["times_none"]), show_ratio(row["times_ddp"]), str(row["count"])),
        ]
        for row in rows
    ]
    skipped = [{"model": race.workload.name, "why": race.skipped} for race in races if race.skipped]
    all_notes = [*(f"skipped: {each['model']}: {each['why']}" for each in skipped), *notes]
    all_notes.append("× none, × ddp: how many times as long as that variant's step; below 1 is faster.")
    title = f"a training step on {setting}, of the slowest rank"
    table = Table(header, lines, words=2, title=title)
    return Report([table], {"rows": rows, "skipped": skipped}, _chart_of(rows, setting), all_notes)


def _chart_of(rows: Sequence[dict[str, Any]], setting: Setting) -> Chart:
    """Ratios to "none", or times where it was not measured with every model."""
    in_ratios = all(row["times_none"] for row in rows)
    panels = []
    for model in dict.fromkeys(row["model"] for row in rows):
        bars = []
        for row in rows:
            if row["model"] != model:
                continue
            unit = row["median_s"] / row["times_none"] if in_ratios else 1e-3
            length = Spread(row["median_s"] / unit, row["low_s"] / unit, row["high_s"] / unit, row["count"])
            text = show_ratio(row["times_none"]) if in_ratios else show_time(row["median_s"])
            bars.append(Bar(row["variant"], length, text, is_own(row["variant"])))
        label = "× the step without communication" if in_ratios else "ms"
        batch = next(row["batch"] for row in rows if row["model"] == model)
        panels.append(Bars(f"{model}, batch {batch} of each rank", label, bars, 1.0 if in_ratios else 0.0))
    count = max((row["count"] for row in rows), default=0)
    caption = f"{setting}. Medians, of the slowest rank; whiskers are quartiles; {count} turns of each."
    sentence = _sentence_of(rows) if rows and in_ratios else "How long a training step takes"
    return Chart(sentence, caption, panels)


def _sentence_of(rows: Sequence[dict[str, Any]]) -> str:
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["variant"] != "none":
            ratios.setdefault(row["variant"], []).append(row["times_none"])
    # hvdlite itself, or one of its kinds, and DDP; whatever there is without them.
    chosen = [name for name in ratios if is_own(name)][:1] + [name for name in ratios if name == "ddp"]
    found = [(name, show_ratios(ratios[name])) for name in chosen or list(ratios)[:1]]
    if not found:
        return "A training step without communication"
    (name, much), *others = found
    more = "".join(f", and {much} with {name}" for name, much in others)
    return f"A training step takes {much} times as long with {name} as without communication{more}"


def _rows(race: Race) -> list[dict[str, Any]]:
    spreads = {name: spread for name, each in race.samples.items() if (spread := Spread.of(each)) is not None}
    return [
        {
            "model": race.workload.name,
            "variant": name,
            "batch": race.rows,
            "median_s": spread.median,
            "low_s": spread.low,
            "high_s": spread.high,
            "count": spread.count,
            "times_none": ratio_of(spread, spreads.get("none")),
            "times_ddp": ratio_of(spread, spreads.get("ddp")),
            "samples_s": race.samples[name],
        }
        for name, spread in spreads.items()
    ]
