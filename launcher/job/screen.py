"""Shows what the workers write, as whole lines on the launcher's stdout and stderr: ``[rank]<stdout>:text``.

Bytes pass as they are, but to a terminal, which must not take them for commands (see `terminal_text`). A line that its
worker never finished is finished when the worker ends. A carriage return alone, as in a progress bar, ends a line
too; where it goes to a terminal, the newest such line is drawn in place below all others, so that a bar moves as it
would without the launcher. Of several bars the newest is seen. Files that a user wants to have of each worker get
the bytes before they become lines.

A terminal also shows an unfinished line once its worker has been quiet for a moment: it may be a prompt. What follows
it continues it there, unless something else was shown or typed in between: then that begins a line of its own. A pipe
or a file gets whole lines only.

A thread of its own writes, so that a screen that stands still (Ctrl-S, a pager) never holds up what is
decided.
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

from ..system.terminal_text import visible, visible_bytes
from ..wire.messages import Event, Output, ScreenDone, ScreenFailed, Stream
from .output_files import OutputFiles

MAX_LINE_BYTES = 1 << 20  # a longer one is shown in pieces
# How long a worker writes nothing before its unfinished line is shown; what it prints in pieces comes faster.
_QUIET_S = 0.15

# A bar wider than the terminal is cut there, or its second row would stay when it is erased.
_ERASE, _UNWRAPPED, _WRAPPED = b"\r\x1b[K", b"\x1b[?7l", b"\x1b[?7h"
_UNCOLOURED = b"\x1b[0m"

_PIECE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r)")


@dataclass
class Lines:
    """Makes whole lines of one worker's bytes; ``bar`` is the one in progress, if bars are drawn in place.

    ``stamp`` gives what goes before the prefix of the lines that are completed now, ``clean`` what is shown of text.
    """

    prefix: bytes
    in_place: bool
    stamp: Callable[[], bytes] = bytes
    clean: Callable[[bytes], bytes] = bytes
    bar: bytes = b""
    _rest: bytearray = field(default_factory=bytearray)
    _begin: bytes = b""  # what the unfinished line begins with on the screen, if it is shown there
    _shown_bytes: int = 0  # of the unfinished line
    _is_drawing: bool = False  # the unfinished line follows a carriage return, as a bar does

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes, each with the prefix."""
        if b"\r" in data or b"\r" in self._rest:
            return self._with_bars(data)
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            self._rest += data
            return self.finish() if len(self._rest) > MAX_LINE_BYTES else b""
        # The flood goes this way: a search and a replace, no loop.
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
                break  # the next byte may be its \n
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
        """Whether there is a line to `show_unfinished`; a bar is none."""
        return bool(self._rest) and not (self.bar or self._is_drawing or b"\r" in self._rest)

    def show_unfinished(self) -> bytes:
        """The unfinished line as far as it has come; the whole of it will begin with the same bytes."""
        self._begin = self._begin or self.stamp() + self.prefix
        self._shown_bytes = len(self._rest)
        return self._begin + self.clean(bytes(self._rest))

    def let_go(self) -> None:
        """Something else stands on the screen below what was shown of the unfinished line: the rest is a new line."""
        self._renew(bytes(self._rest[self._shown_bytes :]))

    def _renew(self, rest: bytes) -> None:
        """``rest`` is the unfinished line now, and nothing of it has been shown."""
        self._rest, self._begin, self._shown_bytes = bytearray(rest), b"", 0

    def finish(self) -> bytes:
        """The unfinished last line, finished."""
        rest = self.clean(bytes(self._rest).rstrip(b"\r"))
        line = (self._begin or self.stamp() + self.prefix) + rest if rest else self.bar
        self._renew(b"")
        self.bar = b""
        return line + b"\n" if line else b""


class Screen:
    """The launcher's stdout and stderr. A failure to write is an event; so is the end, `ScreenDone`."""

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
        rank_of: Callable[[int], int] = int,
        quiet_s: float = _QUIET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown`` is told of each output that was, or that nobody can be shown any more.

        ``timestamps``: each line begins with when that was. ``files`` are closed at the end. ``rank_of`` gives the
        rank that is shown for a worker's number. ``quiet_s``: how long a worker has written nothing when a terminal
        shows its unfinished line.
        """
        self._events = events
        self._fds: dict[Stream, int] = {"stdout": stdout, "stderr": stderr}
        self._on_terminal = {s: os.isatty(fd) for s, fd in self._fds.items()}
        self._in_place = {s: self._on_terminal[s] and environ.get("TERM") != "dumb" for s, fd in self._fds.items()}
        self._coloured = not environ.get("NO_COLOR")
        self._stamp: Callable[[], bytes] = _now if timestamps else bytes
        self._files = files
        self._rank_of = rank_of
        self._lines: dict[tuple[int, Stream], Lines] = {}
        self._newest_bar: tuple[Stream, Lines] | None = None  # the one that stands on the terminal
        # The unfinished line that the cursor stands in, and what is seen of it; there is no bar below it.
        self._open: tuple[Stream, Lines, bytes] | None = None
        self._quiet_s = quiet_s
        self._clock = clock
        self._quiet_at: dict[tuple[int, Stream], float] = {}  # when an unfinished line is to be shown
        self._failed: set[Stream] = set()
        self._shown = shown
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="screen").start()

    def show(self, output: Output) -> None:
        self._todo.put(partial(self._show, output))

    def finish(self, worker: int) -> None:
        """Complete what the worker with this number left unfinished."""
        self._todo.put(partial(self._finish, worker))

    def say(self, text: str) -> None:
        """A word of the launcher's own."""
        self._todo.put(partial(self._say, text))

    def typed(self) -> None:
        """Somebody has ended a line on the terminal, which shows that: the cursor stands at the begin of a new one."""
        self._todo.put(self._typed)

    def close(self) -> None:
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
            # Looked at first: in a flood of others' output the queue may never be empty.
            if left <= 0:
                return partial(self._show_unfinished, first)
            with contextlib.suppress(Empty):
                return self._todo.get(timeout=left)
        return self._todo.get()

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
            prefix = self._prefix(self._rank_of(output.worker), output.stream)
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
            self._open[1].let_go()
            self._open = None

    def _finish(self, worker: int) -> None:
        for stream in self._fds:
            self._quiet_at.pop((worker, stream), None)
            if lines := self._lines.pop((worker, stream), None):
                self._write(stream, lines.finish(), lines)

    def _say(self, text: str) -> None:
        # A ^C may stand there, and a colour that a worker never ended.
        over = _UNCOLOURED + _ERASE if self._in_place["stderr"] else b""
        text = visible(text) if self._on_terminal["stderr"] else text
        self._write("stderr", over + f"hvdlite-run: {text}\n".encode(errors="surrogateescape"))

    def _prefix(self, rank: int, stream: Stream) -> bytes:
        prefix = f"[{rank}]<{stream}>:"
        if self._in_place[stream] and self._coloured:
            prefix = f"\x1b[{31 + rank % 6}m{prefix}\x1b[0m"
        return prefix.encode()

    def _write(self, stream: Stream, text: bytes, source: Lines | None = None) -> None:
        """Write whole lines; if a bar is in progress, ``source``'s or an older one, it stays below them."""
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
        """What of ``text`` is to be written where an unfinished line may be open, which ends here or is continued."""
        if self._open is None or not self._on_terminal[stream]:
            return text
        (at, lines, seen), self._open = self._open, None
        if source is lines and text.startswith(seen):
            return text[len(seen) :]
        if source is lines and self._in_place[at]:  # a bar, or bytes that read otherwise now that more has come
            return _ERASE + text
        self._put(at, b"\n")
        if source is not lines:
            lines.let_go()
        return text

    def _put(self, stream: Stream, data: bytes) -> None:
        fd = self._fds[stream]
        rest = memoryview(data)
        while rest and stream not in self._failed:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # whoever shares it with us made it so
                select.select([], [fd], [])
            except OSError as error:
                self._failed.add(stream)
                self._events.put(ScreenFailed(stream, error))


def _now() -> bytes:
    """As Horovod writes it: Mon Jan 20 12:00:01 2020."""
    return time.asctime().encode()
