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
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .arguments import UsageError

SUFFIXES = (".png", ".pdf", ".svg")
OWN, OTHER = "#d9480f", "#8b939c"
_WIDTH_IN, _LABEL_PT, _MOST_TICKS = 9.0, 9, 8
_STYLES: dict[str, dict[str, Any]] = {
    "measured": {"marker": "o", "markersize": 4},
    "only points": {"marker": "o", "markersize": 7, "linestyle": "none", "zorder": 3},
    "modelled": {},
    "beyond": {"linestyle": ":"},
}


@dataclass(frozen=True)
class Line:
    """``points`` are (x, y); ``band`` has the quartiles (low, high) of each point, which are shaded."""

    name: str
    points: Sequence[tuple[float, float]]
    is_own: bool
    look: Literal["measured", "only points", "modelled", "beyond"] = "measured"
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Lines:
    """A panel of lines over two logarithmic axes; ``show_x`` and ``show_y`` write the labels of their ticks.

    Each line has its name at its end, or in a legend where the looks of lines differ.
    """

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
    """``title`` is a sentence that says what one sees, ``caption`` how it was measured."""

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
    columns = min(2, max(1, len(chart.panels)))
    needed = [0.9 + 0.32 * len(panel.bars) if isinstance(panel, Bars) else 4.0 for panel in chart.panels]
    heights = [max(needed[start:][:columns]) for start in range(0, len(needed), columns)]
    size = (_WIDTH_IN * (1.3 if columns > 1 else 1), max(2.0, sum(heights)) + 1)
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    width = int(size[0] * 10)
    figure.suptitle(textwrap.fill(chart.title, width), x=0.01, ha="left", weight="bold")
    caption = textwrap.fill(chart.caption, int(1.5 * width))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize="small", color="dimgrey")
    if not chart.panels:
        return figure
    grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).ravel()
    for number, panel in enumerate(chart.panels):
        axes = grid[number]
        axes.set_title(panel.title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        if isinstance(panel, Bars):
            _draw_bars(axes, panel)
        else:
            _draw_lines(axes, panel, heights[number // columns])
    for axes in grid[len(chart.panels) :]:
        axes.set_axis_off()
    if isinstance(chart.panels[0], Bars) and chart.panels[0].base:
        # Ratios are compared between panels.
        limits = [axes.get_xlim() for axes in grid[: len(chart.panels)]]
        for axes in grid[: len(chart.panels)]:
            axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    return figure


def is_own(name: str) -> bool:
    """Whether what has this name is hvdlite's."""
    return name.startswith("hvdlite")


def _label_style(own: bool, other_color: str) -> dict[str, Any]:
    style = {"color": OWN, "weight": "bold"} if own else {"color": other_color}
    return {"va": "center", "fontsize": _LABEL_PT, **style}


def _draw_bars(axes: Any, panel: Bars) -> None:
    for row, bar in enumerate(panel.bars):
        axes.barh(
            row, bar.median - panel.base, 0.66, left=panel.base, color=OWN if is_own(bar.name) else OTHER,
            xerr=[[bar.median - bar.low], [bar.high - bar.median]],
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#343a40"},
        )  # fmt: skip
        end = (max(bar.high, panel.base), row)
        style = _label_style(is_own(bar.name), "black")
        axes.annotate(bar.text, end, xytext=(5, 0), textcoords="offset points", **style)
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
    for label, bar in zip(axes.get_yticklabels(), panel.bars, strict=True):
        label.set_color(OWN if is_own(bar.name) else "black")
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    low = min([panel.base, *(bar.low for bar in panel.bars)])
    high = max([panel.base, *(bar.high for bar in panel.bars)])
    span = max(high - low, 0.1 * panel.base) or 1.0
    axes.set_xlim(low - (0.05 * span if low < panel.base else 0), high + 0.2 * span)
    axes.axvline(panel.base, color="black", linewidth=1)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(panel.label)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_lines(axes: Any, panel: Lines, height_in: float) -> None:
    lines = [line for line in panel.lines if line.points]
    for line in lines:
        xs, ys = zip(*line.points, strict=True)
        color, width = (OWN, 2.2) if line.is_own else (OTHER, 1.4)
        axes.plot(xs, ys, color=color, linewidth=width, label=line.name, **_STYLES[line.look])
        if line.band:
            axes.fill_between(xs, *zip(*line.band, strict=True), color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if lines:
        _show_ticks(axes, panel, [point for line in lines for point in line.points])
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True, alpha=0.3)
    if any(line.look != "measured" for line in lines):
        axes.legend(fontsize=_LABEL_PT, frameon=False, loc="upper left")
        return
    bottom, top = (log(limit) for limit in axes.get_ylim())
    wanted = [(log(line.points[-1][1]) - bottom) / (top - bottom) for line in lines]
    for height, line in zip(_apart(wanted, 1.4 * _LABEL_PT / 72 / height_in), lines, strict=True):
        axes.text(1.01, height, line.name, transform=axes.transAxes, **_label_style(line.is_own, "dimgrey"))


def _show_ticks(axes: Any, panel: Lines, points: Sequence[tuple[float, float]]) -> None:
    ticker = importlib.import_module("matplotlib.ticker")
    ticks = thinned(sorted({x for x, _ in points}), _MOST_TICKS)
    axes.set_xticks(ticks, [panel.show_x(tick) for tick in ticks])
    ys = [y for _, y in points]
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if max(ys) >= 300 * min(ys) else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: panel.show_y(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(ticker.NullLocator())


def thinned(values: Sequence[float], most: int) -> list[float]:
    """About ``most`` of the growing values, spread on a logarithmic axis, with the first and the last among them."""
    least = log(values[-1] / values[0]) / most * (1 - 1e-9)
    kept = [values[0]]
    for value in values[1:-1]:
        if log(value / kept[-1]) >= least and log(values[-1] / value) >= least:
            kept.append(value)
    return list(dict.fromkeys([*kept, values[-1]]))


def _apart(wanted: Sequence[float], least: float) -> list[float]:
    """Heights near those wanted, of which no two are nearer to each other than ``least``."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    found = list(wanted)
    for lower, upper in pairwise(order):
        found[upper] = max(found[upper], found[lower] + least)
    # What was pushed above the axes moves down again, with what is below it.
    limit = max(1.0, *wanted, 0.0)
    for number in reversed(order):
        found[number] = min(found[number], limit)
        limit = found[number] - least
    return found
