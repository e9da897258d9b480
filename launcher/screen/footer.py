"""`Footer`: the lines at the bottom of a terminal, below all output, which are redrawn in place.

    screen: the live view, bars of workers, a status ──► Footer ──► the terminal

`screen` writes each line of output above it: it is erased, and drawn again below. While much is written, output is held
back for a moment and written together, so that the lines stay visible, and are drawn a few times a second only. Lines
are cut at the terminal's width: erasing a longer one would leave its second row.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

ERASE = b"\r\x1b[K"
"""Erases the line in which the cursor is."""

_UNWRAPPED, _WRAPPED = b"\x1b[?7l", b"\x1b[?7h"
_UP_AND_ERASE = b"\r\x1b[%dA\x1b[J"
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_NO_SIZE = (80, 24)  # of a terminal that does not tell
# Output that is held back is written at once when it is this much.
_MOST_HELD_BYTES = 1 << 16
# Has terminals that know it show nothing between the two: lines that scroll up, and the footer below them, at once.
_TOGETHER, _SHOWN = b"\x1b[?2026h", b"\x1b[?2026l"


class Footer:
    """What is drawn at the bottom of one terminal."""

    def __init__(
        self,
        put: Callable[[bytes], object],
        size: Callable[[], tuple[int, int]],
        *,
        clock: Callable[[], float],
        redraw_s: float,
    ) -> None:
        """``put`` writes to the terminal, ``size`` returns its columns and rows.

        ``redraw_s``: after it was drawn, it is drawn no sooner than after so long, unless much output comes.
        """
        self._put = put
        self._size = size
        self._clock = clock
        self._redraw_s = redraw_s
        self._drawn: Sequence[bytes] = ()
        self._drawn_at: float | None = None
        self._columns = 0
        self._held = bytearray()
        self._below = 0
        self.due_at: float | None = None
        """When what has changed is to be drawn, by the clock; None if nothing has."""

    def fits(self) -> tuple[int, int]:
        """Returns how many columns and lines there are room for: a row is left to the output."""
        columns, rows = self._size()
        columns, rows = columns or _NO_SIZE[0], rows or _NO_SIZE[1]
        return columns, max(1, rows - 1)

    def write(self, text: bytes) -> None:
        """Writes whole lines above it, now or soon; `draw` must be called afterwards."""
        if self._drawn:
            self._held += text
        else:
            self._put(text)

    def erase(self) -> None:
        """Makes room for output: the cursor is at the beginning of a line then. What was held back is written."""
        if out := self._erasing() + self._held:
            self._put(bytes(out))
        self._drawn, self.due_at = (), None
        self._held.clear()

    def note_newline(self) -> None:
        """Notes that the terminal has begun a new line below it, as it does when the user ends one."""
        self._below += bool(self._drawn)

    def draw(self, lines: Sequence[bytes]) -> None:
        """Draws these lines, unless they are there already, or were drawn so lately that they are due later."""
        columns, most = self.fits()
        lines = list(lines[:most])
        if not self._held and lines == self._drawn and columns == self._columns:
            self.due_at = None
            return
        if lines and self._drawn_at is not None and len(self._held) <= _MOST_HELD_BYTES:
            at_s = self._drawn_at + self._redraw_s
            if self._clock() < at_s:
                self.due_at = at_s
                return
        self.due_at = None
        is_scrolled = bool(self._held and lines)
        out = self._erasing() + self._held
        self._held.clear()
        self._drawn = lines
        if lines:
            out += _UNWRAPPED + b"\n".join(lines) + _WRAPPED
            self._columns, self._drawn_at = columns, self._clock()
        if out:
            self._put(_TOGETHER + out + _SHOWN if is_scrolled else bytes(out))

    def _erasing(self) -> bytes:
        if not self._drawn:
            return b""
        up, self._below = self._rows_there() - 1 + self._below, 0
        return _UP_AND_ERASE % up if up else ERASE

    def _rows_there(self) -> int:
        """Returns the rows that the lines have now: terminals wrap them when they are made narrower."""
        columns, most = self.fits()
        if columns >= self._columns:
            return len(self._drawn)
        widths = (min(_width(line), self._columns) for line in self._drawn)
        return min(most, sum(max(1, -(-width // columns)) for width in widths))


def _width(line: bytes) -> int:
    text = _COLOUR.sub("", line.decode(errors="replace"))
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)
