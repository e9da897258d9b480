"""
Charts, drawn by matplotlib into a file. What is drawn is a value; matplotlib is looked for when one is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import UsageError
from .spread import Spread

SUFFIXES = (".png", ".pdf", ".svg")


class Point(NamedTuple):
    """What was measured at one place: a number on the axis of lines, or a name below bars."""

    x: float | str
    y: Spread


@dataclass(frozen=True)
class Chart:
    """Several measured ones over the same places; lines are over two logarithmic axes."""

    kind: Literal["lines", "bars"]
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]


def require_matplotlib() -> None:
    """Raise a UsageError that says what to install, where matplotlib is not there."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install '.[bench]' in hvdlite's source directory") from None


def draw(chart: Chart, path: Path) -> None:
    """Write the chart; the suffix says in which format."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    if chart.kind == "lines":
        _draw_lines(axes, chart)
    else:
        _draw_bars(axes, chart)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.series:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_lines(axes: Any, chart: Chart) -> None:
    for name, points in chart.series.items():
        places = [point.x for point in points]
        (line,) = axes.plot(places, [point.y.median for point in points], marker="o", markersize=3, label=name)
        axes.fill_between(
            places,
            [point.y.low for point in points],
            [point.y.high for point in points],
            color=line.get_color(),
            alpha=0.2,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)


def _draw_bars(axes: Any, chart: Chart) -> None:
    groups = list(dict.fromkeys(str(point.x) for points in chart.series.values() for point in points))
    width = 0.8 / max(1, len(chart.series))
    for number, (name, points) in enumerate(chart.series.items()):
        offset = (number - (len(chart.series) - 1) / 2) * width
        places = [groups.index(str(point.x)) + offset for point in points]
        heights = [point.y.median for point in points]
        errors = [
            [point.y.median - point.y.low for point in points],
            [point.y.high - point.y.median for point in points],
        ]
        axes.bar(places, heights, width, yerr=errors, label=name, error_kw={"elinewidth": 0.8})
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=True, axis="y", alpha=0.3)
