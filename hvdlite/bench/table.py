"""
A table as text: columns as wide as what is in them, words to the left and numbers to the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """``words`` is how many of the first columns are words; a title is a line above."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""

    def __str__(self) -> str:
        lines = [list(self.header), *map(list, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self._line(cells, widths) for cells in lines]
        return "\n".join([*([self.title, ""] if self.title else []), *text])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.ljust(width) if number < self.words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()
