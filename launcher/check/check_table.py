"""Formats the ``--check`` tables, whatever their columns (see `diagnosis`): hosts, links between them, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .diagnosis import Cell


@dataclass(frozen=True)
class Marks:
    good: str
    bad: str
    none: str
    micro: str

    def fit(self, encoding: str) -> bool:
        """Whether they can be written so."""
        try:
            f"{self.good}{self.bad}{self.none}{self.micro}".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


UNICODE = Marks("✓", "✗", "–", "µ")
ASCII = Marks("ok", "!!", "-", "u")


@dataclass(frozen=True)
class Ways:
    """Between hosts, each pair in the hosts' order: the microseconds of a round trip, or why there is none."""

    hosts: Sequence[str]
    times_us: Mapping[tuple[str, str], float]
    troubles: Mapping[tuple[str, str], str]


def show(
    rows: Mapping[str, Mapping[str, Cell] | str], ways: Ways | None, marks: Marks, notes: Iterable[str] = ()
) -> tuple[str, bool]:
    """The text, and whether all is well. A row is a host's cells, or why there are none.

    ``notes`` are said below the tables.
    """
    parts = [_hosts(rows, marks)]
    if ways is not None:
        parts.append(f"round trips between hosts, over gloo\n\n{_ways(ways, marks)}")
    parts += [f"{note}\n" for note in notes]
    todo = [*_todo_of_hosts(rows), *_todo_of_ways(ways)]
    if todo:
        parts.append("what to do\n\n" + "".join(f"  {marks.bad} {line}\n" for line in todo))
    return "\n".join(parts), not todo


def _hosts(rows: Mapping[str, Mapping[str, Cell] | str], marks: Marks) -> str:
    titles = next((list(cells) for cells in rows.values() if not isinstance(cells, str)), [])
    indent = " " * (len(marks.good) + 1)
    lines = [["host", *(indent + title for title in titles)]]
    for host, cells in rows.items():
        shown = (
            [f"{marks.bad} {_brief(cells)}"] if isinstance(cells, str) else [_cell(c, marks) for c in cells.values()]
        )
        lines.append([host, *shown])
    return _aligned(lines)


def _cell(cell: Cell, marks: Marks) -> str:
    mark = marks.bad if cell.wrong else marks.good if cell.text else marks.none
    return f"{mark:{len(marks.good)}} {cell.text}".rstrip()


def _ways(ways: Ways, marks: Marks) -> str:
    def way(host: str, other: str) -> str:
        pair = (host, other) if (host, other) in ways.times_us or (host, other) in ways.troubles else (other, host)
        if host == other:
            return marks.none
        return marks.bad if pair in ways.troubles else _duration(ways.times_us[pair], marks)

    lines = [["", *ways.hosts]]
    lines += [[host, *(way(host, other) for other in ways.hosts)] for host in ways.hosts]
    return _aligned(lines)


def _duration(us: float, marks: Marks) -> str:
    return f"{us:.0f} {marks.micro}s" if us < 1000 else f"{us / 1000:.1f} ms"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """In columns; a line with fewer cells than others may run over them."""
    count = max(map(len, lines))
    widths = [max((len(line[i]) for line in lines if len(line) == count), default=0) for i in range(count)]
    widths[0] = max(len(line[0]) for line in lines)
    rows = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)) for line in lines]
    return "".join(f"{row.rstrip()}\n" for row in rows)


def _todo_of_hosts(rows: Mapping[str, Mapping[str, Cell] | str]) -> Iterable[str]:
    for host, cells in rows.items():
        if isinstance(cells, str):
            yield f"{host}: {cells}"
        else:
            yield from (f"{host}: {cell.wrong}" for cell in cells.values() if cell.wrong)


def _todo_of_ways(ways: Ways | None) -> Iterable[str]:
    if ways is None:
        return
    for (host, other), why in ways.troubles.items():
        step = "let TCP pass between them, or name another network with --network-interface"
        yield f"{host} and {other}: {why} ({step})"


def _brief(why: str) -> str:
    """Its first words; the rest is said below."""
    return why.partition(" (")[0]
