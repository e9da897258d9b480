"""`LiveView`: draws a `JobView` as lines of a terminal: a line about the job, and a tree of hosts and ranks.

    ── 0:12:03  4 ranks on 2 hosts  step 1234  35.2 steps/s
                step  steps/s   memory    CPU
    node1                       2.1 GB  196 %  out 112 MB/s, in 98 MB/s
    ├─ rank 0   1234     35.2   1.1 GB   98 %
    └─ rank 1   1234     35.2   1.0 GB   98 %  late in data: costs 23% of each step

`Watch` and `cli` give the lines to a `Footer`. Columns of which nothing is known are left out, and those for which the
terminal is too narrow. Where there are too few lines, the ranks are shown that are worst off.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..protocol.messages import Event, WatchAsked
from ..screen.display import View
from ..workers.ending import Observer
from .job_facts import JobFacts
from .job_view import JobView, age, severity, trouble_of
from .rank_status import LIVE_COLUMNS, RankStatus, bytes_in_short, in_short

if TYPE_CHECKING:
    from rich.text import Text

_GAP = 2
_NARROWEST = 12
# A remark is cut to no less than this, before a column is left out for it.
_REMARK = 18

EACH_S = 2.0
"""How often the workers are asked, and the view is drawn."""

# How long one look of another process has them asked for.
_LOOKED_AT_S = 3 * EACH_S
_LINE_EACH_S = 10.0

Cells = Mapping[str, str]


@dataclass(frozen=True)
class _Row:
    """A line of the tree: ``branch`` before the ``name``, a cell for some columns, and a remark with its style."""

    branch: str
    name: str
    style: str
    cells: Cells
    remark: str = ""
    remark_style: str = ""


def make_view(say: Callable[[str], object]) -> LiveView | None:
    """Returns a view; None without rich, which it says: a line about the job every few seconds takes its place."""
    try:
        return LiveView()
    except ImportError:
        say("--watch: a line every 10 s, as rich is not installed: pip install 'hvdlite[watch]', or pip install rich")
        return None


class LiveView:
    """Draws with rich, which is imported when it is made."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Raises an ImportError if rich is not installed."""
        from rich.cells import cell_len, set_cell_size  # noqa: PLC0415  # optional, and costs 100 ms
        from rich.console import Console  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        self._console, self._text, self._cell_len, self._set_cell_size = Console, Text, cell_len, set_cell_size
        self._is_coloured = not environ.get("NO_COLOR")

    def lines(self, view: JobView, columns: int, most: int) -> list[str]:
        """Returns at most ``most`` lines, none of which is wider than ``columns``, or 12 if that is more."""
        columns = max(columns, _NARROWEST)
        console = self._console(
            file=io.StringIO(),
            width=columns,
            force_terminal=self._is_coloured,
            color_system="standard" if self._is_coloured else None,
            highlight=False,
            legacy_windows=False,
        )
        text = self._text(no_wrap=True, overflow="crop", end="")
        self._add_title(text, view, columns)
        if rows := _rows(view, most - 2):  # after the title, and the names of the columns
            self._add_tree(text, rows, columns)
        with console.capture() as drawn:
            console.print(text)
        return drawn.get().splitlines()

    def _add_title(self, text: Text, view: JobView, columns: int) -> None:
        first, *more = view.summary()
        text.append("── ", "dim")
        text.append(self._fitted(f"{age(view.age_s)}  {first}", columns - text.cell_len).rstrip(), "bold")
        for words in more:
            if text.cell_len + _GAP + len(words) > columns:
                return
            text.append(" " * _GAP + words, "bold yellow" if "fault" in words else "bold")
        if (rest := columns - text.cell_len - _GAP) >= _REMARK:
            text.append(" " * _GAP + self._fitted(view.command, rest).rstrip(), "dim")

    def _add_tree(self, text: Text, rows: Sequence[_Row], columns: int) -> None:
        width_of = self._cell_len
        name_width = min(max(width_of(row.branch + row.name) for row in rows), max(columns // 3, _NARROWEST))
        known = [name for name in LIVE_COLUMNS if any(name in row.cells for row in rows)]
        widths = {name: max(width_of(name), *(width_of(row.cells.get(name, "")) for row in rows)) for name in known}
        remark = min(max(width_of(row.remark) for row in rows), _REMARK)
        for name in sorted(LIVE_COLUMNS, key=lambda name: LIVE_COLUMNS[name].importance):
            if name_width + sum(widths.values()) + _GAP * (len(widths) + bool(remark)) + remark <= columns:
                break
            widths.pop(name, None)
        gap = " " * _GAP
        if widths:
            names = "".join(gap + name.rjust(width) for name, width in widths.items())
            text.append("\n" + " " * name_width + names, "dim")
        rest = columns - name_width - sum(widths.values()) - _GAP * (len(widths) + 1)
        for row in rows:
            text.append("\n" + row.branch, "dim")
            text.append(self._fitted(row.name, name_width - width_of(row.branch)), row.style)
            cells = (row.cells.get(name, "").rjust(width) for name, width in widths.items())
            text.append("".join(gap + cell for cell in cells), row.style)
            if row.remark and rest > 1:
                text.append(gap + self._fitted(row.remark, rest).rstrip(), row.remark_style)

    def _fitted(self, text: str, width: int) -> str:
        """Returns the text with as many cells as ``width``."""
        if self._cell_len(text) > width > 0:
            text = self._set_cell_size(text, width - 1) + "…"
        return self._set_cell_size(text, width)


def _rows(view: JobView, most: int) -> list[_Row]:
    """Returns the lines of the tree, of all ranks if there is room, or else of those that are worst off."""
    by_host: dict[str, list[RankStatus]] = {host: [] for host in view.hosts}
    for rank in _chosen(view.ranks, len(view.hosts), most):
        by_host[rank.host].append(rank)
    rows = []
    for host, shown in by_host.items():
        if shown:
            rows.append(_host_row(view, host))
            rows += [_rank_row("├─ ", rank) for rank in shown[:-1]]
            rows.append(_rank_row("└─ ", shown[-1]))
    if hidden := len(view.ranks) - sum(map(len, by_host.values())):
        rows.append(_Row("", f"… {hidden} more", "dim", {}))
    return rows if len(rows) > 1 else []


def _chosen(ranks: Sequence[RankStatus], hosts: int, most: int) -> list[RankStatus]:
    if len(ranks) + hosts <= most:
        return list(ranks)
    room = most - 1  # one tells of the others
    chosen: set[int] = set()
    headed: set[str] = set()
    for rank in sorted(ranks, key=severity, reverse=True):  # stable: by rank where they are equal
        needed = 1 if rank.host in headed else 2
        if needed <= room:
            room -= needed
            headed.add(rank.host)
            chosen.add(rank.worker)
    return [rank for rank in ranks if rank.worker in chosen]


def _host_row(view: JobView, host: str) -> _Row:
    ranks = [rank for rank in view.ranks if rank.host == host]
    load = view.hosts[host]
    cells = {"memory": bytes_in_short(sum(rank.memory for rank in ranks))}
    if cpus := [rank.cpu_use for rank in ranks if rank.cpu_use is not None]:
        cells["CPU"] = f"{sum(cpus):.0%}"
    if load.gpus:
        cells["GPU"] = f"{sum(load.gpus) / len(load.gpus):.0%}"
    if rates := [rank.sample_rate for rank in ranks if rank.sample_rate is not None]:
        cells["samples/s"] = in_short(sum(rates))
    wire = ""
    if load.sent is not None and load.received is not None:
        wire = f"out {bytes_in_short(load.sent)}/s, in {bytes_in_short(load.received)}/s"
    return _Row("", host, "bold", cells, wire)


def _rank_row(branch: str, rank: RankStatus) -> _Row:
    cells = {name: text for name, column in LIVE_COLUMNS.items() if (text := column.cell(rank)) is not None}
    style = "bold red" if rank.is_silent else "yellow"
    return _Row(branch, rank.name, "", cells, trouble_of(rank), style)


class Watch(Observer):
    """Shows one job to those who look at it: in its own terminal (``--watch``), and in other processes.

        JobProgress ── after each question ──► Watch ── JobView ──► the screen's live view, or plain lines
        hvdlite-run --watch PID ── console ── WatchAsked ──► Watch ── JobView, as JSON

    Workers are asked as long as somebody looks. `launch` creates it for every job.
    """

    def __init__(self, facts: JobFacts, command: Sequence[str]) -> None:
        self._facts = facts
        self._command = command
        self._line_at_s = _LINE_EACH_S / 2

    def draw_with(self, view: LiveView, set_view: Callable[[View], None]) -> None:
        """Draws the job after each question, from now on."""
        self._facts.progress.show_with(lambda: set_view(partial(view.lines, self._view())))

    def tell_with(self, say: Callable[[str], None]) -> None:
        """Says in a line how far the job is, each 10 s."""

        def tell() -> None:
            if self._facts.age_s >= self._line_at_s:
                self._line_at_s = self._facts.age_s + _LINE_EACH_S - EACH_S / 2
                say(self._view().plain_line())

        self._facts.progress.show_with(tell)

    def on_event(self, event: Event) -> None:
        if isinstance(event, WatchAsked):
            self._facts.progress.hurry(EACH_S, _LOOKED_AT_S)
            event.answer(self._view().data())

    def _view(self) -> JobView:
        return JobView.of(self._facts, self._command)
