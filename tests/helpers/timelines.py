"""A timeline read back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Span = dict[str, Any]


def read_events(path: Path) -> list[Span]:
    """The events of a whole file."""
    return json.loads(path.read_text())["traceEvents"]


def read_part(path: Path) -> list[Span]:
    """The events of a part, whose last line may be cut short."""
    text = path.read_text()
    assert text.startswith("[\n")
    return json.loads(text[: text.rindex("},\n") + 1] + "]")


def spans(events: list[Span], rank: int, row: str | None = None, name: str | None = None) -> list[Span]:
    """A rank's spans, in a row of that name, of that name; by their beginning."""
    rows = {event["tid"]: event["args"]["name"] for event in events if is_about(event, rank, "thread_name")}
    found = [
        event
        for event in events
        if event["ph"] == "X" and event["pid"] == rank
        if row in (None, rows[event["tid"]]) and name in (None, event["name"])
    ]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def is_about(event: Span, rank: int, what: str) -> bool:
    return event["ph"] == "M" and event["pid"] == rank and event["name"] == what


def assert_rows_are_tidy(events: list[Span]) -> None:
    """Spans of a row lie one after the other, or one within the other."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        around: list[float] = []
        for span in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
            stop = span["ts"] + span["dur"]
            while around and around[-1] <= span["ts"] + 0.001:
                around.pop()
            assert not around or stop <= around[-1] + 0.002, span
            around.append(stop)
