"""
Charts as plain values, and functions that draw them with matplotlib, which is imported only then.

    Chart ── panels side by side, of bars or of lines ── Figure ── file

The commands create a `Chart` in their reports; `command_line` draws it. hvdlite's bars and lines are orange, all others
grey.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import UsageError

SUFFIXES = (".png", ".pdf", ".svg")
OWN, OTHER = "#d9480f", "#8b939c"
_PANEL_INCHES = 7.0, 4.0


@dataclass(frozen=True)
class Line:
    """A line through ``points`` (x, y). ``band`` has (low, high) of each, and is shaded."""

    name: str
    points: Sequence[tuple[float, float]]
    is_own: bool
    band: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Lines:
    """A panel of lines over two logarithmic axes. ``show_x`` and ``show_y`` format the tick labels."""

    title: str
    x_label: str
    y_label: str
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]
    lines: Sequence[Line]

    def draw(self, axes: Any) -> None:
        """Draws the lines with a legend."""
        for line in self.lines:
            xs, ys = zip(*line.points, strict=True)
            color = OWN if line.is_own else OTHER
            axes.plot(xs, ys, "o-", color=color, label=line.name, markersize=4)
            axes.fill_between(xs, *zip(*line.band, strict=True), color=color, alpha=0.15, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel=self.x_label, ylabel=self.y_label)
        ticker = importlib.import_module("matplotlib.ticker")
        low, high = axes.get_ylim()
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
        for axis, show in ((axes.xaxis, self.show_x), (axes.yaxis, self.show_y)):
            axis.set_major_formatter(ticker.FuncFormatter(lambda value, _, show=show: show(value)))
            axis.set_minor_locator(ticker.NullLocator())
        axes.legend(frameon=False)


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars, which begin at ``base``, with quartiles as whiskers.

    Each row of a report gives a bar, of length ``median_<unit>`` / ``one``. ``texts`` are written at the bars' ends.
    """

    title: str
    label: str
    rows: Sequence[Mapping[str, Any]]
    unit: str
    one: float
    texts: Sequence[str]
    base: float = 0.0

    def draw(self, axes: Any) -> None:
        """Draws the bars, the first one at the top."""
        names = [row["variant"] for row in self.rows]
        lengths, below, above = [], [], []
        for row in self.rows:
            median, low, high = (row[f"{key}_{self.unit}"] / self.one for key in ("median", "low", "high"))
            lengths.append(median - self.base)
            below.append(median - low)
            above.append(high - median)
        colors = [OWN if is_own(name) else OTHER for name in names]
        whiskers = {"elinewidth": 1, "capsize": 2}
        bars = axes.barh(names, lengths, left=self.base, color=colors, xerr=[below, above], error_kw=whiskers)
        axes.bar_label(bars, self.texts, padding=4)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.2)
        axes.use_sticky_edges = not self.base
        axes.invert_yaxis()
        axes.axvline(self.base, color="black", linewidth=1)
        axes.set_xlabel(self.label)


@dataclass(frozen=True)
class Chart:
    """A titled chart of one or more panels. ``caption`` says how the values were measured."""

    title: str
    caption: str
    panels: Sequence[Bars | Lines]
    shares_x: bool = False


def require_matplotlib() -> None:
    """Raises UsageError, which says what to install, if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install '.[bench]' in hvdlite's source directory") from None


def draw(chart: Chart, path: Path) -> None:
    """Writes the chart to a file, in the format of the path's suffix."""
    figure_of(chart).savefig(path, dpi=150)


def figure_of(chart: Chart) -> Any:
    """Returns the chart as a matplotlib Figure."""
    columns = min(2, len(chart.panels)) or 1
    rows = -(-len(chart.panels) // columns) or 1
    width, height = columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 1
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(chart.title, x=0.01, ha="left", weight="bold")
    figure.supxlabel(
        textwrap.fill(chart.caption, int(width * 14)), x=0.01, ha="left", fontsize="small", color="dimgrey"
    )
    grid = list(figure.subplots(rows, columns, squeeze=False, sharex=chart.shares_x).flat)
    for axes, panel in zip(grid, chart.panels, strict=False):
        axes.set_title(panel.title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.3)
        axes.set_axisbelow(True)
        panel.draw(axes)
    for axes in grid[len(chart.panels) :]:
        axes.set_axis_off()
    return figure


def is_own(name: str) -> bool:
    """Whether this is the name of a variant or line of hvdlite."""
    return name.startswith("hvdlite")
