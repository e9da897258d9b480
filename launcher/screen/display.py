"""`Display`: the launcher's stdout and stderr, as whole lines, with what is drawn in place below them, a `Footer`.

    job_screen: whole lines, bars, unfinished lines, a status, a live view ──► Display ──► Footer ──► a terminal
                                                                                  └──► a pipe or a file

A pipe or a file gets each line as it is, byte by byte. On a terminal, control sequences are made visible. An unfinished
line, which may be a prompt, is left behind all lines: what is shown next continues it if it is of the same worker,
unless the user has typed an answer. Then, and after output of another worker, it becomes a line of its own. Under a
live view it is drawn below instead.

Each line of output is written above the footer: that is erased, and drawn again below. While much is written, output is
held back for a moment and written together, so that the footer stays visible, and is drawn a few times a second only.
Its lines are cut at the terminal's width: erasing a longer one would leave its second row.
"""

from __future__ import annotations

import os
import re
import select
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..protocol.messages import Stream
from ..system.terminal_text import visible, visible_bytes
from .lines import Lines, Traceback

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
# How often the footer is drawn at most, while there is output without a pause.
_REDRAW_S = 0.05
_UNCOLOURED = b"\x1b[0m"

View = Callable[[int, int], Sequence[str]]
"""Returns lines for so many columns, and at most so many lines."""

Whose = tuple[int, Stream]
"""A worker's number, and one of its streams."""


class Footer:
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


class Display:
    """What the two streams show. It is used by one thread."""

    def __init__(
        self,
        failed: Callable[[Stream, OSError], object],
        *,
        stdout: int = 1,
        stderr: int = 2,
        environ: Mapping[str, str] = os.environ,
        redraw_s: float = _REDRAW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``failed`` is called once for a stream that cannot be written, of which no more is shown then.

        ``stdout`` and ``stderr`` are descriptors. ``redraw_s``: see `Footer`.
        """
        self.clock = clock
        self._failed = failed
        self._fds: dict[Stream, int] = {"stdout": stdout, "stderr": stderr}
        self.on_terminal = {stream: os.isatty(fd) for stream, fd in self._fds.items()}
        self.in_place = {stream: draws_in_place(fd, environ) for stream, fd in self._fds.items()}
        """Whether bars, a status and a view can be drawn there."""
        self._coloured = not environ.get("NO_COLOR")
        self._broken: set[Stream] = set()
        self._bars: dict[Whose, Lines] = {}
        self._status: Sequence[bytes] = ()
        self._view: View | None = None
        self._view_lines: tuple[View | None, tuple[int, int], Sequence[bytes]] = (None, (0, 0), ())
        # Unfinished lines that are drawn in the footer, with what is drawn of each.
        self._unfinished: dict[Whose, tuple[Lines, bytes]] = {}
        # The unfinished line on the terminal that the cursor is in, and its bytes there. Then no bar is drawn.
        self._open: tuple[Stream, Lines, bytes] | None = None
        # Of each stream on which lines are drawn in place. Streams of one terminal share it.
        self._footers: dict[Stream, Footer] = {}
        devices: dict[int, Footer] = {}
        for stream, fd in self._fds.items():
            if self.in_place[stream]:
                put, size = partial(self._put, stream), partial(terminal_size, fd)
                own = Footer(put, size, clock=clock, redraw_s=redraw_s)
                self._footers[stream] = devices.setdefault(os.fstat(fd).st_rdev, own)

    @property
    def redraw_at(self) -> float | None:
        """When `draw` is to be called, by the clock; None if nothing has changed."""
        return min((f.due_at for f in self._footers.values() if f.due_at is not None), default=None)

    def prefix(self, name: str, number: int, stream: Stream) -> bytes:
        """Returns the prefix of a line; ``number`` chooses its colour."""
        prefix = f"[{name}]<{stream}>:"
        if self.in_place[stream] and self._coloured:
            prefix = f"\x1b[{31 + number % 6}m{prefix}\x1b[0m"
        return prefix.encode()

    def new_lines(self, stream: Stream, prefix: bytes, stamp: Callable[[], bytes]) -> Lines:
        clean = visible_bytes if self.on_terminal[stream] else bytes
        return Lines(prefix, self.in_place[stream], stamp, clean, self.clock)

    def write(self, stream: Stream, text: bytes, source: Lines | None = None) -> None:
        """Writes whole lines, above the footer. ``source`` are those of a worker that they come from."""
        if self._open is not None and (text or (source is not None and source.bar and source.in_place)):
            text = self._after_open(stream, text, source)
        if text and (footer := self._footers.get(stream)):
            footer.write(text)
        elif text:
            self._put(stream, text)
        self.draw()

    def feed(self, whose: Whose, data: bytes, lines: Lines) -> None:
        text = lines.feed(data)
        self._unfinished.pop(whose, None)
        if lines.bar and lines.in_place:
            self._bars[whose] = lines
        self.write(whose[1], text, lines)

    def finish(self, whose: Whose, lines: Lines) -> None:
        self._unfinished.pop(whose, None)
        self.write(whose[1], lines.finish(), lines)

    def show_unfinished(self, whose: Whose, lines: Lines) -> None:
        stream, text = whose[1], lines.show_unfinished()
        if self._view is not None and stream in self._footers:
            self._unfinished[whose] = lines, text
            self.draw()
            return
        if footer := self._footers.get(stream):
            footer.erase()
        self._put(stream, self._after_open(stream, text, lines))
        self._open = stream, lines, text

    def note_newline(self) -> None:
        """Notes that the user has ended a line on the terminal: the cursor is at the beginning of the next."""
        for footer in dict.fromkeys(self._footers.values()):
            footer.note_newline()
        if self._unfinished:  # what was typed stands after the newest one
            (_, stream), (lines, text) = self._unfinished.popitem()
            lines.start_new_line()
            self.write(stream, text + b"\n")
        if self._open is not None:
            self._open[1].start_new_line()
            self._open = None

    def write_traceback(self, traceback: Traceback, stamp: Callable[[], bytes]) -> None:
        lines = self.new_lines("stderr", self.prefix(traceback.name, traceback.rank, "stderr"), stamp)
        self.write("stderr", lines.feed(traceback.text) + lines.finish())

    def say(self, text: str) -> None:
        if self.on_terminal["stderr"]:
            text = visible(text)
        # The terminal may show a ^C there, or still have the colour of a worker's output.
        over = _UNCOLOURED + ERASE if self.in_place["stderr"] else b""
        self.write("stderr", over + f"hvdlite-run: {text}\n".encode(errors="surrogateescape"))

    def set_status(self, lines: Sequence[str]) -> None:
        self._status = [visible(line).encode(errors="surrogateescape") for line in lines]
        self.draw()

    def set_view(self, view: View) -> None:
        self._view = view
        self.draw()

    def drop_status(self) -> None:
        self._view, self._status = None, ()

    def erase(self) -> None:
        for footer in self._footers.values():
            footer.erase()

    def draw(self) -> None:
        """Draws what has changed in the footers, except below an unfinished line, which may be a prompt."""
        if self._open is not None:
            return
        self._bars = {whose: lines for whose, lines in self._bars.items() if lines.bar}
        for footer in dict.fromkeys(self._footers.values()):
            bars = [
                lines.bar
                for (_, stream), lines in sorted(self._bars.items(), key=lambda each: each[0])
                if self._footers[stream] is footer
            ]
            bars += [text for (_, stream), (_, text) in self._unfinished.items() if self._footers[stream] is footer]
            columns, most = footer.fits()
            is_own = footer is self._footers.get("stderr")
            status = self._status if is_own else ()
            view = self._lines_of_view(columns, most) if is_own else ()
            footer.draw([*view, *_fitted(bars, status, most - len(view))])

    def _lines_of_view(self, columns: int, most: int) -> Sequence[bytes]:
        """Returns the live view, in half of the lines: the rest is left to output and bars."""
        if self._view is None:
            return ()
        drawn, size, lines = self._view_lines
        if drawn is not self._view or size != (columns, most):
            rows = self._view(columns, max(1, most // 2))
            lines = [visible(row).encode(errors="surrogateescape") for row in rows]
            self._view_lines = self._view, (columns, most), lines
        return lines

    def _after_open(self, stream: Stream, text: bytes, source: Lines | None) -> bytes:
        """Returns what to write of ``text`` after an unfinished line on the screen, and completes or ends that line."""
        if self._open is None or not self.on_terminal[stream]:
            return text
        (at, lines, seen), self._open = self._open, None
        if source is lines and text.startswith(seen):
            return text[len(seen) :]
        if source is lines and self.in_place[at]:  # a bar, or bytes that decode differently with those that follow
            return ERASE + text
        self._put(at, b"\n")
        if source is not lines:
            lines.start_new_line()
        return text

    def _put(self, stream: Stream, data: bytes) -> None:
        if stream in self._broken:
            return
        try:
            put_all(self._fds[stream], data)
        except OSError as error:
            self._broken.add(stream)
            self._failed(stream, error)


def draws_in_place(fd: int = 2, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a terminal on which lines can be drawn in place; by default, stderr."""
    return os.isatty(fd) and environ.get("TERM") != "dumb"


def _fitted(bars: Sequence[bytes], status: Sequence[bytes], most: int) -> list[bytes]:
    """Returns as many bars as there is room for above the status."""
    room = max(0, most - len(status))
    if len(bars) > room:
        bars = [*bars[: room - 1], b"... and %d more bars" % (len(bars) - room + 1)] if room else []
    return [*bars, *status]


def put_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:  # a process that shares the descriptor made it non-blocking
            select.select([], [fd], [])


def terminal_size(fd: int) -> tuple[int, int]:
    """Returns the columns and rows of a terminal; zeros if it does not tell."""
    try:
        return os.get_terminal_size(fd)
    except OSError:  # it is gone, which the next write to it tells
        return 0, 0
