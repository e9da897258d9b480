"""``--log-json``: what a job's workers write and what happens to it, as one JSON object per line of a file.

    the screen's thread: output, messages; `LogEvents`: what happens ──► JsonLog ──► FILE

Each object has ``time`` (Unix time) and ``kind``: "output" with ``worker``, ``rank``, ``stream`` and ``text``, "say"
with the ``text`` of a message of hvdlite-run, or an event. ``text`` has no line end. Bytes that are not UTF-8 are in it
as ``\\udc80`` to ``\\udcff``, as Python's "surrogateescape" decodes them, so the worker's bytes can be had back. Of a
progress bar each line has the last state.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable

from hvdlite_wire.safe_paths import write_all, write_file

from ..errors import UsageError, why_not_written
from ..protocol.messages import (
    Event,
    Exited,
    InitDone,
    InitStarted,
    Interrupted,
    Lost,
    Output,
    Stalled,
    Started,
    Stream,
)
from ..system.process_tree import shell_code, signal_name
from ..workers.observer import Observer
from ..workers.roster import Roster
from .lines import MAX_LINE_BYTES
from .output_files import OutputRecord


class JsonLog(OutputRecord):
    """The file. All calls come from the screen's thread. A failure is told once, and ends it; the job goes on."""

    def __init__(self, path: str, *, is_continued: bool = False, clock: Callable[[], float] = time.time) -> None:
        """Raises `UsageError` if the file cannot be created.

        ``is_continued``: an attempt of the same job before this one has created it.
        """
        self._path = path
        self._clock = clock
        self._rest: dict[tuple[int, Stream], tuple[int | None, bytes]] = {}  # unfinished lines, with the rank
        try:
            self._fd: int | None = _open_again(path) if is_continued else write_file(path)
            # So that two jobs with one file do not overwrite each other's lines.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_APPEND)
        except OSError as error:
            raise UsageError(f"--log-json: cannot write {path}: {why_not_written(error)}") from error

    def output(self, output: Output, rank: int | None) -> str | None:
        """Writes the lines that this output completes."""
        if self._fd is None:
            return None
        whose = output.worker, output.stream
        data = self._rest.pop(whose, (None, b""))[1] + output.data
        *lines, rest = data.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            self._rest[whose] = rank, rest
        return self._write_lines(output.worker, rank, output.stream, lines)

    def finish(self, worker: int, rank: int | None) -> str | None:
        """Writes the unfinished lines of a worker that has ended."""
        failure = None
        for of, stream in [whose for whose in self._rest if whose[0] == worker]:
            failure = self._write_lines(of, rank, stream, [self._rest.pop((of, stream))[1]]) or failure
        return failure

    def event(self, kind: str, **facts: object) -> str | None:
        """Writes something else that has happened, after the last line of a worker that has ended."""
        failure = None
        if kind == "exited" and isinstance(worker := facts["worker"], int):
            rank = facts["rank"]
            failure = self.finish(worker, rank if isinstance(rank, int) else None)
        return self._write([{"time": self._now(), "kind": kind, **facts}]) or failure

    def close(self) -> str | None:
        failure = None
        # Of workers whose host was lost, whose end nobody has seen.
        for (worker, stream), (rank, rest) in list(self._rest.items()):
            failure = self._write_lines(worker, rank, stream, [rest]) or failure
        if self._fd is not None:
            try:
                os.close(self._fd)
            except OSError as error:  # a file system on a network may be full only now
                failure = f"--log-json {self._path}: its last lines may be missing: {why_not_written(error)}"
            self._fd = None
        return failure

    def _write_lines(self, worker: int, rank: int | None, stream: Stream, lines: list[bytes]) -> str | None:
        now = self._now()
        return self._write(
            [
                {
                    "time": now,
                    "kind": "output",
                    "worker": worker,
                    "rank": rank,
                    "stream": stream,
                    "text": _last_state(line).decode(errors="surrogateescape"),
                }
                for line in lines
            ]
        )

    def _write(self, objects: list[dict[str, object]]) -> str | None:
        if self._fd is None or not objects:
            return None
        try:
            write_all(self._fd, "".join(json.dumps(each) + "\n" for each in objects).encode())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None
            why = why_not_written(error)
            return f"--log-json {self._path}: cannot be written any more: {why}. The job goes on without it"
        return None

    def _now(self) -> float:
        return round(self._clock(), 6)


def _open_again(path: str) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed meanwhile
        return write_file(path)


def _last_state(line: bytes) -> bytes:
    """Returns what a terminal shows of a line with carriage returns: what follows the last that something follows."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class LogEvents(Observer):
    """Writes what happens to a job, by the screen, which keeps the order of output and events."""

    def __init__(self, roster: Roster, record: Callable[..., None]) -> None:
        """``record`` gets the kind of each event and its facts by name: `Screen.record`."""
        self._roster = roster
        self._record = record

    def on_event(self, event: Event) -> None:  # one place for all kinds
        match event:
            case Started() if event.worker in self._roster:
                self._record("started", **self._about(event.worker), pid=event.pid)
            case InitStarted() if event.worker in self._roster:
                self._record("init", **self._about(event.worker))
            case InitDone() if event.worker in self._roster:
                self._record("connected", **self._about(event.worker))
            case Stalled() if event.worker in self._roster:
                self._record("stalled", **self._about(event.worker), waited_s=event.waited_s)
            case Exited() if event.worker in self._roster:
                code = shell_code(event.returncode)
                self._record("exited", **self._about(event.worker), exit_code=code, peer_lost=event.peer_lost)
            case Lost():
                self._record("lost", host=event.host, why=event.why)
            case Interrupted():
                self._record("signal", signal=signal_name(event.signum))

    def _about(self, worker: int) -> dict[str, object]:
        record = self._roster[worker]
        return {"worker": worker, "rank": record.rank, "host": record.host}
