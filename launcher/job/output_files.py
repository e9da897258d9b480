"""Writes each worker's output into files of its own: ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``.

In an elastic job, in which ranks change, they are ``DIR/worker.N/stdout`` and ``DIR/worker.N/stderr``.

`screen` calls it, in its thread. The N of ranks has as many digits as the highest rank, so that the directories sort.
The files hold the worker's bytes without prefixes, and replace those of an earlier job. `safe_files` opens them, safely
also in a directory that other users can write.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping

from ..errors import UsageError, in_words
from ..system.safe_files import create
from ..wire.messages import Output, Stream

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
# How many ended workers of an elastic job keep their files open, for processes that they have left running. The output
# of such processes of older workers is only shown.
_MOST_ENDED = 16


class OutputFiles:
    """The open files of all workers. Those of a job whose ranks stay are created before any worker starts."""

    def __init__(self, directory: str, ranks: Mapping[int, int]) -> None:
        """``ranks`` are the ranks of all workers, by their numbers; none in an elastic job, which calls `add`.

        Raises `UsageError` if a file cannot be created.
        """
        self._directory = directory
        self._files: dict[tuple[int, Stream], tuple[str, int]] = {}
        self._added: set[int] = set()
        self._ended: deque[int] = deque()  # of those that were added, the ones whose files are open for what they left
        if not directory:
            raise UsageError("--output-filename: '' is not the name of a directory, such as logs")
        digits = len(str(max(ranks.values(), default=0)))
        for number, rank in ranks.items():
            self._create(number, f"rank.{rank:0{digits}}")

    def add(self, worker: int) -> None:
        """Creates the files of one more worker; raises `UsageError` if that fails."""
        if worker not in self._added:
            self._added.add(worker)
            self._create(worker, f"worker.{worker}")

    def _create(self, worker: int, name: str) -> None:
        path = os.path.join(self._directory, name)
        try:
            for stream in _STREAMS:
                path = os.path.join(self._directory, name, stream)
                self._files[worker, stream] = path, create(path)
        except OSError as error:
            self.close()
            path = str(error.filename or path)
            path = path if path.isprintable() else repr(path)
            why = in_words(OSError(error.errno, "")) or error.strerror
            raise UsageError(f"--output-filename: cannot write {path}: {why}") from error

    def finish(self, worker: int) -> None:
        """Closes the files of a worker that has ended, after some more have: processes that it left may still write."""
        if worker not in self._added:
            return
        self._added.remove(worker)
        self._ended.append(worker)
        if len(self._ended) > _MOST_ENDED:
            oldest = self._ended.popleft()
            for stream in _STREAMS:
                if file := self._files.pop((oldest, stream), None):
                    os.close(file[1])

    def write(self, output: Output) -> None:
        """Appends output to its file. An `OSError` has the path in its ``filename``."""
        if (output.worker, output.stream) not in self._files:
            return
        path, fd = self._files[output.worker, output.stream]
        rest = memoryview(output.data)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError as error:
            error.filename = path
            raise

    def close(self) -> None:
        for _, fd in self._files.values():
            os.close(fd)
        self._files.clear()
