"""Shows the workers' output as whole lines on the launcher's stdout and stderr: ``[rank]<stdout>:text``.

`launch` creates a `Screen`; `supervisor` calls it, and goes on at once: a thread of the screen writes, so a terminal
that accepts no output (Ctrl-S, a pager) never delays the supervisor. The screen passes each piece of output on to
`output_files` as it came, then splits it into `lines`.

A pipe or a file gets whole lines only, byte by byte as they were written. On a terminal, control sequences are made
visible (see `terminal_text`). When a worker ends in the middle of a line, a newline is added.

A carriage return without a newline ends a state of a progress bar. A pipe or a file gets one of these states as a line
every few seconds, and the last one. On a terminal the newest state of each worker is drawn in the `footer`, below all
other lines, each time in the same place.

A worker's unfinished line may be a prompt: on a terminal it is shown once the worker has been quiet for a moment. What
the worker writes next continues this line, unless another worker's output has been shown since, or the user has typed
an answer (`launch` reports that): then it becomes a line of its own. Under the live view of ``--watch`` it is
drawn in the footer instead, until it is complete.

A traceback that several ranks write is shown once, by `held_tracebacks`. If a message at the end of the job quotes one
that can still be seen on the terminal, it says where that is instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from ..system.terminal_text import visible, visible_bytes
from ..wire.messages import Event, Output, ScreenDone, ScreenFailed, Stream
from ..workers.failure_message import quotes
from .footer import ERASE, Footer
from .held_tracebacks import HeldTracebacks, Traceback, TracebacksInView
from .json_log import JsonLog
from .lines import Lines
from .output_files import OutputFiles

# An unfinished line is shown when its worker has been quiet for this long: more than between two prints of one line.
_QUIET_S = 0.15
# How often the footer is drawn at most, while there is output without a pause.
_REDRAW_S = 0.05
_UNCOLOURED = b"\x1b[0m"

View = Callable[[int, int], Sequence[str]]
"""Returns lines for so many columns, and at most so many lines."""


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
        shows: Callable[[int, int | None], bool] = lambda _worker, _rank: True,
        files: OutputFiles | None = None,
        json_log: JsonLog | None = None,
        rank_of: Callable[[int], int | None] = int,
        quiet_s: float = _QUIET_S,
        redraw_s: float = _REDRAW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``shown`` is called for each output that was shown, or that cannot be shown any more.

        ``timestamps``: each line begins with the time. ``shows`` returns whether the output of a worker is shown, by
        its number and its present rank. ``files`` and ``json_log`` are closed at the end. ``rank_of`` maps a worker's
        number to the rank in its prefix, until `set_rank` is called; None if it has none. ``quiet_s``: an unfinished
        line is shown on a terminal when its worker was quiet for so long. ``redraw_s``: see `Footer`.
        """
        self._events = events
        self._fds: dict[Stream, int] = {"stdout": stdout, "stderr": stderr}
        self._on_terminal = {s: os.isatty(fd) for s, fd in self._fds.items()}
        self._in_place = {stream: draws_in_place(fd, environ) for stream, fd in self._fds.items()}
        self._coloured = not environ.get("NO_COLOR")
        self._stamp: Callable[[], bytes] = _now if timestamps else bytes
        self._shows = shows
        self._files = files
        self._json_log = json_log
        self._rank_of = rank_of
        self._ranks: dict[int, int | None] = {}  # as far as `set_rank` was called
        self._lines: dict[tuple[int, Stream], Lines] = {}
        self._bars: dict[tuple[int, Stream], Lines] = {}  # those that have a bar in place
        self._status: Sequence[bytes] = ()
        self._view: View | None = None
        self._view_lines: tuple[View | None, tuple[int, int], Sequence[bytes]] = (None, (0, 0), ())
        self._unfinished: dict[tuple[int, Stream], bytes] = {}  # those that are drawn in the footer
        # The unfinished line on the terminal that the cursor is in, and its bytes there. Then no bar is drawn.
        self._open: tuple[Stream, Lines, bytes] | None = None
        self._quiet_s = quiet_s
        self._clock = clock
        self._quiet_at: dict[tuple[int, Stream], float] = {}  # when each unfinished line will be shown
        self._tracebacks = HeldTracebacks(clock)
        self._in_view = TracebacksInView()
        self._failed: set[Stream] = set()
        self._footers = self._make_footers(redraw_s)
        self._shown = shown
        self._drops = False
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="screen").start()

    def _make_footers(self, redraw_s: float) -> dict[Stream, Footer]:
        """Returns the footer of each stream on which lines are drawn in place. Streams of one terminal share it."""
        footers: dict[Stream, Footer] = {}
        devices: dict[int, Footer] = {}
        for stream, fd in self._fds.items():
            if self._in_place[stream]:
                put, size = partial(self._put, stream), partial(terminal_size, fd)
                own = Footer(put, size, clock=self._clock, redraw_s=redraw_s)
                footers[stream] = devices.setdefault(os.fstat(fd).st_rdev, own)
        return footers

    @property
    def has_status(self) -> bool:
        """Whether `set_status` shows anything: whether stderr is a terminal that can draw in place."""
        return self._in_place["stderr"]

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

    def show_held(self) -> None:
        """Shows the tracebacks that are held back: what is said from now on comes after them."""
        self._todo.put(partial(self._show_those, self._tracebacks.all))

    def record(self, kind: str, **facts: object) -> None:
        """Writes an event to the file of --log-json, after what was shown before it."""
        if self._json_log is not None:
            self._todo.put(partial(self._log, lambda log: log.event(kind, **facts)))

    def set_status(self, *lines: str) -> None:
        """Draws these lines of the launcher below all output, in place of those before; none removes them."""
        self._todo.put(partial(self._set_status, lines))

    def set_view(self, view: View) -> None:
        """Draws what this returns below all output and above the bars, for the size that the terminal has then."""
        self._todo.put(partial(self._set_view, view))

    def typed(self) -> None:
        """Reports that the user ended a line on the terminal, so that the cursor is at the beginning of the next."""
        self._todo.put(self._typed)

    def close(self) -> None:
        """Ends the thread once everything is written. Its last event is `ScreenDone`."""
        self._todo.put(None)

    def drop_rest(self) -> None:
        """Shows no more output, also not what waits to be shown: the user waits for the end."""
        self._drops = True

    # ------------------------------------------------------- in the own thread

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            task()
        self._view, self._status = None, ()
        self._show_those(self._tracebacks.all)
        for worker, _ in list(self._lines):
            self._finish(worker)
        for footer in self._footers.values():
            footer.erase()
        self._keep(lambda files: files.close())
        self._log(lambda log: log.close())
        self._events.put(ScreenDone())

    def _keep(self, write: Callable[[OutputFiles], str | None]) -> None:
        """Does something with the files of --output-filename, if there are such; tells the user if that fails."""
        if self._files is not None and (failure := write(self._files)) is not None:
            self._say(failure)

    def _log(self, write: Callable[[JsonLog], str | None]) -> None:
        """Writes something to the file of --log-json, if there is one; tells the user once if that fails."""
        if self._json_log is not None and (failure := write(self._json_log)) is not None:
            self._json_log = None
            self._say(failure)

    def _next_task(self) -> Callable[[], None] | None:
        while due := self._due():
            at_s, task = min(due, key=lambda each: each[0])
            left = at_s - self._clock()
            # Checked first: while other workers write without a pause, the queue is never empty.
            if left <= 0:
                return task
            with contextlib.suppress(Empty):
                return self._todo.get(timeout=left)
        return self._todo.get()

    def _due(self) -> list[tuple[float, Callable[[], None]]]:
        """Returns what is to be done without being asked, and when."""
        due: list[tuple[float, Callable[[], None]]] = [
            (at_s, partial(self._show_unfinished, whose)) for whose, at_s in self._quiet_at.items()
        ]
        if (
            redraw_at := min((f.due_at for f in self._footers.values() if f.due_at is not None), default=None)
        ) is not None:
            due.append((redraw_at, self._draw))
        if (let_go_at := self._tracebacks.due_at) is not None:
            due.append((let_go_at, partial(self._show_those, self._tracebacks.due)))
        return due

    def _begin(self, worker: int) -> None:
        self._keep(lambda files: files.add(worker))

    def _set_rank(self, worker: int, rank: int | None) -> None:
        self._ranks[worker] = rank
        self._log(lambda log: log.event("rank", worker=worker, rank=rank))
        for stream in self._fds:
            if lines := self._lines.get((worker, stream)):
                lines.prefix = self._prefix(worker, stream)

    def _show(self, output: Output) -> None:
        self._keep(lambda files: files.write(output))
        self._log(lambda log: log.output(output, self._rank_now(output.worker)))
        if self._drops or not self._shows(output.worker, self._rank_now(output.worker)):
            self._shown(output)
            return
        worker, stream = output.worker, output.stream
        if stream == "stderr":
            for part in self._tracebacks.feed(worker, self._rank_now(worker), output.data):
                self._show_stderr(worker, part)
        else:
            for part in self._tracebacks.let_go(worker):
                self._show_stderr(worker, part)
            self._show_bytes(worker, stream, output.data)
        self._shown(output)

    def _show_bytes(self, worker: int, stream: Stream, data: bytes) -> None:
        lines = self._lines.get((worker, stream))
        if lines is None:
            lines = self._lines[worker, stream] = self._new_lines(stream, self._prefix(worker, stream))
        text = lines.feed(data)
        self._unfinished.pop((worker, stream), None)
        if lines.bar and lines.in_place:
            self._bars[worker, stream] = lines
        self._write(stream, text, lines)
        self._quiet_at.pop((worker, stream), None)
        if self._on_terminal[stream] and lines.is_unfinished:
            self._quiet_at[worker, stream] = self._clock() + self._quiet_s

    def _new_lines(self, stream: Stream, prefix: bytes) -> Lines:
        clean = visible_bytes if self._on_terminal[stream] else bytes
        return Lines(prefix, self._in_place[stream], self._stamp, clean, self._clock)

    def _show_those(self, which: Callable[[], Iterable[tuple[int, bytes | Traceback]]]) -> None:
        for worker, what in which():
            self._show_stderr(worker, what)

    def _show_stderr(self, worker: int, what: bytes | Traceback) -> None:
        if isinstance(what, bytes):
            self._show_bytes(worker, "stderr", what)
            return
        self._in_view.add(what)
        lines = self._new_lines("stderr", self._prefix_of(what.name, what.rank, "stderr"))
        self._write("stderr", lines.feed(what.text) + lines.finish())

    def _show_unfinished(self, whose: tuple[int, Stream]) -> None:
        del self._quiet_at[whose]
        stream, lines = whose[1], self._lines[whose]
        text = lines.show_unfinished()
        if self._view is not None and stream in self._footers:
            self._unfinished[whose] = text
            self._draw()
            return
        self._erase(stream)
        self._put(stream, self._after_open(stream, text, lines))
        self._open = stream, lines, text

    def _typed(self) -> None:
        for footer in dict.fromkeys(self._footers.values()):
            footer.note_newline()
        if self._unfinished:  # what was typed stands after the newest one
            whose = next(reversed(self._unfinished))
            self._lines[whose].start_new_line()
            self._write(whose[1], self._unfinished.pop(whose) + b"\n")
        if self._open is not None:
            self._open[1].start_new_line()
            self._open = None

    def _finish(self, worker: int) -> None:
        self._keep(lambda files: files.finish(worker))
        self._log(lambda log: log.finish(worker, self._rank_now(worker)))
        for part in self._tracebacks.end(worker):
            self._show_stderr(worker, part)
        for stream in self._fds:
            self._quiet_at.pop((worker, stream), None)
            self._unfinished.pop((worker, stream), None)
            if lines := self._lines.pop((worker, stream), None):
                self._write(stream, lines.finish(), lines)
        self._ranks.pop(worker, None)

    def _say(self, text: str) -> None:
        # The terminal may show a ^C there, or still have the colour of a worker's output.
        self._log(lambda log: log.event("say", text=text))
        self._show_those(lambda: self._tracebacks.quoted(lambda written: quotes(text, written)))
        if self._on_terminal["stderr"]:
            text = self._in_view.without_quote(text, terminal_size(self._fds["stderr"])[1])
        over = _UNCOLOURED + ERASE if self._in_place["stderr"] else b""
        text = visible(text) if self._on_terminal["stderr"] else text
        self._write("stderr", over + f"hvdlite-run: {text}\n".encode(errors="surrogateescape"))

    def _rank_now(self, worker: int) -> int | None:
        return self._ranks[worker] if worker in self._ranks else self._rank_of(worker)

    def _prefix(self, worker: int, stream: Stream) -> bytes:
        rank = self._rank_now(worker)
        name = f"worker {worker}" if rank is None else str(rank)
        return self._prefix_of(name, worker if rank is None else rank, stream)

    def _prefix_of(self, name: str, number: int, stream: Stream) -> bytes:
        prefix = f"[{name}]<{stream}>:"
        if self._in_place[stream] and self._coloured:
            prefix = f"\x1b[{31 + number % 6}m{prefix}\x1b[0m"
        return prefix.encode()

    def _set_status(self, lines: Sequence[str]) -> None:
        self._status = [visible(line).encode(errors="surrogateescape") for line in lines]
        self._draw()

    def _set_view(self, view: View) -> None:
        self._view = view
        self._draw()

    def _write(self, stream: Stream, text: bytes, source: Lines | None = None) -> None:
        """Writes whole lines, above the footer."""
        if self._open is not None and (text or (source is not None and source.bar and source.in_place)):
            text = self._after_open(stream, text, source)
        if text and self._on_terminal[stream]:
            self._in_view.pass_lines(text, terminal_size(self._fds[stream])[0])
        if text and (footer := self._footers.get(stream)):
            footer.write(text)
        elif text:
            self._put(stream, text)
        self._draw()

    def _erase(self, stream: Stream) -> None:
        if footer := self._footers.get(stream):
            footer.erase()

    def _draw(self) -> None:
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
            bars += [text for (_, stream), text in self._unfinished.items() if self._footers[stream] is footer]
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
        if self._open is None or not self._on_terminal[stream]:
            return text
        (at, lines, seen), self._open = self._open, None
        if source is lines and text.startswith(seen):
            return text[len(seen) :]
        if source is lines and self._in_place[at]:  # a bar, or bytes that decode differently with those that follow
            return ERASE + text
        self._put(at, b"\n")
        if source is not lines:
            lines.start_new_line()
        return text

    def _put(self, stream: Stream, data: bytes) -> None:
        fd = self._fds[stream]
        if stream in self._failed:
            return
        try:
            put_all(fd, data)
        except OSError as error:
            self._failed.add(stream)
            self._events.put(ScreenFailed(stream, error))


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
    """Writes all of it; raises OSError."""
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


def _now() -> bytes:
    """Returns the time as Horovod writes it: Mon Jan 20 12:00:01 2020."""
    return time.asctime().encode()
