"""
Charts, drawn by matplotlib into a file. What is drawn is a value; matplotlib is looked for when one is asked for.

    Chart ── panels side by side, all of bars or all of lines ── Figure ── file

What is hvdlite's, by its name, has the one strong colour; all else is grey.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import UsageError
from .spread import Spread

SUFFIXES = (".png", ".pdf", ".svg")
OWN, OTHER = "#d9480f", "#8b939c"
_WIDTH_IN, _LABEL_PT, _MOST_TICKS = 9.0, 9, 8
_STYLES: dict[str, dict[str, Any]] = {
    "measured": {"marker": "o", "markersize": 4},
    "only points": {"marker": "o", "markersize": 7, "linestyle": "none", "zorder": 3},
    "modelled": {},
    "beyond": {"linestyle": ":"},
}


class Point(NamedTuple):
    """What was measured at one place of the horizontal axis."""

    x: float
    y: Spread


@dataclass(frozen=True)
class Line:
    """Measured values have markers, with or without a line between them; what a model says is a line alone."""

    name: str
    points: Sequence[Point]
    is_own: bool
    look: Literal["measured", "only points", "modelled", "beyond"] = "measured"


@dataclass(frozen=True)
class Lines:
    """A panel of lines over two logarithmic axes; ``show_x`` and ``show_y`` are what is written at their ticks.

    Each line has its name at its end, and a legend explains looks where they differ.
    """

    title: str
    x_label: str
    y_label: str
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]
    lines: Sequence[Line]


@dataclass(frozen=True)
class Bar:
    """``text`` is written at its end."""

    name: str
    length: Spread
    text: str
    is_own: bool


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars, which begin at ``base``; whiskers are quartiles."""

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
    """Raise a UsageError that says what to install, where matplotlib is not there."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install '.[bench]' in hvdlite's source directory") from None


def draw(chart: Chart, path: Path) -> None:
    """Write the chart; the suffix says in which format."""
    figure_of(chart).savefig(path, dpi=150)


def figure_of(chart: Chart) -> Any:
    """The chart as matplotlib's Figure."""
    columns = min(2, max(1, len(chart.panels)))
    rows = -(-len(chart.panels) // columns)
    heights = [max(map(_height_in, chart.panels[row * columns :][:columns])) for row in range(rows)]
    size = (_WIDTH_IN * (1.3 if columns > 1 else 1), max(2.0, sum(heights)) + 1)
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    width = int(size[0] * 10)
    figure.suptitle(textwrap.fill(chart.title, width), x=0.01, ha="left", weight="bold")
    caption = textwrap.fill(chart.caption, int(1.5 * width))
    figure.supxlabel(caption, x=0.01, ha="left", fontsize="small", color="dimgrey")
    if not chart.panels:
        return figure
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
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
    # Panels of the same measure are read against each other.
    bars = [panel for panel in chart.panels if isinstance(panel, Bars)]
    if bars and bars[0].base:
        limits = [axes.get_xlim() for axes in grid[: len(bars)]]
        for axes in grid[: len(bars)]:
            axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    return figure


def is_own(name: str) -> bool:
    """Whether what has that name is hvdlite's, to be singled out."""
    return name.startswith("hvdlite")


def _height_in(panel: Bars | Lines) -> float:
    return 0.9 + 0.32 * len(panel.bars) if isinstance(panel, Bars) else 4.0


def _draw_bars(axes: Any, panel: Bars) -> None:
    for place, bar in enumerate(panel.bars):
        length, color = bar.length, OWN if bar.is_own else OTHER
        whiskers = [[length.median - length.low], [length.high - length.median]]
        axes.barh(
            place, length.median - panel.base, 0.66, left=panel.base, color=color, xerr=whiskers,
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#343a40"},
        )  # fmt: skip
        axes.annotate(
            bar.text, (max(length.high, panel.base), place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=_LABEL_PT, color=OWN if bar.is_own else "black", weight="bold" if bar.is_own else None,
        )  # fmt: skip
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
    for label, bar in zip(axes.get_yticklabels(), panel.bars, strict=True):
        label.set_color(OWN if bar.is_own else "black")
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    low = min([panel.base, *(bar.length.low for bar in panel.bars)])
    high = max([panel.base, *(bar.length.high for bar in panel.bars)])
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
        places = [point.x for point in line.points]
        color, width = (OWN, 2.2) if line.is_own else (OTHER, 1.4)
        axes.plot(
            places, [point.y.median for point in line.points], color=color, linewidth=width, label=line.name,
            **_STYLES[line.look],
        )  # fmt: skip
        low, high = [point.y.low for point in line.points], [point.y.high for point in line.points]
        if low != high:
            axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _show_ticks(axes, lines, panel)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True, alpha=0.3)
    if any(line.look != "measured" for line in lines):
        axes.legend(fontsize=_LABEL_PT, frameon=False, loc="upper left")
        return
    bottom, top = (log(limit) for limit in axes.get_ylim())
    wanted = [(log(line.points[-1].y.median) - bottom) / (top - bottom) for line in lines]
    for place, line in zip(_apart(wanted, 1.4 * _LABEL_PT / 72 / height_in), lines, strict=True):
        axes.text(
            1.01, place, line.name, transform=axes.transAxes, va="center", fontsize=_LABEL_PT,
            color=OWN if line.is_own else "dimgrey", weight="bold" if line.is_own else None,
        )  # fmt: skip


def _show_ticks(axes: Any, lines: Sequence[Line], panel: Lines) -> None:
    ticker = importlib.import_module("matplotlib.ticker")
    places = sorted({point.x for line in lines for point in line.points})
    values = [point.y.median for line in lines for point in line.points]
    if not places:
        return
    ticks = thinned(places, _MOST_TICKS)
    axes.set_xticks(ticks, [panel.show_x(tick) for tick in ticks])
    is_wide = max(values) >= 300 * min(values)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: panel.show_y(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(ticker.NullLocator())


def thinned(places: Sequence[float], most: int) -> list[float]:
    """About so many of the positive, growing places, the first and the last among them, and none near another.

    Near is what it would be on a logarithmic axis.
    """
    least = log(places[-1] / places[0]) / most * (1 - 1e-9)
    kept = [places[0]]
    for place in places[1:-1]:
        if log(place / kept[-1]) >= least and log(places[-1] / place) >= least:
            kept.append(place)
    return list(dict.fromkeys([*kept, places[-1]]))


def _apart(wanted: Sequence[float], least: float) -> list[float]:
    """The places nearest to those wanted, from below, of which no two are nearer than ``least``."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    found = [0.0] * len(wanted)
    below = -1.0
    for number in order:
        below = found[number] = max(wanted[number], below + least)
    above = max(1.0, *wanted, 0.0) + least if wanted else 0.0
    for number in reversed(order):
        above = found[number] = min(found[number], above - least)
    return found
