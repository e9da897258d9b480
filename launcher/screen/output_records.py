"""What a job leaves in files besides the screen: each worker's output, and a log of JSON.

    the screen's thread: output, messages; `LogEvents`: what happens ──► OutputFiles ──► DIR/rank.N/stdout and stderr
                                                                    └──► JsonLog ──► FILE

The files of ``--output-filename`` hold the worker's bytes without prefixes, and replace those of an earlier job. In an
elastic job, in which ranks change, their directories are ``DIR/worker.N``. The N of ranks has as many digits as the
highest rank, so that the directories sort.

The log of ``--log-json`` has one object per line, with ``time`` (Unix time) and ``kind``: "output" with ``worker``,
``rank``, ``stream`` and ``text``, "say" with the ``text`` of a message of hvdlite-run, or an event. ``text`` has no
line end. Bytes that are not UTF-8 are in it as ``\\udc80`` to ``\\udcff``, as Python's "surrogateescape" decodes them,
so the worker's bytes can be had back. Of a progress bar each line has the last state.

Once workers run, a file that cannot be written is told, and left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping

from hvdlite_wire.safe_paths import write_all, write_file

from ..errors import UsageError, why_not_written
from ..protocol.messages import (
    Event,
    Exited,
    InitDone,
    InitStarted,
    Interrupted,
    Lost,
    OfWorker,
    Output,
    Stalled,
    Started,
    Stream,
)
from ..system.process_tree import allow_open_files, shell_code, signal_name
from ..workers.ending import Observer, Roster
from .lines import MAX_LINE_BYTES

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class OutputRecord:
    """Where output and events are kept besides the screen. All calls come from the screen's thread.

    Each method returns a message for the user where writing fails; the file then gets no more.
    """

    def begin(self, worker: int) -> str | None:
        """Makes the files of a worker of an elastic job, which is to be started."""
        return None

    def output(self, output: Output, rank: int | None) -> str | None:
        """Keeps what a worker has written, which has this rank."""
        raise NotImplementedError

    def finish(self, worker: int) -> str | None:
        """Takes note that a worker has ended."""
        return None

    def event(self, kind: str, **facts: object) -> str | None:
        """Keeps something else that has happened."""
        return None

    def close(self) -> str | None:
        """Closes all files; what they lack then is a failure, too."""
        raise NotImplementedError


class OutputFiles(OutputRecord):
    """The open files of all workers. Those of a job whose ranks stay are created before any worker starts."""

    def __init__(self, directory: str, ranks: Mapping[int, int], *, first: int | None = None) -> None:
        """``ranks`` are the ranks of all workers, by their numbers.

        In an elastic job there are none, and ``first`` is the number of its first worker; `begin` creates the files of
        others. Raises `UsageError` if the files of these workers cannot be created.
        """
        self._directory = directory
        self._files: dict[tuple[int, Stream], tuple[str, int]] = {}
        self._added: set[int] = set()
        if not directory:
            raise UsageError("--output-filename: '' is not the name of a directory, such as logs")
        self._told: set[str] = set()  # why files cannot be written: a full disk is told once, and not for each file
        digits = len(str(max(ranks.values(), default=0)))
        try:
            allow_open_files(len(_STREAMS) * len(ranks))
            for number, rank in ranks.items():
                self._create(number, f"rank.{rank:0{digits}}")
            if first is not None:
                self._add(first)
        except OSError as error:
            self.close()
            raise UsageError(f"--output-filename: cannot write {_name(error)}: {why_not_written(error)}") from error

    def begin(self, worker: int) -> str | None:
        try:
            self._add(worker)
        except OSError as error:
            return self._tell(_name(error), "cannot be written", error)
        return None

    def _add(self, worker: int) -> None:
        if worker not in self._added:
            self._create(worker, f"worker.{worker}")
            self._added.add(worker)

    def _create(self, worker: int, name: str) -> None:
        """Creates both files of a worker, or none and raises an OSError."""
        try:
            for stream in _STREAMS:
                path = os.path.join(self._directory, name, stream)
                self._files[worker, stream] = path, write_file(path)
        except OSError:
            self._close((worker, stream) for stream in _STREAMS)
            raise

    def finish(self, worker: int) -> str | None:
        """Closes the files of a worker of an elastic job, which may have many: what it left running is only shown."""
        if worker not in self._added:
            return None
        self._added.remove(worker)
        return self._close((worker, stream) for stream in _STREAMS)

    def output(self, output: Output, rank: int | None) -> str | None:
        whose = output.worker, output.stream
        if whose not in self._files:
            return None
        path, fd = self._files[whose]
        try:
            write_all(fd, output.data)
        except OSError as error:
            self._close([whose])
            return self._tell(path, "cannot be written any more", error)
        return None

    def close(self) -> str | None:
        return self._close(list(self._files))

    def _close(self, those: Iterable[tuple[int, Stream]]) -> str | None:
        told = None
        for whose in those:
            path, fd = self._files.pop(whose, ("", -1))
            try:
                if path:
                    os.close(fd)
            except OSError as error:  # a file system on a network may be full only now
                told = self._tell(path, "lacks its last bytes", error) or told
        return told

    def _tell(self, path: str, what: str, error: OSError) -> str | None:
        why = why_not_written(error)
        if why in self._told:
            return None
        self._told.add(why)
        return f"--output-filename: {path} {what}: {why}. The job goes on without it, and without others like it"


def _name(error: OSError) -> str:
    path = str(error.filename)
    return path if path.isprintable() else repr(path)


class JsonLog(OutputRecord):
    """The file of ``--log-json``. A failure is told once, and ends it; the job goes on."""

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

    def finish(self, worker: int) -> str | None:
        return self._write_rest([whose for whose in self._rest if whose[0] == worker])

    def event(self, kind: str, **facts: object) -> str | None:
        """Writes something else that has happened, after the last line of a worker that has ended."""
        worker = facts.get("worker")
        failure = self.finish(worker) if kind == "exited" and isinstance(worker, int) else None
        return self._write([{"time": self._now(), "kind": kind, **facts}]) or failure

    def close(self) -> str | None:
        failure = self._write_rest(list(self._rest))  # of workers whose host was lost, whose end nobody has seen
        if self._fd is not None:
            try:
                os.close(self._fd)
            except OSError as error:  # a file system on a network may be full only now
                failure = f"--log-json {self._path}: its last lines may be missing: {why_not_written(error)}"
            self._fd = None
        return failure

    def _write_rest(self, those: Iterable[tuple[int, Stream]]) -> str | None:
        failure = None
        for worker, stream in those:
            rank, rest = self._rest.pop((worker, stream))
            failure = self._write_lines(worker, rank, stream, [rest]) or failure
        return failure

    def _write_lines(self, worker: int, rank: int | None, stream: Stream, lines: list[bytes]) -> str | None:
        about = {"time": self._now(), "kind": "output", "worker": worker, "rank": rank, "stream": stream}
        return self._write([{**about, "text": _last_state(line).decode(errors="surrogateescape")} for line in lines])

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

    def on_event(self, event: Event) -> None:
        if isinstance(event, OfWorker) and event.worker not in self._roster:
            return
        match event:
            case Started():
                self._record("started", **self._about(event.worker), pid=event.pid)
            case InitStarted():
                self._record("init", **self._about(event.worker))
            case InitDone():
                self._record("connected", **self._about(event.worker))
            case Stalled():
                self._record("stalled", **self._about(event.worker), waited_s=event.waited_s)
            case Exited():
                code = shell_code(event.returncode)
                self._record("exited", **self._about(event.worker), exit_code=code, peer_lost=event.peer_lost)
            case Lost():
                self._record("lost", host=event.host, why=event.why)
            case Interrupted():
                self._record("signal", signal=signal_name(event.signum))

    def _about(self, worker: int) -> dict[str, object]:
        record = self._roster[worker]
        return {"worker": worker, "rank": record.rank, "host": record.host}
