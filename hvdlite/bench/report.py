"""
What a command has found, and how it leaves: a table on the screen, JSON and a plot in files.

A report may be made at any time, of what has been measured by then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import UsageError
from .plot import SUFFIXES, Chart, draw, require_matplotlib
from .table import Table


@dataclass(frozen=True)
class Report:
    """``data`` is for JSON: what the tables say, and every sample. ``opening`` is what to know before reading them."""

    tables: Sequence[Table]
    data: Mapping[str, Any]
    chart: Chart
    notes: Sequence[str] = field(default_factory=tuple)
    opening: str = ""

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [self.opening, *map(str, self.tables), "\n".join(self.notes)]))


@dataclass(frozen=True)
class Files:
    """Where a report goes besides the screen."""

    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raise a UsageError where one of them cannot be written. Nothing is created yet."""
        if self.plot is not None:
            if self.plot.suffix.lower() not in SUFFIXES:
                raise UsageError(f"--plot: {str(self.plot)!r} does not end in {', '.join(SUFFIXES)}")
            require_matplotlib()
        for flag, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None:
                _require_writable(flag, path)

    def write(self, report: Report, about: Mapping[str, Any]) -> Iterator[Path]:
        """Write those that are wanted, and say of each where it is now; an OSError where that fails.

        ``about`` is what JSON says of the run itself.
        """
        if self.json is not None:
            self.json.write_text(json.dumps({**about, **report.data}, indent=1) + "\n")
            yield self.json.absolute()
        if self.plot is not None:
            draw(report.chart, self.plot)
            yield self.plot.absolute()


def _require_writable(flag: str, path: Path) -> None:
    directory = path.parent
    why = None
    if path.is_dir():
        why = "is a directory"
    elif not directory.is_dir():
        why = f"cannot be written: there is no directory {str(directory)!r}"
    elif not os.access(path if path.exists() else directory, os.W_OK):
        why = "cannot be written: permission denied"
    if why is not None:
        raise UsageError(f"{flag}: {str(path)!r} {why}")
