"""
The page of ``--summary FILE.html``: how a job was and how it has ended, in one file that needs no network.

    summary_data, History ──► summary_page ──► FILE.html

Charts are SVG in the page, and it has no scripts, so that it can be sent, archived and read on any device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .history import Moment
from .job_view import age, bytes_in_short, in_short

PAGE = ".html"
"""The end of the name of a file for ``--summary`` that is written as a page."""

_COLOURS = ("#3366cc", "#dc6900", "#109618", "#990099", "#0099c6", "#dd4477", "#66aa00", "#b82e2e")
_WIDTH, _HEIGHT = 640, 150
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --mild: #888; }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 46rem; margin: 1rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; }
.done { color: #109618; } .failed { color: #dc3912; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); font-size: .8rem; line-height: 1.35; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--mild); }
.legend { font-size: .8rem; } .legend span { margin-right: .9rem; } p { margin: .4rem 0; }
""".strip()

Series = Mapping[str, Sequence[tuple[float, float]]]


def summary_page(data: Mapping[str, Any], moments: Sequence[Moment]) -> str:
    """Returns the page as HTML; ``data`` is what `summary_data` returns."""
    return "\n".join(_page(data, moments)) + "\n"


def _page(data: Mapping[str, Any], moments: Sequence[Moment]) -> Iterator[str]:
    command, verdict = " ".join(data["command"]), data["verdict"]
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(f'{verdict}: {command}')}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>"
    yield f'<h1><span class="{"done" if verdict == "done" else "failed"}">{escape(verdict)}</span></h1>'
    yield f"<pre>{escape(command)}</pre>"
    began = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(data["started_at"]))
    facts = [
        f"began {began}", f"took {age(data['duration_s'])}", f"exit code {data['exit_code']}",
        f"at most {_count(data['most_workers'], 'worker')} on {_count(len(data['hosts']), 'host')}",
    ]  # fmt: skip
    if data["faults"]:
        facts.append(_count(data["faults"], "fault"))
    if data["restarts"]:
        facts.append(f"after {_count(data['restarts'], 'restart')}")
    yield f"<p>{escape(', '.join(facts))}</p>"
    if data["why"]:
        yield f"<h2>Why</h2>\n<pre>{escape(data['why'])}</pre>"
    if data["next"]:
        yield f"<p>{escape(data['next'])}</p>"
    for title, series, words in _charts(moments):
        yield from _chart(title, series, words, data["duration_s"])
    yield from _table("Ranks", ("rank", "host", "steps", "steps/s", "CPU", "most memory", "ended"), _ranks(data))
    generations = [
        (row["generation"], age(row["at_s"]), _count(row["size"], "rank"), "; ".join([*row["came"], *row["left"]]))
        for row in data["generations"]
    ]
    yield from _table("Generations", ("", "began", "", "came and left"), generations)
    losses = [(age(each["at_s"]), f"worker {each['worker']}", each["host"], each["how"]) for each in data["losses"]]
    yield from _table("Losses", ("at", "", "host", "how"), losses)
    yield "</body>\n</html>"


def _ranks(data: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for each in data["ranks"]:
        rate = each["steps_per_s"]
        yield (
            each["rank"],
            each["host"],
            max(each["steps"].values(), default=""),
            "" if rate is None else in_short(rate),
            f"{each['cpu_s']:.0f} s",
            bytes_in_short(each["peak_memory_bytes"]),
            each["ended"],
        )


def _charts(moments: Sequence[Moment]) -> Iterator[tuple[str, Series, Callable[[float], str]]]:
    """Yields title, lines, and how a value is written."""
    per_second: Callable[[float], str] = lambda value: f"{bytes_in_short(value)}/s"  # noqa: E731  # the shortest form
    yield "Steps per second", {"": [(each.at_s, each.rate) for each in moments if each.rate is not None]}, in_short
    samples = [(each.at_s, each.sample_rate) for each in moments if each.sample_rate is not None]
    yield "Samples per second", {"": samples}, in_short
    if len({each.ranks for each in moments}) > 1:
        yield "Number of ranks", {"": [(each.at_s, each.ranks) for each in moments]}, "{:.0f}".format
    cost_of = _by_name(moments, lambda each: each.costs)
    late = {name: points for name, points in cost_of.items() if max(cost for _, cost in points) >= 0.01}
    yield "Part of each step that a rank costs the others", late, "{:.0%}".format
    yield "Memory", _by_name(moments, lambda each: each.memory), bytes_in_short
    yield "Sent over the network", _by_name(moments, lambda each: each.sent), per_second
    yield "Received over the network", _by_name(moments, lambda each: each.received), per_second


def _by_name(moments: Sequence[Moment], numbers: Callable[[Moment], Mapping[str, float]]) -> Series:
    found: dict[str, list[tuple[float, float]]] = {}
    for each in moments:
        for name, value in numbers(each).items():
            found.setdefault(name, []).append((each.at_s, value))
    return found


def _chart(title: str, series: Series, words: Callable[[float], str], until_s: float) -> Iterator[str]:
    """Yields a chart of at most so many lines as there are colours, those that come highest; nothing without points."""
    lines = {name: points for name, points in series.items() if points}
    if not lines:
        return
    shown = sorted(lines, key=lambda name: max(value for _, value in lines[name]), reverse=True)[: len(_COLOURS)]
    top = max(value for name in shown for _, value in lines[name]) or 1.0
    until_s = max(until_s, *(points[-1][0] for points in lines.values())) or 1.0
    yield f"<h2>{escape(title)}</h2>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" role="img" aria-label="{escape(title)}">'
    for part in (0.0, 0.5, 1.0):
        y = _HEIGHT - part * (_HEIGHT - 14)
        yield f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8885"/>'
        yield f'<text x="0" y="{y - 3:.1f}">{escape(words(top * part))}</text>'
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[part]
        yield f'<text x="{part * _WIDTH}" y="{_HEIGHT + 14}" text-anchor="{anchor}">{age(until_s * part)}</text>'
    for name, colour in zip(shown, _COLOURS, strict=False):
        places = [
            f"{at_s / until_s * _WIDTH:.1f},{_HEIGHT - value / top * (_HEIGHT - 14):.1f}" for at_s, value in lines[name]
        ]
        if len(places) == 1:
            across, down = places[0].split(",")
            yield f'<circle cx="{across}" cy="{down}" r="2.5" fill="{colour}"/>'
        else:
            yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    yield "</svg>"
    if any(shown):
        names = [
            f'<span><b style="color: {colour}">–</b> {escape(name)}</span>'
            for name, colour in zip(shown, _COLOURS, strict=False)
        ]
        rest = len(lines) - len(shown)
        yield f'<p class="legend">{"".join(names)}{f"and {rest} more" if rest else ""}</p>'


def _table(
    title: str, names: Sequence[str], rows: Iterator[Sequence[object]] | Sequence[Sequence[object]]
) -> Iterator[str]:
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    if not cells:
        return
    yield f'<h2>{escape(title)}</h2>\n<div class="wide"><table>'
    yield f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"
    for row in cells:
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
    yield "</table></div>"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
