"""
The base classes of commands, and reports of their measurements: tables on the screen, JSON and a plot in files.

    Case (samples by name) ── rows with quartiles, as in JSON ── table and Chart ── Report

`__main__` runs a `Command` and asks it for a `Report`. It may do so at any time, for the measurements so far.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from .plot import Chart
from .ranks import Job, Ranks, Samples

# The JSON object of one measured thing.
Row = dict[str, Any]
# The text of each column for a row, by the column's title.
Columns = dict[str, Callable[[Row], str]]


def spread(samples: Sequence[float], unit: str) -> Row:
    """Returns the median, quartiles and samples as a part of a row, with ``unit`` in the keys."""
    several = samples if len(samples) > 1 else [*samples, *samples]
    low, median, high = statistics.quantiles(several, method="inclusive")
    quartiles = {f"median_{unit}": median, f"low_{unit}": low, f"high_{unit}": high}
    return {**quartiles, "count": len(samples), f"samples_{unit}": samples}


def ratio_of(numerator: float | None, denominator: float | None) -> float | None:
    """Returns the ratio, or None if either was not measured or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


def grouped(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """Returns the rows by their value of ``key``, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def table(title: str, rows: Sequence[Row], columns: Columns, text_columns: int = 0) -> str:
    """Returns a table as text. The first ``text_columns`` are aligned to the left, the others to the right."""
    lines = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [title, ""]
    for cells in lines:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[:text_columns] = map(str.ljust, cells[:text_columns], widths)
        text.append("  ".join(padded).rstrip())
    return "\n".join(text)


class Report(NamedTuple):
    """A report: ``text`` for the screen, ``data`` for JSON (the tables' figures and every sample), and the chart.

    ``code`` is the exit code of the command.
    """

    text: str
    data: Mapping[str, Any]
    chart: Chart
    code: int = 0


@dataclass
class Command(ABC):
    """One command of the benchmark. Fields with the metadata of `flag` are its flags.

    All ranks call `prepare` and `run`; rank 0 calls `report`.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    turns: int = field(default=0, init=False)
    """The length of the progress bar."""
    job: Job = field(default=Job(), init=False)

    def prepare(self, ranks: Ranks) -> None:  # noqa: B027  # not every command has conditions
        """Raises UsageError on all ranks if the command cannot run here."""

    @abstractmethod
    def run(self, ranks: Ranks) -> None:
        """Runs the measurements."""

    @abstractmethod
    def report(self) -> Report:
        """Returns the report of the measurements so far."""


@dataclass
class Case:
    """A set of things to compare: samples by name, or why it was ``skipped``. Each of its rows contains ``about``."""

    label: str
    about: Row
    samples: Samples = field(default_factory=dict)
    skipped: str | None = None


@dataclass
class Comparison(Command):
    """A command that compares several things, case by case, and reports a row for each thing that has samples."""

    unit: ClassVar[str] = "s"
    columns: ClassVar[Columns]
    text_columns: ClassVar[int]
    """The number of columns, from the left, that hold text."""
    cases: Sequence[Case] = field(default=(), init=False)
    notes: Sequence[str] = field(default=(), init=False)

    @abstractmethod
    def title(self) -> str:
        """Returns the line above the table."""

    @abstractmethod
    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        """Returns the entries of the row of ``name`` besides its quartiles. ``medians`` has those of all names."""

    @abstractmethod
    def chart(self, rows: Sequence[Row]) -> Chart:
        """Returns the chart of the rows."""

    def report(self) -> Report:
        rows = []
        for case in self.cases:
            spreads = {name: spread(samples, self.unit) for name, samples in case.samples.items() if samples}
            medians = {name: each[f"median_{self.unit}"] for name, each in spreads.items()}
            rows += [{**case.about, **self.describe(case, name, medians), **each} for name, each in spreads.items()]
        skipped = [case for case in self.cases if case.skipped]
        data = {"rows": rows, "skipped": [{**case.about, "why": case.skipped} for case in skipped]}
        lines = [*(f"skipped: {case.label}: {case.skipped}" for case in skipped), *self.notes]
        shown = table(self.title(), rows, self.columns, self.text_columns)
        return Report("\n\n".join([shown, "\n".join(lines)]), data, self.chart(rows))
