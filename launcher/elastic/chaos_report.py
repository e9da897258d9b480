"""The report of ``--chaos``: each fault, how it ended, what it cost and what was lost; as text and for JSON.

`chaos_job` fills it in while the job runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NOTHING = "nothing: finished within the step"
DISCARDED = "the step: discarded on all ranks"
BEGUN_AGAIN = "nothing: the step was begun again, with new workers"
TO_COMMIT = "back to the last commit"
IN_COMMIT = "nothing: back to the commit in which it was lost"
NO_RANK = "nothing: it had no rank"
STAYED = "none: the others were given up"
JOB_ENDED = "the job ended first"


@dataclass
class Record:
    """One fault that has happened.

    ``at_s`` counts from the job's start. ``step`` and ``point`` are None for a fault by the clock, ``rank`` for a
    worker that had none. ``end`` is how the worker ended. ``cost_s`` is the time until all ranks of the next generation
    were connected, None if there was none. ``lost`` is what was lost.
    """

    at_s: float
    kind: str
    point: str | None
    step: int | None
    worker: int
    rank: int | None
    host: str
    generation: int
    is_seeded: bool
    end: str = "still there when the job ended"
    cost_s: float | None = None
    lost: str = JOB_ENDED


@dataclass
class ChaosReport:
    """The faults of one job. ``never`` has a line for each that has not happened, with the reason."""

    records: list[Record] = field(default_factory=list)
    never: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        return {"faults": [asdict(record) for record in self.records], "never": self.never}

    def text(self) -> str:
        """Returns a table with a line for each fault, and what has not happened."""
        rows: list[Sequence[str]] = [
            ("after", "fault", "step", "worker", "rank", "host", "its end", "connected", "lost")
        ]
        rows += [_row(record) for record in self.records]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows] if self.records else []
        number = len(self.records)
        return "\n".join([f"chaos: {number} {'fault' if number == 1 else 'faults'}", *lines, *self.never])


def _row(record: Record) -> Sequence[str]:
    return (
        f"{record.at_s:.1f} s",
        record.kind if record.point is None else f"{record.kind}@{record.point}",
        "–" if record.step is None else str(record.step),
        str(record.worker),
        "–" if record.rank is None else str(record.rank),
        record.host,
        record.end,
        "–" if record.cost_s is None else f"in {record.cost_s:.2f} s",
        record.lost,
    )
