"""
The base class of commands, and reports of their measurements: tables on the screen, JSON and a plot in files.

    Case (samples by name) ── rows with quartiles, as in JSON ── table and Chart ── BenchReport
    Chart ── panels side by side, of bars or of lines ── matplotlib's Figure ── file

`__main__` runs a `Command` and asks it for a `BenchReport`. It may do so at any time, for the measurements so far. A
`Chart` is a plain value; matplotlib is imported only to draw it. hvdlite's bars and lines are orange, all others grey.
"""

from __future__ import annotations

import importlib
import statistics
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from .arguments import OptionError, show_size, show_time
from .ranks import Job, Ranks, Samples

SUFFIXES = (".png", ".pdf", ".svg")
OWN, OTHER = "#d9480f", "#8b939c"
_PANEL_INCHES = 7.0, 4.0

# The JSON object of one measured thing.
Row = dict[str, Any]
# The text of each column for a row, by the column's title.
Columns = dict[str, Callable[[Row], str]]


def grouped(rows: Sequence[Row], key: str) -> dict[Any, list[Row]]:
    """Returns the rows by their value of ``key``, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _color_of(name: str) -> str:
    return OWN if name.startswith("hvdlite") else OTHER


@dataclass(frozen=True)
class TimesBySize:
    """A panel of times by size, both on logarithmic axes: a line for each thing measured, shaded between quartiles."""

    title: str
    rows: Sequence[Row]

    def draw(self, axes: Any) -> None:
        for name, rows in grouped(self.rows, "what").items():
            sizes, medians, lows, highs = zip(
                *((row["bytes"], row["median_s"], row["low_s"], row["high_s"]) for row in rows), strict=True
            )
            axes.plot(sizes, medians, "o-", color=_color_of(name), label=name, markersize=4)
            axes.fill_between(sizes, lows, highs, color=_color_of(name), alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="time")
        ticker = importlib.import_module("matplotlib.ticker")
        low, high = axes.get_ylim()
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
        for axis, show in ((axes.xaxis, show_size), (axes.yaxis, show_time)):
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _, show=show: show(value)))
            axis.set_minor_locator(ticker.NullLocator())
        axes.legend(frameon=False)


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars, one for each row, with quartiles as whiskers and ``texts`` at their ends."""

    title: str
    rows: Sequence[Row]
    unit: str
    texts: Sequence[str]

    def draw(self, axes: Any) -> None:
        names = [row["variant"] for row in self.rows]
        one, label = {"s": (1e-3, "ms"), "bytes": (2**20, "MB")}[self.unit]
        low, median, high = ([row[f"{key}_{self.unit}"] / one for row in self.rows] for key in _QUARTILES)
        whiskers = [
            [m - q for m, q in zip(median, low, strict=True)],
            [q - m for m, q in zip(median, high, strict=True)],
        ]
        bars = axes.barh(names, median, color=list(map(_color_of, names)), xerr=whiskers, capsize=2)
        axes.bar_label(bars, self.texts, padding=4)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.45)
        axes.invert_yaxis()
        axes.set_xlabel(label)


@dataclass(frozen=True)
class Chart:
    """A titled chart of one or more panels. ``caption`` says how the values were measured."""

    title: str
    caption: str
    panels: Sequence[Bars | TimesBySize]


def require_matplotlib() -> None:
    """Raises OptionError, which says what to install, if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise OptionError("--plot needs matplotlib: pip install '.[bench]' in hvdlite's source directory") from None


def figure_of(chart: Chart) -> Any:
    """Returns matplotlib's figure of the chart."""
    columns = min(2, len(chart.panels)) or 1
    rows = -(-len(chart.panels) // columns) or 1
    width, height = columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 1
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(chart.title, x=0.01, ha="left", weight="bold")
    figure.supxlabel(
        textwrap.fill(chart.caption, int(width * 14)), x=0.01, ha="left", fontsize="small", color="dimgrey"
    )
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, chart.panels, strict=False):
        axes.set_title(panel.title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.3)
        axes.set_axisbelow(True)
        panel.draw(axes)
    for axes in grid[len(chart.panels) :]:
        axes.set_axis_off()
    return figure


_QUARTILES = ("low", "median", "high")


def spread(samples: Sequence[float], unit: str) -> Row:
    """Returns the median, quartiles and samples as a part of a row, with ``unit`` in the keys."""
    several = samples if len(samples) > 1 else [*samples, *samples]
    quartiles = zip(_QUARTILES, statistics.quantiles(several, method="inclusive"), strict=True)
    return {**{f"{key}_{unit}": value for key, value in quartiles}, "count": len(samples), f"samples_{unit}": samples}


def ratio_of(numerator: float | None, denominator: float | None) -> float | None:
    """Returns the ratio, or None if either was not measured or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


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


class BenchReport(NamedTuple):
    """A report: ``text`` for the screen, ``data`` for JSON (the tables' figures and every sample), and the chart.

    ``code`` is the exit code of the command.
    """

    text: str
    data: Mapping[str, Any]
    chart: Chart
    code: int = 0


@dataclass
class Case:
    """A set of things to compare: samples by name, or why it was ``skipped``. Each of its rows contains ``about``."""

    label: str
    about: Row
    samples: Samples = field(default_factory=dict)
    skipped: str | None = None


@dataclass
class Command(ABC):
    """One command of the benchmark. Fields with the metadata of `flag` are its flags.

    It compares several things, case by case, and reports a row for each thing that has samples. All ranks call
    `prepare` and `run`; rank 0 calls `report`.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    unit: ClassVar[str] = "s"
    chart_title: ClassVar[str]
    panel: ClassVar[str]
    """The entry of rows by which the chart has panels."""
    columns: ClassVar[Columns]
    text_columns: ClassVar[int]
    """The number of columns, from the left, that hold text."""
    turns: int = field(default=0, init=False)
    """The length of the progress bar."""
    job: Job = field(default=Job(), init=False)
    cases: Sequence[Case] = field(default=(), init=False)
    notes: Sequence[str] = field(default=(), init=False)

    def prepare(self, ranks: Ranks) -> None:  # noqa: B027  # not every command has conditions
        """Raises OptionError on all ranks if the command cannot run here."""

    @abstractmethod
    def run(self, ranks: Ranks) -> None:
        """Runs the measurements."""

    @abstractmethod
    def title(self) -> str:
        """Returns the line above the table."""

    @abstractmethod
    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        """Returns the entries of the row of ``name`` besides its quartiles. ``medians`` has those of all names."""

    def text_of(self, row: Row) -> str:
        """Returns what stands beside the bar of a row."""
        raise NotImplementedError

    def chart(self, rows: Sequence[Row]) -> Chart:
        """Returns the chart of the rows."""
        panels = [
            Bars(f"{title}", of_panel, self.unit, [self.text_of(row) for row in of_panel])
            for title, of_panel in grouped(rows, self.panel).items()
        ]
        return Chart(self.chart_title, f"{self.title()}. Medians; whiskers are quartiles.", panels)

    def report(self) -> BenchReport:
        """Returns the report of the measurements so far."""
        rows = []
        for case in self.cases:
            spreads = {name: spread(samples, self.unit) for name, samples in case.samples.items() if samples}
            medians = {name: each[f"median_{self.unit}"] for name, each in spreads.items()}
            rows += [{**case.about, **self.describe(case, name, medians), **each} for name, each in spreads.items()]
        skipped = [case for case in self.cases if case.skipped]
        data = {"rows": rows, "skipped": [{**case.about, "why": case.skipped} for case in skipped]}
        lines = [*(f"skipped: {case.label}: {case.skipped}" for case in skipped), *self.notes]
        shown = table(self.title(), rows, self.columns, self.text_columns)
        return BenchReport("\n\n".join([shown, "\n".join(lines)]), data, self.chart(rows))


def quartiles_of(row: Row) -> str:
    """Returns a row's quartiles of time, as a column of a table."""
    return f"{show_time(row['low_s'])} … {show_time(row['high_s'])}"
