"""Shows the workers' output as whole lines on the launcher's stdout and stderr: ``[rank]<stdout>:text``.

`launch` creates a `Screen`; `supervisor` calls it, and goes on at once: a thread of the screen writes, so a terminal
that accepts no output (Ctrl-S, a pager) never delays the supervisor. The screen passes each piece of output on to
`output_files` as it came, then splits it into lines.

A pipe or a file gets whole lines only, byte by byte as they were written. On a terminal, control sequences are made
visible (see `terminal_text`). When a worker ends in the middle of a line, a newline is added.

A carriage return without a newline, as in a progress bar, ends a line too. On a terminal the newest such line is drawn
below all other lines, each time in the same place. Of several bars only the newest is shown.

A worker's unfinished line may be a prompt: on a terminal it is shown once the worker has been quiet for a moment. What
the worker writes next continues this line, unless another worker's output has been shown since, or the user has typed
an answer (`launch` reports that): then it becomes a line of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from ..errors import UsageError
from ..system.terminal_text import visible, visible_bytes
from ..wire.messages import Event, Output, ScreenDone, ScreenFailed, Stream
from .output_files import OutputFiles

MAX_LINE_BYTES = 1 << 20  # longer ones are shown in pieces
# An unfinished line is shown when its worker has been quiet for this long: more than between two prints of one line.
_QUIET_S = 0.15

# A bar is cut at the terminal's width: erasing it would leave the rest of a second row.
_ERASE, _UNWRAPPED, _WRAPPED = b"\r\x1b[K", b"\x1b[?7l", b"\x1b[?7h"
_UNCOLOURED = b"\x1b[0m"

_PIECE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")


@dataclass
class Lines:
    """Splits the bytes of one stream of one worker into lines; ``bar`` is the current bar, if bars are drawn in place.

    ``stamp`` returns the text before the prefix of lines that end now, ``clean`` the bytes to show for a worker's
    bytes.
    """

    prefix: bytes
    in_place: bool
    stamp: Callable[[], bytes] = bytes
    clean: Callable[[bytes], bytes] = bytes
    bar: bytes = b""
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
            elif self.in_place:
                self.bar = begin + body
            else:
                lines.append(begin + body + b"\n")
        if start:
            self._renew(text[start:])
        else:
            self._rest = bytearray(text)
        return b"".join(lines)

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


class Screen:
    """The launcher's stdout and stderr. A failed write is an event, `ScreenFailed`; the end of all is `ScreenDone`."""

    def __init__(
        self,
        events: SimpleQueue[Event],
        shown: Callable[[Output], object],
        *,
        stdout: int = 1,
        stderr: int = 2,
        environ: Mapping[str, str] = os.environ,
        timestamps: bool = False,
        files: OutputFiles | None = None,
        rank_of: Callable[[int], int | None] = int,
        quiet_s: float = _QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown`` is called for each output that was shown, or that cannot be shown any more.

        ``timestamps``: each line begins with the time. ``files`` are closed at the end. ``rank_of`` maps a worker's
        number to the rank in its prefix, until `set_rank` is called; None if it has none. ``quiet_s``: an unfinished
        line is shown on a terminal when its worker was quiet for so long.
        """
        self._events = events
        self._fds: dict[Stream, int] = {"stdout": stdout, "stderr": stderr}
        self._on_terminal = {s: os.isatty(fd) for s, fd in self._fds.items()}
        self._in_place = {s: self._on_terminal[s] and environ.get("TERM") != "dumb" for s, fd in self._fds.items()}
        self._coloured = not environ.get("NO_COLOR")
        self._stamp: Callable[[], bytes] = _now if timestamps else bytes
        self._files = files
        self._rank_of = rank_of
        self._ranks: dict[int, int | None] = {}  # as far as `set_rank` was called
        self._lines: dict[tuple[int, Stream], Lines] = {}
        self._newest_bar: tuple[Stream, Lines] | None = None  # the one on the terminal
        # The unfinished line on the terminal that the cursor is in, and its bytes there. Then no bar is drawn.
        self._open: tuple[Stream, Lines, bytes] | None = None
        self._quiet_s = quiet_s
        self._clock = clock
        self._quiet_at: dict[tuple[int, Stream], float] = {}  # when each unfinished line will be shown
        self._failed: set[Stream] = set()
        self._shown = shown
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="screen").start()

    def show(self, output: Output) -> None:
        """Shows output of a worker."""
        self._todo.put(partial(self._show, output))

    def begin(self, worker: int) -> None:
        """Makes the files of a worker of an elastic job, which is to be started."""
        self._todo.put(partial(self._begin, worker))

    def set_rank(self, worker: int, rank: int | None) -> None:
        """Sets the rank in the prefix of the lines that a worker writes from now on."""
        self._todo.put(partial(self._set_rank, worker, rank))

    def finish(self, worker: int) -> None:
        """Completes the unfinished lines of the worker with this number."""
        self._todo.put(partial(self._finish, worker))

    def say(self, text: str) -> None:
        """Shows a message of the launcher itself, on stderr."""
        self._todo.put(partial(self._say, text))

    def typed(self) -> None:
        """Reports that the user ended a line on the terminal, so that the cursor is at the beginning of the next."""
        self._todo.put(self._typed)

    def close(self) -> None:
        """Ends the thread once everything is written. Its last event is `ScreenDone`."""
        self._todo.put(None)

    # ------------------------------------------------------- in the own thread

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            task()
        for worker, _ in list(self._lines):
            self._finish(worker)
        if self._files is not None:
            self._files.close()
        self._events.put(ScreenDone())

    def _next_task(self) -> Callable[[], None] | None:
        while self._quiet_at:
            first = min(self._quiet_at, key=self._quiet_at.__getitem__)
            left = self._quiet_at[first] - self._clock()
            # Checked first: while other workers write without a pause, the queue is never empty.
            if left <= 0:
                return partial(self._show_unfinished, first)
            with contextlib.suppress(Empty):
                return self._todo.get(timeout=left)
        return self._todo.get()

    def _begin(self, worker: int) -> None:
        if self._files is not None:
            try:
                self._files.add(worker)
            except UsageError as error:
                self._files = None
                cause = error.__cause__ if isinstance(error.__cause__, OSError) else OSError(0, str(error))
                self._events.put(ScreenFailed(cause.filename or f"the files of worker {worker}", cause))

    def _set_rank(self, worker: int, rank: int | None) -> None:
        self._ranks[worker] = rank
        for stream in self._fds:
            if lines := self._lines.get((worker, stream)):
                lines.prefix = self._prefix(worker, stream)

    def _show(self, output: Output) -> None:
        if self._files is not None:
            try:
                self._files.write(output)
            except OSError as error:
                self._files.close()
                self._files = None
                self._events.put(ScreenFailed(error.filename, error))
        lines = self._lines.get((output.worker, output.stream))
        if lines is None:
            prefix = self._prefix(output.worker, output.stream)
            clean = visible_bytes if self._on_terminal[output.stream] else bytes
            lines = Lines(prefix, self._in_place[output.stream], self._stamp, clean)
            self._lines[output.worker, output.stream] = lines
        self._write(output.stream, lines.feed(output.data), lines)
        self._quiet_at.pop((output.worker, output.stream), None)
        if self._on_terminal[output.stream] and lines.is_unfinished:
            self._quiet_at[output.worker, output.stream] = self._clock() + self._quiet_s
        self._shown(output)

    def _show_unfinished(self, whose: tuple[int, Stream]) -> None:
        del self._quiet_at[whose]
        stream, lines = whose[1], self._lines[whose]
        text = lines.show_unfinished()
        if self._newest_bar is not None:
            self._put(self._newest_bar[0], _ERASE)
            self._newest_bar = None
        self._put(stream, self._after_open(stream, text, lines))
        self._open = stream, lines, text

    def _typed(self) -> None:
        if self._open is not None:
            self._open[1].start_new_line()
            self._open = None

    def _finish(self, worker: int) -> None:
        if self._files is not None:
            self._files.finish(worker)
        for stream in self._fds:
            self._quiet_at.pop((worker, stream), None)
            if lines := self._lines.pop((worker, stream), None):
                self._write(stream, lines.finish(), lines)
        self._ranks.pop(worker, None)

    def _say(self, text: str) -> None:
        # The terminal may show a ^C there, or still have the colour of a worker's output.
        over = _UNCOLOURED + _ERASE if self._in_place["stderr"] else b""
        text = visible(text) if self._on_terminal["stderr"] else text
        self._write("stderr", over + f"hvdlite-run: {text}\n".encode(errors="surrogateescape"))

    def _prefix(self, worker: int, stream: Stream) -> bytes:
        rank = self._ranks[worker] if worker in self._ranks else self._rank_of(worker)
        name = f"worker {worker}" if rank is None else str(rank)
        prefix = f"[{name}]<{stream}>:"
        if self._in_place[stream] and self._coloured:
            prefix = f"\x1b[{31 + (worker if rank is None else rank) % 6}m{prefix}\x1b[0m"
        return prefix.encode()

    def _write(self, stream: Stream, text: bytes, source: Lines | None = None) -> None:
        """Writes whole lines. A bar, of ``source`` or an older one, stays below them."""
        newest = self._newest_bar
        if source is not None and source.bar:
            newest = stream, source
        if newest is not None and not newest[1].bar:
            newest = None
        if self._open is not None and (text or newest is not None):
            text = self._after_open(stream, text, source)
        if self._newest_bar is not None:
            self._put(self._newest_bar[0], _ERASE)
        self._newest_bar = newest
        self._put(stream, text)
        if newest is not None:
            self._put(newest[0], _UNWRAPPED + newest[1].bar + _WRAPPED)

    def _after_open(self, stream: Stream, text: bytes, source: Lines | None) -> bytes:
        """Returns what to write of ``text`` after an unfinished line on the screen, and completes or ends that line."""
        if self._open is None or not self._on_terminal[stream]:
            return text
        (at, lines, seen), self._open = self._open, None
        if source is lines and text.startswith(seen):
            return text[len(seen) :]
        if source is lines and self._in_place[at]:  # a bar, or bytes that decode differently with those that follow
            return _ERASE + text
        self._put(at, b"\n")
        if source is not lines:
            lines.start_new_line()
        return text

    def _put(self, stream: Stream, data: bytes) -> None:
        fd = self._fds[stream]
        rest = memoryview(data)
        while rest and stream not in self._failed:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # a process that shares the descriptor made it non-blocking
                select.select([], [fd], [])
            except OSError as error:
                self._failed.add(stream)
                self._events.put(ScreenFailed(stream, error))


def _now() -> bytes:
    """Returns the time as Horovod writes it: Mon Jan 20 12:00:01 2020."""
    return time.asctime().encode()
