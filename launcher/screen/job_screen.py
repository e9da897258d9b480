"""Shows the workers' output as whole lines on the launcher's stdout and stderr: ``[rank]<stdout>:text``.

`launch` creates a `Screen`; `supervisor` calls it, and goes on at once: a thread of the screen writes, so a terminal
that accepts no output (Ctrl-S, a pager) never delays the supervisor. The screen passes each piece of output on to its
`OutputRecord`s as it came, then splits it into `lines`, which `display` shows.

A carriage return without a newline ends a state of a progress bar. A pipe or a file gets one of these states as a line
every few seconds, and the last one. On a terminal the newest state of each worker is drawn in place. There a worker's
unfinished line, which may be a prompt, is shown once the worker has been quiet for a moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from ..errors import UsageError
from ..plan.hosts import Slot
from ..plan.job_spec import JobSpec
from ..protocol.messages import Event, Output, ScreenDone, ScreenFailed, Stream
from .display import Display, View, Whose
from .lines import HeldTracebacks, Lines, Traceback
from .output_records import OutputRecord

# An unfinished line is shown when its worker has been quiet for this long: more than between two prints of one line.
_QUIET_S = 0.15
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")

Shows = Callable[[int, int | None], bool]
"""Whether a worker's output is shown, by its number and its present rank (None if it has none)."""


class Screen:
    """The launcher's stdout and stderr. A failed write is an event, `ScreenFailed`; the end of all is `ScreenDone`."""

    def __init__(
        self,
        events: SimpleQueue[Event],
        shown: Callable[[Output], object],
        *,
        display: Display | None = None,
        records: Sequence[OutputRecord] = (),
        timestamps: bool = False,
        shows: Shows = lambda _worker, _rank: True,
        rank_of: Callable[[int], int | None] = int,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """``shown`` is called for each output that was shown, or that cannot be shown any more.

        ``display`` is that of this process's stdout and stderr, unless it is given. ``records`` are closed at the end.
        ``rank_of`` maps a worker's number to the rank in its prefix, until `set_rank` is called; None if it has none.
        """
        self._events = events
        self._shown = shown
        self._display = display or Display(post_failures(events))
        self._records = records
        self._stamp: Callable[[], bytes] = _now if timestamps else bytes
        self._shows = shows
        self._rank_of = rank_of
        self._ranks: dict[int, int | None] = {}  # as far as `set_rank` was called
        self._lines: dict[Whose, Lines] = {}
        self._quiet_s = quiet_s
        self._clock = self._display.clock
        self._quiet_at: dict[Whose, float] = {}  # when each unfinished line will be shown
        self._tracebacks = HeldTracebacks(self._clock)
        self._drops = False
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="screen").start()

    @property
    def has_status(self) -> bool:
        """Whether `set_status` shows anything: whether stderr is a terminal that can draw in place."""
        return self._display.in_place["stderr"]

    def show(self, output: Output) -> None:
        self._todo.put(partial(self._show, output))

    def begin(self, worker: int) -> None:
        self._todo.put(lambda: self._keep(lambda record: record.begin(worker)))

    def set_rank(self, worker: int, rank: int | None) -> None:
        """Sets the rank in the prefix of the lines that a worker writes from now on."""
        self._todo.put(partial(self._set_rank, worker, rank))

    def finish(self, worker: int) -> None:
        """Completes the unfinished lines of the worker with this number."""
        self._todo.put(partial(self._finish, worker))

    def say(self, text: str) -> None:
        self._todo.put(partial(self._say, text))

    def show_held(self) -> None:
        """Shows the tracebacks that are held back: what is said from now on comes after them."""
        self._todo.put(partial(self._show_those, self._tracebacks.all))

    def record(self, kind: str, **facts: object) -> None:
        """Writes an event to the file of --log-json, after what was shown before it."""
        self._todo.put(lambda: self._keep(lambda record: record.event(kind, **facts)))

    def set_status(self, *lines: str) -> None:
        """Draws these lines of the launcher below all output, in place of those before; none removes them."""
        self._todo.put(partial(self._display.set_status, lines))

    def set_view(self, view: View) -> None:
        """Draws what this returns below all output and above the bars, for the size that the terminal has then."""
        self._todo.put(partial(self._display.set_view, view))

    def typed(self) -> None:
        """Reports that the user ended a line on the terminal, so that the cursor is at the beginning of the next."""
        self._todo.put(self._display.note_newline)

    def close(self) -> None:
        """Ends the thread once everything is written. Its last event is `ScreenDone`."""
        self._todo.put(None)

    def drop_rest(self) -> None:
        """Shows no more output, also not what waits to be shown: the user waits for the end."""
        self._drops = True

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            task()
        self._display.drop_status()
        self._show_those(self._tracebacks.all)
        for worker, _ in list(self._lines):
            self._finish(worker)
        self._display.erase()
        self._keep(lambda record: record.close())
        self._events.put(ScreenDone())

    def _keep(self, write: Callable[[OutputRecord], str | None]) -> None:
        """Writes to all records, and tells the user of those that cannot be written."""
        for record in self._records:
            if (failure := write(record)) is not None:
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
        all_tasks: list[tuple[float | None, Callable[[], None]]] = [
            (self._display.redraw_at, self._display.draw),
            (self._tracebacks.due_at, partial(self._show_those, self._tracebacks.due)),
            *((at_s, partial(self._show_unfinished, whose)) for whose, at_s in self._quiet_at.items()),
        ]
        return [(at_s, task) for at_s, task in all_tasks if at_s is not None]

    def _set_rank(self, worker: int, rank: int | None) -> None:
        self._ranks[worker] = rank
        self._keep(lambda record: record.event("rank", worker=worker, rank=rank))
        for stream in _STREAMS:
            if lines := self._lines.get((worker, stream)):
                lines.prefix = self._prefix(worker, stream)

    def _show(self, output: Output) -> None:
        worker, stream, rank = output.worker, output.stream, self._rank_now(output.worker)
        self._keep(lambda record: record.output(output, rank))
        if self._drops or not self._shows(worker, rank):
            self._shown(output)
            return
        held = self._tracebacks
        for part in held.feed(worker, rank, output.data) if stream == "stderr" else held.let_go(worker):
            self._show_stderr(worker, part)
        if stream == "stdout":
            self._show_bytes((worker, stream), output.data)
        self._shown(output)

    def _show_bytes(self, whose: Whose, data: bytes) -> None:
        worker, stream = whose
        if whose not in self._lines:
            self._lines[whose] = self._display.new_lines(stream, self._prefix(worker, stream), self._stamp)
        lines = self._lines[whose]
        self._display.feed(whose, data, lines)
        self._quiet_at.pop(whose, None)
        if self._display.on_terminal[stream] and lines.is_unfinished:
            self._quiet_at[whose] = self._clock() + self._quiet_s

    def _show_those(self, which: Callable[[], Iterable[tuple[int, bytes | Traceback]]]) -> None:
        for worker, what in which():
            self._show_stderr(worker, what)

    def _show_stderr(self, worker: int, what: bytes | Traceback) -> None:
        if isinstance(what, bytes):
            self._show_bytes((worker, "stderr"), what)
        else:
            self._display.write_traceback(what, self._stamp)

    def _show_unfinished(self, whose: Whose) -> None:
        del self._quiet_at[whose]
        self._display.show_unfinished(whose, self._lines[whose])

    def _finish(self, worker: int) -> None:
        self._keep(lambda record: record.finish(worker))
        for part in self._tracebacks.end(worker):
            self._show_stderr(worker, part)
        for stream in _STREAMS:
            self._quiet_at.pop((worker, stream), None)
            if lines := self._lines.pop((worker, stream), None):
                self._display.finish((worker, stream), lines)
        self._ranks.pop(worker, None)

    def _say(self, text: str) -> None:
        self._keep(lambda record: record.event("say", text=text))
        self._display.say(text)

    def _rank_now(self, worker: int) -> int | None:
        return self._ranks[worker] if worker in self._ranks else self._rank_of(worker)

    def _prefix(self, worker: int, stream: Stream) -> bytes:
        rank = self._rank_now(worker)
        name = f"worker {worker}" if rank is None else str(rank)
        return self._display.prefix(name, worker if rank is None else rank, stream)


def shown_by_slots(job: JobSpec, slots: Sequence[Slot]) -> Shows:
    """Returns whose output is shown in a job whose ranks stay the same; raises `UsageError` for an unknown rank.

    A job that was restarted may have fewer ranks than at first.
    """
    for flag, ranks, known in (
        ("--show-ranks", job.show_ranks, {slot.number: slot.rank for slot in slots}),
        ("--local-ranks-filter", job.show_local_ranks, {slot.number: slot.local_rank for slot in slots}),
    ):
        if ranks is not None:
            strangers = ranks.difference(known.values())
            if strangers and not job.attempt:
                raise UsageError(f"{flag}: there is no rank {min(strangers)}: they are 0 to {max(known.values())}")
            shown = frozenset(number for number, rank in known.items() if rank in ranks)
            return lambda worker, _: worker in shown
    return lambda _worker, _rank: True


def shown_by_rank(job: JobSpec) -> Shows:
    """Returns whose output is shown in an elastic job.

    A worker without a rank is shown: it may be about to fail before it has one.
    """
    ranks = job.show_ranks
    return lambda _, rank: ranks is None or rank is None or rank in ranks


def post_failures(events: SimpleQueue[Event]) -> Callable[[Stream, OSError], None]:
    return lambda stream, error: events.put(ScreenFailed(stream, error))


def _now() -> bytes:
    """Returns the time as Horovod writes it: Mon Jan 20 12:00:01 2020."""
    return time.asctime().encode()
