"""
Reports a command's measurements: tables on the screen, JSON and a plot in files.

    Case (samples by name) ── rows with quartiles, as in JSON ── Table and Chart ── Report

A report may be made at any time, of what has been measured by then.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from .arguments import Flag, UsageError
from .plot import SUFFIXES, Chart, draw, require_matplotlib
from .ranks import Job, Ranks, Samples

# What JSON says of one thing that was measured.
Row = dict[str, Any]
# A column's name, and what it shows of a row.
Columns = dict[str, Callable[[Row], str]]


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Half of the ``count`` samples lie between ``low`` and ``high``."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Quartiles:
        """The quartiles of one sample or more."""
        several = samples if len(samples) > 1 else [*samples, *samples]
        low, median, high = statistics.quantiles(several, method="inclusive")
        return cls(median, low, high, len(samples))


def ratio_of(numerator: Quartiles | None, denominator: Quartiles | None) -> float | None:
    """The ratio of the medians; None where either was not measured, or the denominator took no time."""
    if numerator is None or denominator is None or denominator.median == 0:
        return None
    return numerator.median / denominator.median


@dataclass
class Case:
    """What is compared with each other: samples by name, or why it was ``skipped``. Each row says ``about``."""

    label: str
    about: Row
    samples: Samples = field(default_factory=dict)
    skipped: str | None = None

    def rows(self, unit: str, describe: Callable[[str, Mapping[str, Quartiles]], Row]) -> list[Row]:
        """A row for each name that has samples, which are in ``unit``.

        ``describe`` is called with the name and the quartiles of all names, and returns what else the row says.
        """
        found = {name: Quartiles.of(each) for name, each in self.samples.items() if each}
        return [
            {
                **self.about,
                **describe(name, found),
                **{f"{key}_{unit}": getattr(each, key) for key in ("median", "low", "high")},
                "count": each.count,
                f"samples_{unit}": self.samples[name],
            }
            for name, each in found.items()
        ]


def grouped(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """The rows by their value of a key, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


@dataclass(frozen=True)
class Table:
    """A table as text. The first ``words`` columns are aligned to the left, the others to the right."""

    rows: Sequence[Row]
    columns: Columns
    words: int
    title: str

    def __str__(self) -> str:
        lines = [list(self.columns), *([show(row) for show in self.columns.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title, ""]
        for cells in lines:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            padded[: self.words] = map(str.ljust, cells[: self.words], widths)
            text.append("  ".join(padded).rstrip())
        return "\n".join(text)


@dataclass(frozen=True)
class Report:
    """``data`` is for JSON: the figures of the tables and every sample. ``opening`` is shown above the tables."""

    tables: Sequence[Table]
    data: Mapping[str, Any]
    chart: Chart
    notes: Sequence[str] = ()
    opening: str = ""

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [self.opening, *map(str, self.tables), "\n".join(self.notes)]))


class Command:
    """What one command measures, as cases of ``unit``. It is made of its flags; all ranks call `prepare` and `run`."""

    name: str
    help: str
    flags: Sequence[Flag]
    unit = "s"
    columns: ClassVar[Columns]
    words: int
    """So many columns are words."""
    notes: Sequence[str] = ()
    job = Job()
    cases: Sequence[Case] = ()
    turns: int
    """The length of the progress bar."""

    def prepare(self, ranks: Ranks) -> None:
        """Raise UsageError on all ranks where it cannot be measured."""

    def run(self, ranks: Ranks) -> None:
        """Measure."""
        raise NotImplementedError

    def describe(self, case: Case, name: str, found: Mapping[str, Quartiles]) -> Row:
        """What a row says of a name besides its quartiles; ``found`` has those of all names."""
        raise NotImplementedError

    def title(self) -> str:
        """The line above the table."""
        raise NotImplementedError

    def chart(self, rows: Sequence[Row]) -> Chart:
        """What is drawn of the rows."""
        raise NotImplementedError

    def report(self) -> Report:
        """What has been measured by now."""
        rows = [row for case in self.cases for row in case.rows(self.unit, partial(self.describe, case))]
        skipped = [case for case in self.cases if case.skipped]
        data = {"rows": rows, "skipped": [{**case.about, "why": case.skipped} for case in skipped]}
        told = [f"skipped: {case.label}: {case.skipped}" for case in skipped]
        table = Table(rows, self.columns, self.words, self.title())
        return Report([table], data, self.chart(rows), [*told, *self.notes])


@dataclass(frozen=True)
class Files:
    """Where a report goes besides the screen."""

    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raise UsageError where one of them cannot be written. Nothing is created yet."""
        if self.plot is not None:
            if self.plot.suffix.lower() not in SUFFIXES:
                raise UsageError(f"--plot: {str(self.plot)!r} does not end in {', '.join(SUFFIXES)}")
            require_matplotlib()
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path is None:
                continue
            if path.is_dir():
                raise UsageError(f"{flag}: {str(path)!r} is a directory")
            if not path.parent.is_dir():
                why = f"there is no directory {str(path.parent)!r}"
            elif not os.access(path if path.exists() else path.parent, os.W_OK):
                why = "permission denied"
            else:
                continue
            raise UsageError(f"{flag}: {str(path)!r} cannot be written: {why}")

    def write(self, report: Report, about: Mapping[str, Any]) -> Iterator[Path]:
        """Write those that were asked for, and yield the path of each. ``about`` is what JSON says of the run."""
        if self.json is not None:
            self.json.write_text(json.dumps({**about, **report.data}, indent=1) + "\n")
            yield self.json.absolute()
        if self.plot is not None:
            draw(report.chart, self.plot)
            yield self.plot.absolute()
