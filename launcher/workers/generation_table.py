"""The table of an elastic job's generations, shown at its end: time, number of ranks, who joined and who left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_ROWS = 50


@dataclass(frozen=True)
class GenerationRow:
    """One generation. ``at_s`` counts from the job's start; ``came`` and ``left`` name workers."""

    generation: int
    at_s: float
    size: int
    came: Sequence[str]
    left: Sequence[str]


class GenerationTable:
    """Keeps the first row and the newest ones: a job may have any number of generations."""

    def __init__(self) -> None:
        self._first: GenerationRow | None = None
        self._newest: deque[GenerationRow] = deque(maxlen=_MOST_ROWS)

    def add(self, row: GenerationRow) -> None:
        if self._first is None:
            self._first = row
        else:
            self._newest.append(row)

    @property
    def newest(self) -> GenerationRow | None:
        """The newest row; None if there is none yet."""
        return self._newest[-1] if self._newest else self._first

    def rows(self) -> list[GenerationRow]:
        return [] if self._first is None else [self._first, *self._newest]

    def text(self) -> str:
        """Returns the table; nothing if there was one generation at most."""
        if self._first is None or not self._newest:
            return ""
        lines = [f"{'generation':>10}  {'after':>9}  {'ranks':>5}  changes", *_lines(self._first)]
        omitted = self._newest[0].generation - self._first.generation - 1
        if omitted:
            lines.append(f"{'...':>10}  {omitted} more")
        for row in self._newest:
            lines += _lines(row)
        return "\n".join(lines)


def _lines(row: GenerationRow) -> list[str]:
    changes = [*(f"- {each}" for each in row.left), *(f"+ {each}" for each in row.came)] or ["the same ranks again"]
    first = f"{row.generation:>10}  {row.at_s:>7.1f} s  {row.size:>5}  {changes[0]}"
    return [first, *(" " * 30 + each for each in changes[1:])]
