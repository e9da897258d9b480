"""Formats the tables of ``--check``: hosts, round trips between them, and what to do. `diagnosis` has the columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .diagnosis import Cell


@dataclass(frozen=True)
class Marks:
    good: str
    bad: str
    none: str
    micro: str

    def fit(self, encoding: str) -> bool:
        try:
            f"{self.good}{self.bad}{self.none}{self.micro}".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


UNICODE = Marks("✓", "✗", "–", "µ")
ASCII = Marks("ok", "!!", "-", "u")


@dataclass(frozen=True)
class RoundTrips:
    """The round trips between hosts, by pairs in the hosts' order: the microseconds, or why there are none.

    ``blocked`` has the reason why the first of two hosts cannot open a TCP connection to the second. Its pairs are in
    any order, and have no other entry.
    """

    hosts: Sequence[str]
    times_us: Mapping[tuple[str, str], float]
    troubles: Mapping[tuple[str, str], str]
    blocked: Mapping[tuple[str, str], str] = field(default_factory=dict)


def show(
    rows: Mapping[str, Mapping[str, Cell] | str],
    trips: RoundTrips | None,
    marks: Marks,
    notes: Iterable[str] = (),
) -> tuple[str, bool]:
    """Returns the text, and whether all is well. A row is a host's cells, or the reason why there are none.

    ``notes`` are written below the tables.
    """
    parts = [_hosts(rows, marks)]
    if trips is not None:
        parts.append(f"round trips between hosts, over gloo\n\n{_trips(trips, marks)}")
    parts += [f"{note}\n" for note in notes]
    todo = [*_todo_of_hosts(rows), *_todo_of_round_trips(trips)]
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


def _trips(trips: RoundTrips, marks: Marks) -> str:
    def cell(host: str, other: str) -> str:
        if host == other:
            return marks.none
        us = trips.times_us.get((host, other), trips.times_us.get((other, host)))
        return marks.bad if us is None else _duration(us, marks)

    lines = [["", *trips.hosts]]
    lines += [[host, *(cell(host, other) for other in trips.hosts)] for host in trips.hosts]
    return _aligned(lines)


def _duration(us: float, marks: Marks) -> str:
    return f"{us:.0f} {marks.micro}s" if us < 1000 else f"{us / 1000:.1f} ms"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Aligns the lines in columns. A line with fewer cells than others may extend beyond them."""
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


def _todo_of_round_trips(trips: RoundTrips | None) -> Iterable[str]:
    if trips is None:
        return
    for (host, other), why in trips.troubles.items():
        step = "allow TCP between them, or choose another network with --network-interface"
        yield f"{host} and {other}: {why} ({step})"
    for (host, other), why in trips.blocked.items():
        back = trips.blocked.get((other, host))
        step = "a firewall? Allow TCP there, usually on ports 32768-60999, or choose a network with --network-interface"
        if back is None:
            yield f"{host} cannot connect to {other}: {why} ({step})"
        elif trips.hosts.index(host) < trips.hosts.index(other):
            reasons = why if back == why else f"{why}; {back}"
            yield f"{host} and {other} cannot connect to each other: {reasons} ({step})"


def _brief(why: str) -> str:
    """Returns the reason without what follows in parentheses, which is in the list of what to do."""
    return why.partition(" (")[0]
