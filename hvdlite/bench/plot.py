"""
Charts, drawn by matplotlib into a file. A chart is a plain value; matplotlib is imported when one is drawn.

    Chart ── panels side by side, of bars or of lines ── Figure ── file

What is hvdlite's has the one strong colour; everything else is grey.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .arguments import UsageError

SUFFIXES = (".png", ".pdf", ".svg")
OWN, OTHER = "#d9480f", "#8b939c"
_PANEL_INCHES = 7.0, 4.0


@dataclass(frozen=True)
class Line:
    """``points`` are (x, y), drawn in matplotlib's ``style``; ``band`` has (low, high) of each, which are shaded."""

    name: str
    points: Sequence[tuple[float, float]]
    is_own: bool
    style: str = "o-"
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Lines:
    """A panel of lines over two logarithmic axes; ``show_x`` and ``show_y`` write the labels of their ticks."""

    title: str
    x_label: str
    y_label: str
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]
    lines: Sequence[Line]


class Bar(NamedTuple):
    """A bar with whiskers from ``low`` to ``high``; ``text`` is written at its end."""

    name: str
    median: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars, which begin at ``base``."""

    title: str
    label: str
    bars: Sequence[Bar]
    base: float = 0.0


@dataclass(frozen=True)
class Chart:
    """``title`` says what is drawn, ``caption`` how it was measured. Panels of ratios, with a base, share an axis."""

    title: str
    caption: str
    panels: Sequence[Bars | Lines]


def require_matplotlib() -> None:
    """Raise UsageError with what to install where matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install '.[bench]' in hvdlite's source directory") from None


def draw(chart: Chart, path: Path) -> None:
    """Write the chart in the format that the path's suffix names."""
    figure_of(chart).savefig(path, dpi=150)


def figure_of(chart: Chart) -> Any:
    """The chart as matplotlib's Figure."""
    columns = min(2, len(chart.panels)) or 1
    rows = -(-len(chart.panels) // columns) or 1
    width, height = _PANEL_INCHES
    size = (columns * width, rows * height + 1)
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    figure.suptitle(chart.title, x=0.01, ha="left", weight="bold")
    caption = textwrap.fill(chart.caption, int(size[0] * 14))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize="small", color="dimgrey")
    are_ratios = any(isinstance(panel, Bars) and panel.base for panel in chart.panels)
    grid = list(figure.subplots(rows, columns, squeeze=False, sharex=are_ratios).flat)
    for axes, panel in zip(grid, chart.panels, strict=False):
        axes.set_title(panel.title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="x" if isinstance(panel, Bars) else "both", alpha=0.3)
        axes.set_axisbelow(True)
        if isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_lines(axes, panel)
    for axes in grid[len(chart.panels) :]:
        axes.set_axis_off()
    return figure


def is_own(name: str) -> bool:
    """Whether what has this name is hvdlite's."""
    return name.startswith("hvdlite")


def _draw_bars(axes: Any, panel: Bars) -> None:
    bars = panel.bars
    drawn = axes.barh(
        [bar.name for bar in bars],
        [bar.median - panel.base for bar in bars],
        left=panel.base,
        color=[OWN if is_own(bar.name) else OTHER for bar in bars],
        xerr=[[bar.median - bar.low for bar in bars], [bar.high - bar.median for bar in bars]],
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    axes.bar_label(drawn, [bar.text for bar in bars], padding=4)
    axes.margins(x=0.2)
    axes.use_sticky_edges = not panel.base
    axes.invert_yaxis()
    axes.axvline(panel.base, color="black", linewidth=1)
    axes.set_xlabel(panel.label)


def _draw_lines(axes: Any, panel: Lines) -> None:
    for line in panel.lines:
        xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
        color = OWN if line.is_own else OTHER
        axes.plot(xs, ys, line.style, color=color, label=line.name, markersize=4)
        if line.band:
            axes.fill_between(xs, *zip(*line.band, strict=True), color=color, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = axes.get_ylim()
    axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1,) if high > 300 * low else (1, 2, 5)))
    for axis, show in ((axes.xaxis, panel.show_x), (axes.yaxis, panel.show_y)):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _, show=show: show(value)))
        axis.set_minor_locator(ticker.NullLocator())
    axes.legend(frameon=False)
