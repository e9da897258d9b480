"""Writes each worker's output into files of its own: ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``.

N has as many digits as the highest rank, so that the directories sort. The files hold the bytes of the worker
alone, without prefixes, and replace those of an earlier job. How they are opened, in a directory that others can write
too, is in `safe_files`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import UsageError, in_words
from ..system.safe_files import create
from ..wire.messages import Output, Stream

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class OutputFiles:
    """The open files of all workers. All are made at once: what cannot be, is told before anything is started."""

    def __init__(self, directory: str, ranks: Mapping[int, int]) -> None:
        """``ranks`` are those of all workers, by their numbers."""
        self._files: dict[tuple[int, Stream], tuple[str, int]] = {}
        if not directory:
            raise UsageError("--output-filename: '' is no directory, such as logs")
        digits = len(str(max(ranks.values())))
        for number, rank in ranks.items():
            of_rank = os.path.join(directory, f"rank.{rank:0{digits}}")
            try:
                for stream in _STREAMS:
                    path = os.path.join(of_rank, stream)
                    self._files[number, stream] = path, create(path)
            except OSError as error:
                self.close()
                name = str(error.filename or path)
                name = name if name.isprintable() else repr(name)
                why = in_words(OSError(error.errno, "")) or error.strerror
                raise UsageError(f"--output-filename: cannot write {name}: {why}") from error

    def write(self, output: Output) -> None:
        """Add it to its file. An `OSError` has the path in its ``filename``."""
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
