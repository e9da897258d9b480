"""Writes each worker's output into files of its own: ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``.

In an elastic job, in which ranks change, they are ``DIR/worker.N/stdout`` and ``DIR/worker.N/stderr``.

`screen` calls it, in its thread. The N of ranks has as many digits as the highest rank, so that the directories sort.
The files hold the worker's bytes without prefixes, and replace those of an earlier job. `safe_paths` opens them, safely
also in a directory that other users can write. Once workers run, a file that cannot be written is told, and left out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping

from hvdlite_wire.safe_paths import write_all, write_file

from ..errors import UsageError, why_not_written
from ..protocol.messages import Output, Stream
from ..system.process_tree import allow_open_files

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
# How many ended workers of an elastic job keep their files open, for processes that they have left running. The output
# of such processes of older workers is only shown.
_MOST_ENDED = 16


class OutputRecord:
    """Where output and events are kept besides the screen: here, nowhere.

    Each method returns a message for the user where writing fails; the file then gets no more.
    """

    def begin(self, worker: int) -> str | None:
        """Makes the files of a worker of an elastic job, which is to be started."""
        return None

    def output(self, output: Output, rank: int | None) -> str | None:
        """Keeps what a worker has written, which has this rank."""
        raise NotImplementedError

    def finish(self, worker: int, rank: int | None) -> str | None:
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
        self._ended: deque[int] = deque()  # of those that were added, the ones whose files are open for what they left
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
        files: dict[tuple[int, Stream], tuple[str, int]] = {}
        try:
            for stream in _STREAMS:
                path = os.path.join(self._directory, name, stream)
                files[worker, stream] = path, write_file(path)
        except OSError:
            for _, fd in files.values():
                os.close(fd)
            raise
        self._files |= files

    def finish(self, worker: int, rank: int | None) -> str | None:
        """Closes the files of a worker that has ended, after some more have: processes that it left may still write."""
        if worker not in self._added:
            return None
        self._added.remove(worker)
        self._ended.append(worker)
        if len(self._ended) <= _MOST_ENDED:
            return None
        oldest = self._ended.popleft()
        return self._close([(oldest, stream) for stream in _STREAMS])

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
            if whose in self._files:
                path, fd = self._files.pop(whose)
                try:
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
