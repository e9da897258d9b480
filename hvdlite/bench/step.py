"""
`step`: whole training steps of some models, each trained in several ways that take turns step by step.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from torch import nn

from .arguments import BATCH, Flag, UsageError, count_flag, some_of, variants_flag
from .plot import Bar, Bars, Chart
from .ranks import Ranks
from .report import Case, Columns, Command, Quartiles, Row, grouped, ratio_of
from .units import show_ratio, show_time
from .variants import VARIANTS, horovod_problem
from .workloads import WORKLOADS, bytes_of

# After these autograd and the allocators have settled, and DDP has rebuilt its buckets.
WARM_UPS = 3
_USUAL = tuple(name for name in VARIANTS if name not in ("hvdlite-tuned", "hvdlite-arrival"))
# A parameter, its gradient, a bucket and a wire.
_COPIES = 4


class Step(Command):
    """The command. Each model is a case. What is not named by a flag is left out where it cannot be measured."""

    name = "step"
    help = "a training step with hvdlite, DDP, Horovod, and without any communication"
    flags = (
        Flag("--models", some_of(WORKLOADS, "a model"), "NAME,…", f"of {', '.join(WORKLOADS)} (all)"),
        variants_flag(VARIANTS, _USUAL),
        BATCH,
        count_flag("--steps", 20, "steps of each"),
    )

    columns: ClassVar[Columns] = {
        "model": lambda row: row["model"],
        "variant": lambda row: row["variant"],
        "batch": lambda row: str(row["batch"]),
        "step": lambda row: show_time(row["median_s"]),
        "quartiles": lambda row: f"{show_time(row['low_s'])} … {show_time(row['high_s'])}",
        "× none": lambda row: show_ratio(row["times_none"]),
        "× ddp": lambda row: show_ratio(row["times_ddp"]),
        "steps": lambda row: str(row["count"]),
    }
    words = 2

    def __init__(
        self, models: Sequence[str] | None, variants: Sequence[str] | None, batch: int | None, steps: int
    ) -> None:
        self.cases = [
            Case(name, {"model": name, "batch": batch or WORKLOADS[name].rows})
            for name in (WORKLOADS if models is None else models)
        ]
        self._variants = list(variants or _USUAL)
        self._named_variants = variants is not None
        self._steps = steps
        self.notes: list[str] = ["× none, × ddp: how many times as long as that variant's step; below 1 is faster."]
        self.turns = len(self.cases) * steps
        for case in self.cases:
            case.skipped = WORKLOADS[case.about["model"]].missing()
            if models is not None and case.skipped is not None:
                raise UsageError(f"--models: {case.skipped}")

    def prepare(self, ranks: Ranks) -> None:
        problem = horovod_problem(ranks) if "horovod" in self._variants else None
        if problem is not None:
            if self._named_variants:
                raise UsageError(f"--variants: {problem}")
            self._variants.remove("horovod")
            self.notes.insert(0, f"left out: {problem}")

    def run(self, ranks: Ranks) -> None:
        self.job = ranks.job
        for case in self.cases:
            # torchvision may be missing on one host alone.
            case.skipped = ranks.first(case.skipped)
            if case.skipped is None:
                model = WORKLOADS[case.about["model"]].make(ranks.device)
                case.skipped = ranks.why_too_large(_COPIES * len(self._variants) * bytes_of(model))
            if case.skipped is None:
                self._measure(case, model, ranks)
            else:
                ranks.progress(case.about["model"], self._steps)
            gc.collect()

    def _measure(self, case: Case, model: nn.Module, ranks: Ranks) -> None:
        name = case.about["model"]
        ranks.progress(name)
        batch = WORKLOADS[name].batch(case.about["batch"], 1 + ranks.rank, ranks.device)
        with ExitStack() as stack:
            blocks = {}
            for variant in self._variants:
                training = VARIANTS[variant](ranks, copy.deepcopy(model))
                stack.callback(training.close)
                for _ in range(WARM_UPS):
                    training.step(batch)
                blocks[variant] = partial(ranks.timed, partial(training.step, batch))
            case.samples = {variant: [] for variant in blocks}
            ranks.take_turns(name, blocks, self._steps, case.samples)

    def title(self) -> str:
        return f"a training step on {self.job}, of the slowest rank"

    def describe(self, case: Case, name: str, found: Mapping[str, Quartiles]) -> Row:
        return {
            "variant": name,
            "times_none": ratio_of(found[name], found.get("none")),
            "times_ddp": ratio_of(found[name], found.get("ddp")),
        }

    def chart(self, rows: Sequence[Row]) -> Chart:
        """Ratios to "none", or milliseconds where it was not measured with every model."""
        in_ratios = all(row["times_none"] for row in rows)
        label = "× the step without communication" if in_ratios else "ms"
        panels = []
        for model, of_model in grouped(rows, "model").items():
            bars = []
            for row in of_model:
                unit = row["median_s"] / row["times_none"] if in_ratios else 1e-3
                text = show_ratio(row["times_none"]) if in_ratios else show_time(row["median_s"])
                median, low, high = (row[f"{key}_s"] / unit for key in ("median", "low", "high"))
                bars.append(Bar(row["variant"], median, low, high, text))
            panels.append(Bars(f"{model}, batch {of_model[0]['batch']} of each rank", label, bars, float(in_ratios)))
        caption = f"{self.job}. Medians, of the slowest rank; whiskers are quartiles."
        return Chart("How long a training step takes", caption, panels)
