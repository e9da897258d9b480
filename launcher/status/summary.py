"""``--summary``: how a job was and how it has ended, in a file: as a JSON object, or as a page that needs no network.

    JobFacts, JobOutcome ──► summary_data ──► FILE
                    History ──► summary_page ──► FILE.html

`launch` writes it once the job has ended, after each attempt of a job that is restarted. The page's charts are SVG, and
it has no scripts, so that it can be sent, archived and read on any device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ..workers.failure_message import JobOutcome
from .job_facts import JobFacts, WorkerEnd
from .job_view import JobView, age, count_of
from .rank_status import bytes_in_short, in_short

PAGE = ".html"
"""The end of the name of a file for ``--summary`` that is written as a page."""

# So many points are as many as a chart can show.
_MOST_MOMENTS = 600


def summary_data(facts: JobFacts, outcome: JobOutcome, command: Sequence[str], restarts: int) -> dict[str, Any]:
    """Returns what the file says of one attempt of a job, for JSON; ``restarts`` is how many there were before it.

    Times are Unix time, and seconds from its start.
    """
    verdict, rows = _verdict(outcome), () if facts.table is None else facts.table.rows()
    return {
        "verdict": verdict,
        "why": outcome.message,
        "next": _next(verdict, outcome),
        "exit_code": outcome.exit_code,
        "first_failed_rank": outcome.rank,
        "lost_host": outcome.lost_host,
        "started_at": round(facts.began_at, 3),
        "ended_at": round(facts.began_at + facts.age_s, 3),
        "duration_s": round(facts.age_s, 3),
        "command": list(command),
        "hosts": list(facts.hosts),
        "most_workers": facts.most_workers,
        "faults": facts.faults,
        "restarts": restarts,
        "bytes": {host: asdict(count) for host, count in facts.progress.total_bytes.items()},
        "generations": [{**asdict(row), "at_s": round(row.at_s, 3)} for row in rows],
        "ranks": [_rank(end) for end in facts.last_ends()],
        "losses": [_loss(end) for end in facts.ends if end.is_fault],
        "peak_memory_bytes": max((end.peak_memory for end in facts.ends), default=0),
    }


def _verdict(outcome: JobOutcome) -> str:
    if outcome.exit_code == 0:
        return "done"
    if outcome.hasty and outcome.rank is None and not outcome.message:
        return "interrupted"
    return "failed" if outcome.lost_host is None else "lost host"


def _next(verdict: str, outcome: JobOutcome) -> str:
    match verdict:
        case "done":
            return ""
        case "interrupted":
            return "Run the same command again: a program that has written a checkpoint goes on from it."
        case "lost host":
            return (
                f"Look at {outcome.lost_host}, and run the job without it (-H) meanwhile. With --min-np, or with "
                "--on-failure restart, a job goes on without a lost host."
            )
    if outcome.exit_code == 137:
        return "A process was killed, as when memory runs out: see peak_memory_bytes, and the kernel's log on its host."
    if outcome.rank is None:
        return "See why: it names the cause, and the flag that matters."
    return f"Look at the traceback in why: rank {outcome.rank} failed first, and the others ended because of it."


def _rank(end: WorkerEnd) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "worker": end.worker,
        "host": end.host,
        "steps": dict(end.last.steps),
        "steps_per_s": None if end.last.rate is None else round(end.last.rate, 3),
        "cpu_s": end.last.cpu_s,
        "peak_memory_bytes": end.peak_memory,
        "exit_code": end.exit_code,
        "ended": end.how,
    }


def _loss(end: WorkerEnd) -> dict[str, Any]:
    names = ("worker", "rank", "host", "exit_code", "how")
    return {"at_s": round(end.at_s, 3), **{name: getattr(end, name) for name in names}}


# -- over time


@dataclass(frozen=True)
class Moment:
    """``rate``: steps per second. ``memory`` (bytes) and ``costs`` are by the rank's name, the network by host."""

    at_s: float
    ranks: int
    rate: float | None
    sample_rate: float | None
    memory: Mapping[str, float]
    costs: Mapping[str, float]
    sent: Mapping[str, float]
    received: Mapping[str, float]


class History:
    """The moments of one job. Once there are too many, every other one is dropped, and fewer are noted."""

    def __init__(self, facts: JobFacts) -> None:
        self.moments: list[Moment] = []
        self._facts = facts
        self._every = 1
        self._asked = 0

    def note(self) -> None:
        self._asked += 1
        if self._asked % self._every == 0:
            view = JobView.of(self._facts, ())
            self.moments.append(
                Moment(
                    at_s=view.age_s,
                    ranks=len(view.ranks),
                    rate=view.rate,
                    sample_rate=view.sample_rate,
                    memory={rank.name: rank.memory for rank in view.ranks if rank.memory},
                    costs={rank.name: rank.cost for rank in view.ranks if rank.cost is not None},
                    sent={host: load.sent for host, load in view.hosts.items() if load.sent is not None},
                    received={host: load.received for host, load in view.hosts.items() if load.received is not None},
                )
            )
        if len(self.moments) == _MOST_MOMENTS:
            del self.moments[::2]
            self._every *= 2


# -- the page

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
        f"at most {count_of(data['most_workers'], 'worker')} on {count_of(len(data['hosts']), 'host')}",
    ]  # fmt: skip
    if data["faults"]:
        facts.append(count_of(data["faults"], "fault"))
    if data["restarts"]:
        facts.append(f"after {count_of(data['restarts'], 'restart')}")
    yield f"<p>{escape(', '.join(facts))}</p>"
    if data["why"]:
        yield f"<h2>Why</h2>\n<pre>{escape(data['why'])}</pre>"
    if data["next"]:
        yield f"<p>{escape(data['next'])}</p>"
    for title, series, words in _charts(moments):
        yield from _chart(title, series, words, data["duration_s"])
    ranks = [
        (
            *(each["rank"], each["host"], max(each["steps"].values(), default="")),
            "" if each["steps_per_s"] is None else in_short(each["steps_per_s"]),
            *(f"{each['cpu_s']:.0f} s", bytes_in_short(each["peak_memory_bytes"]), each["ended"]),
        )
        for each in data["ranks"]
    ]
    yield from _table("Ranks", ("rank", "host", "steps", "steps/s", "CPU", "most memory", "ended"), ranks)
    generations = [
        (row["generation"], age(row["at_s"]), count_of(row["size"], "rank"), "; ".join([*row["came"], *row["left"]]))
        for row in data["generations"]
    ]
    yield from _table("Generations", ("", "began", "", "came and left"), generations)
    losses = [(age(each["at_s"]), f"worker {each['worker']}", each["host"], each["how"]) for each in data["losses"]]
    yield from _table("Losses", ("at", "", "host", "how"), losses)
    yield "</body>\n</html>"


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
    highest = {name: max(value for _, value in points) for name, points in series.items() if points}
    if not highest:
        return
    shown = sorted(highest, key=highest.__getitem__, reverse=True)[: len(_COLOURS)]
    top = highest[shown[0]] or 1.0
    until_s = max(until_s, *(series[name][-1][0] for name in highest)) or 1.0
    yield f"<h2>{escape(title)}</h2>"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" role="img" aria-label="{escape(title)}">'
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        y = _HEIGHT - part * (_HEIGHT - 14)
        yield f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8885"/>'
        yield f'<text x="0" y="{y - 3:.1f}">{escape(words(top * part))}</text>'
        yield f'<text x="{part * _WIDTH}" y="{_HEIGHT + 14}" text-anchor="{anchor}">{age(until_s * part)}</text>'
    coloured = list(zip(shown, _COLOURS, strict=False))
    for name, colour in coloured:
        places = [
            (f"{at_s / until_s * _WIDTH:.1f}", f"{_HEIGHT - value / top * (_HEIGHT - 14):.1f}")
            for at_s, value in series[name]
        ]
        if len(places) == 1:
            yield f'<circle cx="{places[0][0]}" cy="{places[0][1]}" r="2.5" fill="{colour}"/>'
        else:
            points = " ".join(map(",".join, places))
            yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    yield "</svg>"
    if any(shown):
        names = [f'<span><b style="color: {colour}">–</b> {escape(name)}</span>' for name, colour in coloured]
        rest = len(highest) - len(shown)
        yield f'<p class="legend">{"".join(names)}{f"and {rest} more" if rest else ""}</p>'


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    if cells:
        yield f'<h2>{escape(title)}</h2>\n<div class="wide"><table>'
        yield f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"
        for row in cells:
            yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        yield "</table></div>"
