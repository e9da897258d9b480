"""What each worker wrote, in files of its own: ``DIR/rank.N/stdout`` and ``DIR/rank.N/stderr``.

N has as many digits as the highest rank, so that the directories sort. The files hold the bytes of the worker
alone, without prefixes, and replace those of an earlier job.
"""

from __future__ import annotations

import os

from .errors import UsageError
from .messages import Output, Stream

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class Record:
    """The open files of all workers. All are made at once: what cannot be, is told before anything is started."""

    def __init__(self, directory: str, size: int) -> None:
        self._files: dict[tuple[int, Stream], tuple[str, int]] = {}
        if not directory:
            raise UsageError("--output-filename: '' is no directory, such as logs")
        digits = len(str(size - 1))
        for rank in range(size):
            of_rank = os.path.join(directory, f"rank.{rank:0{digits}}")
            path = of_rank
            try:
                os.makedirs(of_rank, exist_ok=True)
                for stream in _STREAMS:
                    path = os.path.join(of_rank, stream)
                    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                    self._files[rank, stream] = path, fd
            except OSError as error:
                self.close()
                name = path if path.isprintable() else repr(path)
                raise UsageError(f"--output-filename: cannot write {name}: {error.strerror}") from error

    def write(self, output: Output) -> None:
        """Add it to its file. An `OSError` has the path in its ``filename``."""
        path, fd = self._files[output.rank, output.stream]
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
