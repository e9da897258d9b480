"""
`step`: measures whole training steps of some models, each with several variants, which take turns step by step.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import nn

from .arguments import OptionError, count_flag, flag, show_ratio, show_time, some_of
from .ranks import Ranks
from .report import Bars, Case, Chart, Columns, Comparison, Row, grouped, ratio_of
from .training import (
    BATCH,
    OPTIMIZER,
    OPTIMIZERS,
    UNUSUAL,
    VARIANTS,
    WORKLOADS,
    horovod_problem,
    training_bytes,
    variants_flag,
)

# Unmeasured steps, after which autograd and the allocators have settled, and DDP has rebuilt its buckets.
WARM_UPS = 3
_USUAL = tuple(name for name in VARIANTS if name not in UNUSUAL)
_MODELS = flag("NAME,…", some_of(WORKLOADS, "a model"), f"of {', '.join(WORKLOADS)} (all)")


@dataclass
class Step(Comparison):
    """The command `step`. Each model is a case. Models and variants not named by a flag are skipped if unavailable."""

    name = "step"
    help = "a training step with hvdlite, DDP, Horovod, and without any communication"
    models: Sequence[str] | None = field(default=None, metadata=_MODELS)
    variants: Sequence[str] | None = field(default=None, metadata=variants_flag(VARIANTS, _USUAL))
    batch: int | None = field(default=None, metadata=BATCH)
    steps: int = field(default=20, metadata=count_flag("steps of each"))
    optimizer: str = field(default="sgd", metadata=OPTIMIZER)

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
    text_columns = 2

    def __post_init__(self) -> None:
        self._variants = list(self.variants or _USUAL)
        self.notes = ["× none, × ddp: how many times as long as that variant's step; below 1 is faster."]
        self.cases = [
            Case(name, {"model": name, "batch": self.batch or WORKLOADS[name].rows}, skipped=WORKLOADS[name].missing())
            for name in (WORKLOADS if self.models is None else self.models)
        ]
        self.turns = len(self.cases) * self.steps
        missing = [case.skipped for case in self.cases if case.skipped]
        if self.models is not None and missing:
            raise OptionError(f"--models: {missing[0]}")

    def prepare(self, ranks: Ranks) -> None:
        problem = horovod_problem(ranks) if "horovod" in self._variants else None
        if problem is not None:
            if self.variants is not None:
                raise OptionError(f"--variants: {problem}")
            self._variants.remove("horovod")
            self.notes = [f"left out: {problem}", *self.notes]

    def run(self, ranks: Ranks) -> None:
        self.job = ranks.job
        for case in self.cases:
            # torchvision may be missing on only some hosts.
            case.skipped = ranks.first(case.skipped)
            if case.skipped is None:
                model = WORKLOADS[case.about["model"]].make(ranks.device, self.optimizer)
                case.skipped = ranks.why_too_large(len(self._variants) * training_bytes(model, self.optimizer))
            if case.skipped is None:
                self._measure(case, model, ranks)
            else:
                ranks.progress(case.about["model"], self.steps)
            gc.collect()

    def _measure(self, case: Case, model: nn.Module, ranks: Ranks) -> None:
        name = case.about["model"]
        ranks.progress(name)
        batch = WORKLOADS[name].batch(case.about["batch"], 1 + ranks.rank, ranks.device)
        with ExitStack() as stack:
            blocks = {}
            for variant in self._variants:
                training = VARIANTS[variant](ranks, copy.deepcopy(model), OPTIMIZERS[self.optimizer])
                stack.callback(training.close)
                for _ in range(WARM_UPS):
                    training.step(batch)
                blocks[variant] = partial(ranks.timed, partial(training.step, batch))
            case.samples = {variant: [] for variant in blocks}
            ranks.take_turns(name, blocks, self.steps, case.samples)

    def title(self) -> str:
        return f"a training step on {self.job}, of the slowest rank, with {self.optimizer}"

    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        times = {f"times_{each}": ratio_of(medians[name], medians.get(each)) for each in ("none", "ddp")}
        return {"variant": name, **times}

    def chart(self, rows: Sequence[Row]) -> Chart:
        """Returns a chart of ratios to the variant "none", or of milliseconds if some model has no such samples."""
        in_ratios = all(row["times_none"] for row in rows)
        label = "× the step without communication" if in_ratios else "ms"
        panels = []
        for model, of_model in grouped(rows, "model").items():
            first = of_model[0]
            one = first["median_s"] / first["times_none"] if in_ratios else 1e-3
            texts = [show_ratio(row["times_none"]) if in_ratios else show_time(row["median_s"]) for row in of_model]
            title = f"{model}, batch {first['batch']} of each rank"
            panels.append(Bars(title, label, of_model, "s", one, texts, base=float(in_ratios)))
        caption = f"{self.job}. Medians, of the slowest rank; whiskers are quartiles."
        return Chart("How long a training step takes", caption, panels, shares_x=in_ratios)
