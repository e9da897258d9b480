"""`Lines`: splits what a worker writes to one stream into whole lines, and keeps its progress bar and unfinished line.

`screen` has one for each stream of each worker, and shows what they return.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

BAR_EACH_S = 5.0
MAX_LINE_BYTES = 1 << 20  # longer ones are shown in pieces

_PIECE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")


@dataclass
class Lines:
    """Splits the bytes of one stream of one worker into lines; ``bar`` is the state of its bar that is no line yet.

    Bars are drawn ``in_place``; otherwise a state of a bar is made a line each `BAR_EACH_S` seconds.

    ``stamp`` returns the text before the prefix of lines that end now, ``clean`` the bytes to show for a worker's
    bytes.
    """

    prefix: bytes
    in_place: bool
    stamp: Callable[[], bytes] = bytes
    clean: Callable[[bytes], bytes] = bytes
    clock: Callable[[], float] = time.monotonic
    bar: bytes = b""
    _bar_at_s: float | None = None  # when a state of a bar was last made a line
    _rest: bytearray = field(default_factory=bytearray)
    _begin: bytes = b""  # how the unfinished line begins on the screen, if it is there
    _shown_bytes: int = 0  # how much of the unfinished line is on the screen
    _is_drawing: bool = False  # the unfinished line follows a carriage return, as a bar does

    def feed(self, data: bytes) -> bytes:
        """Adds bytes and returns the lines that they complete, each with the prefix."""
        if b"\r" in data or b"\r" in self._rest:
            return self._with_bars(data)
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._rest += data
            return self.finish() if len(self._rest) > MAX_LINE_BYTES else b""
        # The path for large amounts of output: a search and a replace, no loop.
        prefix = self.stamp() + self.prefix
        text = self.clean(b"".join((self._rest, head)))
        lines = b"".join((self._begin or prefix, text.replace(b"\n", b"\n" + prefix), b"\n"))
        self._is_drawing = False
        self._renew(rest)
        self.bar = b""
        return lines

    def _with_bars(self, data: bytes) -> bytes:
        text = bytes(self._rest) + data
        prefix = self.stamp() + self.prefix
        lines = []
        start = 0
        for match in _PIECE.finditer(text):
            if match.end() == len(text) and match[2] == b"\r":
                break  # the next byte may be the \n of a \r\n
            start = match.end()
            body, end = self.clean(match[1]), match[2]
            begin, self._begin = self._begin or prefix, b""
            self._is_drawing = end == b"\r"
            if not self._is_drawing:
                lines.append(begin + body + end)
                self.bar = b""
            elif not body.strip():
                self.bar = b""
            elif self.in_place or not self._is_bar_due():
                self.bar = begin + body
            else:
                lines.append(begin + body + b"\n")
                self.bar = b""
        if start:
            self._renew(text[start:])
        else:
            self._rest = bytearray(text)
        return b"".join(lines)

    def _is_bar_due(self) -> bool:
        now_s = self.clock()
        is_due = self._bar_at_s is None or now_s - self._bar_at_s >= BAR_EACH_S
        if is_due:
            self._bar_at_s = now_s
        return is_due

    @property
    def is_unfinished(self) -> bool:
        """Whether there is an unfinished line to show; a bar is none."""
        return bool(self._rest) and not (self.bar or self._is_drawing or b"\r" in self._rest)

    def show_unfinished(self) -> bytes:
        """Returns the unfinished line so far; the whole line will begin with the same bytes."""
        self._begin = self._begin or self.stamp() + self.prefix
        self._shown_bytes = len(self._rest)
        return self._begin + self.clean(bytes(self._rest))

    def start_new_line(self) -> None:
        """Makes the rest of the unfinished line a line of its own: something else was written below its beginning."""
        self._renew(bytes(self._rest[self._shown_bytes :]))

    def _renew(self, rest: bytes) -> None:
        """Sets the unfinished line to ``rest``, of which nothing is on the screen."""
        self._rest, self._begin, self._shown_bytes = bytearray(rest), b"", 0

    def finish(self) -> bytes:
        """Returns the unfinished last line, completed."""
        rest = self.clean(bytes(self._rest).rstrip(b"\r"))
        line = (self._begin or self.stamp() + self.prefix) + rest if rest else self.bar
        self._renew(b"")
        self.bar = b""
        return line + b"\n" if line else b""
