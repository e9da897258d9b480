"""
`memory`: the most that a training takes above its model, in several ways that take turns.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from .memory_left import why_too_large
from .plot import Bar, Bars, Chart, is_own
from .progress import Progress
from .quantities import show_ratio, show_size
from .ranks import Ranks
from .report import Report
from .setting import Setting
from .spread import Spread, ratio_of
from .step import bytes_of
from .table import Table
from .turns import Samples
from .usage import Usage
from .variants import VARIANTS
from .workloads import Workload

REFERENCE = "ddp-view"
MEASURED = ("none", "ddp", "ddp-view", "ddp-fp16", "hvdlite", "hvdlite-fp16", "hvdlite-bf16")
_STEPS = 4
_COPIES = 4


class Memory:
    """The command. ``samples`` are bytes per rank, in the mean of all, by variant."""

    name = "memory"

    def __init__(self, workload: Workload, variants: Sequence[str], rows: int | None, rounds: int) -> None:
        self._workload = workload
        self._rows = rows or workload.rows
        self._rounds = rounds
        self._setting = Setting()
        self._usage: Usage | None = None
        self._model_bytes = 0
        self._skipped: str | None = None
        self.samples: Samples = {name: [] for name in variants}

    @property
    def turns(self) -> int:
        """How many turns all of it takes."""
        return self._rounds * len(self.samples)

    def prepare(self, ranks: Ranks) -> None:
        """Raise a UsageError where memory cannot be measured."""
        self._usage = Usage(ranks.device)

    def run(self, ranks: Ranks, progress: Progress) -> None:
        """Measure; every rank must call it."""
        self._setting = ranks.setting
        model = self._workload.make(ranks.device)
        self._model_bytes = bytes_of(model)
        del model
        self._skipped = why_too_large(ranks, _COPIES * self._model_bytes)
        if self._skipped is not None:
            return
        # What a process needs once, however it trains, is taken before.
        for name in self.samples:
            progress.begin(f"{name}, once before")
            self._most_above_model(name, ranks)
        for _ in range(self._rounds):
            for name, samples in self.samples.items():
                progress.begin(name)
                by_rank = ranks.gather(self._most_above_model(name, ranks))
                samples.append(sum(by_rank) / len(by_rank))
                progress.advance()

    def _most_above_model(self, name: str, ranks: Ranks) -> int:
        assert self._usage is not None, "prepared before"
        model = self._workload.make(ranks.device)
        batch = self._workload.batch(self._rows, 1 + ranks.rank, ranks.device)
        before = self._usage.begin()
        ranks.barrier()
        training = VARIANTS[name](ranks, model)
        for _ in range(_STEPS):
            training.step(batch)
        ranks.barrier()
        most = self._usage.most() - before
        # Nobody gives back shared memory that another has still to count.
        ranks.barrier()
        training.close()
        del training, model
        gc.collect()
        return most

    def report(self) -> Report:
        """What has been measured by now."""
        return report_of(self._workload.name, self._rows, self._model_bytes, self.samples, self._setting, self._skipped)


def report_of(
    model: str, batch: int, model_bytes: int, samples: Samples, setting: Setting, skipped: str | None = None
) -> Report:
    """The report of what has been measured of a model by now."""
    rows = _rows(samples, model_bytes)
    header = ["variant", "above the model", "quartiles", "in models", f"less {REFERENCE}", f"× {REFERENCE}", "times"]
    lines = [
        [
            *(row["variant"], show_size(row["median_bytes"])),
            f"{show_size(row['low_bytes'])} … {show_size(row['high_bytes'])}",
            show_ratio(row["in_models"]),
            "–" if row["above_reference_bytes"] is None else _signed(row["above_reference_bytes"]),
            *(show_ratio(row["times_reference"]), str(row["count"])),
        ]
        for row in rows
    ]
    title = f"peak memory of each of {setting}, {model} of {show_size(model_bytes)}, batch {batch}"
    data: dict[str, Any] = {"model": model, "batch": batch, "model_bytes": model_bytes, "rows": rows}
    notes = [] if skipped is None else [f"skipped: {model}: {skipped}"]
    if skipped is not None:
        data["skipped"] = [{"model": model, "why": skipped}]
    notes.append("Gradients, buckets, wires and activations; shared memory is counted once among the ranks of a host.")
    return Report([Table(header, lines, title=title)], data, _chart_of(rows, title), notes)


def _chart_of(rows: Sequence[dict[str, Any]], title: str) -> Chart:
    def megabytes(row: dict[str, Any]) -> Spread:
        low, middle, high = (row[key] / 2**20 for key in ("low_bytes", "median_bytes", "high_bytes"))
        return Spread(middle, low, high, row["count"])

    bars = [Bar(row["variant"], megabytes(row), show_size(row["median_bytes"]), is_own(row["variant"])) for row in rows]
    own = next((row for row in rows if is_own(row["variant"])), None)
    sentence = "The most memory that training takes above the model"
    if own is not None and own["in_models"] is not None:
        sentence = f"{own['variant']} takes {show_ratio(own['in_models'])} times the model's size above the model"
        if own["times_reference"] is not None:
            sentence += f", {show_ratio(own['times_reference'])} times what {REFERENCE} takes"
    return Chart(sentence, f"{title}. Medians; whiskers are quartiles.", [Bars("", "MB above the model", bars)])


def _rows(samples: Samples, model_bytes: int) -> list[dict[str, Any]]:
    spreads = {name: spread for name, each in samples.items() if (spread := Spread.of(each)) is not None}
    reference = spreads.get(REFERENCE)
    return [
        {
            "variant": name,
            "median_bytes": spread.median,
            "low_bytes": spread.low,
            "high_bytes": spread.high,
            "count": spread.count,
            "in_models": spread.median / model_bytes if model_bytes else None,
            "above_reference_bytes": None if reference is None else spread.median - reference.median,
            "times_reference": ratio_of(spread, reference),
            "samples_bytes": samples[name],
        }
        for name, spread in spreads.items()
    ]


def _signed(nbytes: float) -> str:
    return ("-" if nbytes < 0 else "+") + show_size(abs(nbytes))
