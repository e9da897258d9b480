"""Reads timeline files, and finds and checks their spans."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Span = dict[str, Any]


def read_events(path: Path) -> list[Span]:
    """Returns the events of a complete file."""
    return json.loads(path.read_text())["traceEvents"]


def read_part(path: Path) -> list[Span]:
    """Returns the events of one rank's part file, whose last line may be incomplete."""
    text = path.read_text()
    assert text.startswith("[\n")
    return json.loads(text[: text.rindex("},\n") + 1] + "]")


def spans(events: list[Span], rank: int, row: str | None = None, name: str | None = None) -> list[Span]:
    """Returns a rank's spans, sorted by start; ``row`` and ``name`` select those in a row and with a name."""
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
    """Asserts that any two spans of a row are either disjoint or nested."""
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
