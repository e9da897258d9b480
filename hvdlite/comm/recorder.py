"""
Records one rank's timeline: spans of time in rows, written to a file while training runs.

    Recorder.note ── queue ── the writer's thread, after each step ── this rank's part of the timeline

It writes during training, and not at the end, so that the part of a rank that is killed shows what the rank did.
`control.executor` and `buckets.step_trace` note the spans; `timeline` merges the parts of all ranks into one file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from .. import forks
from ..log import log

MOST_EVENTS = 1_000_000
# The longest that events of no step wait to be written.
_FLUSH_S = 0.5
_SETTLE_S = 5.0


class Row(NamedTuple):
    """A row of the timeline, in which spans follow or contain each other. Rows are sorted by number."""

    number: int
    name: str


# The controller's thread runs these operations, which all ranks start by name.
OPERATIONS = Row(0, "operations")


class GpuClock:
    """Reads the host's clock when a GPU reaches points of its stream: a thread waits for each of them."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def see(self, began: Any, ended: Any, then: Callable[[int, int], object]) -> None:
        """Has the clock's thread call ``then`` with the times (ns) at which the GPU reached both points.

        Each is a `torch.cuda.Event` that has been recorded, with ``blocking=True`` so that waiting uses no CPU.
        """
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hvdlite-gpu-watch", daemon=True)
                self._thread.start()
        self._jobs.put(lambda: then(_reached_ns(began), _reached_ns(ended)))

    def settle(self) -> None:
        """Wait, for at most a few seconds, until ``then`` has been called for all points passed to `see` so far."""
        if self._thread is not None:
            settled = threading.Event()
            self._jobs.put(settled.set)
            settled.wait(_SETTLE_S)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


def _reached_ns(point: Any) -> int:
    point.synchronize()
    return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Recording:
    """One rank's part of the timeline that will be written at ``path``, a file or a directory that ends in a slash.

    ``process`` is the rank's name there. Times are on a common clock, which is rank 0's: it is 0 when this process's
    clock reads ``zero_ns``, and this process's clock was ``ahead_ns`` ahead of it at the start. ``since_ns`` is the
    start of the recording, on this process's clock.
    """

    path: str
    file: IO[bytes]
    rank: int
    process: str
    zero_ns: int
    ahead_ns: int
    since_ns: int


class Recorder:
    """Notes spans while it is on. Every method is thread-safe, and spans may be noted at any time."""

    def __init__(self) -> None:
        self.is_on = False
        self._since_ns = 0
        self.recording: Recording | None = None
        self.gpu = GpuClock()
        self._families = itertools.count(1)
        self._waits = itertools.count(1)
        self._writer: _Writer | None = None
        self._left = 0
        forks.when_forked(self)

    def leave_to_parent(self) -> None:
        # A copy of its writer would write to the same file.
        self.is_on, self._writer, self.recording = False, None, None

    def next_family(self) -> int:
        """Returns a number not used before in this recorder, for rows that belong together."""
        return next(self._families)

    def begin(self, recording: Recording) -> None:
        """Write what is noted from now on to the recording's file, which the recorder owns until `forget`."""
        assert self.recording is None, "who begins has asked before"
        self.recording = recording
        self._left = MOST_EVENTS
        self._writer = _Writer(recording)
        self._since_ns = recording.since_ns
        self.is_on = True

    def end(self) -> None:
        """Stop noting, and write all that was noted to the file. Does nothing if already ended."""
        self.gpu.settle()
        self.is_on = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.end()

    def forget(self) -> None:
        """Call `end`, close the file, and reset the recorder for another recording."""
        self.end()
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.file.close()

    def note(self, row: Row, name: str, start_ns: int, stop_ns: int, detail: dict[str, Any] | None = None) -> None:
        """Note a span, by `time.monotonic_ns`; does nothing when off, or when the part is full.

        ``detail`` must be JSON. A span that began before the recording is cut to begin with it.
        """
        self._put(("X", row, name, max(start_ns, self._since_ns), stop_ns, detail))

    def write_soon(self) -> None:
        """Wake the writer at the end of a step, without waiting for it."""
        writer = self._writer
        if writer is not None:
            writer.wake()

    def note_waiting(self, name: str, start_ns: int, stop_ns: int) -> None:
        """Note the time that an operation waited before it ran; such spans may overlap, in as many rows as needed."""
        self._put(("b", OPERATIONS, name, max(start_ns, self._since_ns), stop_ns, next(self._waits)))

    @contextlib.contextmanager
    def span(self, row: Row, name: str, detail: dict[str, Any] | None = None) -> Iterator[None]:
        """Note the time that the block takes, even if it raises; does nothing when off."""
        if not self.is_on:
            yield
            return
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.note(row, name, start_ns, time.monotonic_ns(), detail)

    def _put(self, event: _Event) -> None:
        writer = self._writer
        if not self.is_on or writer is None:
            return
        if writer.has_failed:
            self.is_on = False
            return
        self._left -= 1
        if self._left < 0:
            self.is_on = False
            log.warning(
                "the timeline is full: it ends here, after %d events of this rank; record fewer steps with "
                "hvd.start_timeline() and hvd.stop_timeline()",
                MOST_EVENTS,
            )
            return
        writer.events.append(event)


# kind, row, name, start_ns, stop_ns, and the span's detail or the number of a waiting span
_Event = tuple[str, Row, str, int, int, Any]


class _Writer:
    """The file of one recording, and the thread that writes events to it."""

    def __init__(self, recording: Recording) -> None:
        self.events: deque[_Event] = deque()
        self.has_failed = False
        self._to = recording
        self._named: set[Row] = set()
        self._waking = threading.Event()
        self._is_ending = False
        self._write(self._introduce("process", recording.process, recording.rank), before="[\n")
        self._thread = threading.Thread(target=self._run, name="hvdlite-timeline", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._waking.set()

    def end(self) -> None:
        self._is_ending = True
        self._waking.set()
        self._thread.join()
        self._flush()

    def _run(self) -> None:
        while not self._is_ending:
            self._waking.wait(_FLUSH_S)
            # Clear before the flush: an event noted after this point wakes the thread again.
            self._waking.clear()
            self._flush()

    def _flush(self) -> None:
        lines: list[str] = []
        while self.events:
            kind, row, name, start_ns, stop_ns, extra = self.events.popleft()
            if row not in self._named:
                self._named.add(row)
                lines += self._introduce("thread", row.name, row.number, tid=row.number)
            lines += self._lines(kind, row, name, start_ns, stop_ns, extra)
        if lines:
            self._write(lines)

    def _lines(self, kind: str, row: Row, name: str, start_ns: int, stop_ns: int, extra: Any) -> list[str]:
        # Built by hand: json.dumps of the whole line would take three times as long.
        rank, zero_ns = self._to.rank, self._to.zero_ns
        start, stop = (start_ns - zero_ns) / 1000, (stop_ns - zero_ns) / 1000
        common = f'"pid":{rank},"tid":{row.number},"name":{json.dumps(name)}'
        if kind == "X":
            detail = "" if extra is None else f',"args":{json.dumps(extra)}'
            # Readers of torch.profiler's traces skip spans without a category; this is that of `record_function`.
            return [f'{{"ph":"X","cat":"user_annotation",{common},"ts":{start:.3f},"dur":{stop - start:.3f}{detail}}}']
        common += f',"cat":"waiting","id":"{rank}.{extra}"'
        return [f'{{"ph":"b",{common},"ts":{start:.3f}}}', f'{{"ph":"e",{common},"ts":{stop:.3f}}}']

    def _introduce(self, what: str, name: str, place: int, **thread: int) -> list[str]:
        about = {"ph": "M", "pid": self._to.rank}
        return [
            json.dumps({**about, "name": f"{what}_name", **thread, "args": {"name": name}}),
            json.dumps({**about, "name": f"{what}_sort_index", **thread, "args": {"sort_index": place}}),
        ]

    def _write(self, lines: list[str], before: str = "") -> None:
        # Every line ends with a comma, and no bracket closes the file: so the file is readable wherever it is cut off.
        left = memoryview((before + "".join(f"{line},\n" for line in lines)).encode())
        try:
            while left and not self.has_failed:
                # The file is unbuffered, and a nearly full disk may take only a part of the data.
                left = left[self._to.file.write(left) :]
        except OSError as error:
            self.has_failed = True
            log.warning(
                "the timeline %s gets no more events of this rank: its part cannot be written: %s", self._to.path, error
            )
