"""
Where a timeline is written: one file that holds all ranks, or a directory with a file for each rank.

    FILE                   all ranks, for Perfetto; each rank's part is FILE.rank.N.part until then
    DIRECTORY/rankN.json   one rank, for tools that read a trace per rank; its part is DIRECTORY/rankN.json.part

Both are written on rank 0's host, from the parts that rank 0 receives or finds there. Each file of a directory begins
with ``distributedInfo``, as traces of torch.profiler do, by which such tools know whose it is. `session` calls it.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hvdlite_wire import safe_paths

from . import parts


class Destination(Protocol):
    """The files of one timeline."""

    def prepare(self) -> None:
        """Check that the files can be written, an OSError if not, and remove parts of an earlier timeline."""

    def part_path(self, rank: int) -> Path:
        """Returns the path of the part that a rank writes, on its own host."""

    def parts_there(self) -> dict[int, Path]:
        """Returns the parts found on this host, by rank."""

    def write(self, by_rank: Mapping[int, bytes]) -> None:
        """Write the ranks' parts as complete traces."""


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, which ends in a slash if it is that of a directory: it does already, or there is one.

    Made absolute at the start of a timeline, because a program may change its directory before the end.
    """
    text = os.fspath(path)
    is_directory = text.endswith("/") or os.path.isdir(text)
    return os.path.join(os.path.abspath(text), "") if is_directory else os.path.abspath(text)


def destination_at(path: str, world_size: int) -> Destination:
    """Returns the destination that `shown_path` has described."""
    return FilePerRank(Path(path), world_size) if path.endswith("/") else OneFile(Path(path))


class OneFile:
    """A file that holds all ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        if self._path.exists() and not self._path.is_file():
            # The file is replaced in the end, which would destroy a device such as /dev/null.
            raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(self._path))
        safe_paths.require_directory(str(self._path))
        _require_writable(self._path.parent, self._path.name)
        _remove(self.parts_there())

    def part_path(self, rank: int) -> Path:
        return self._path.with_name(f"{self._path.name}.rank.{rank}.part")

    def parts_there(self) -> dict[int, Path]:
        return parts.numbered(self._path.parent, f"{self._path.name}.rank.", ".part")

    def write(self, by_rank: Mapping[int, bytes]) -> None:
        parts.write_trace(self._path, "", by_rank.values())


class FilePerRank:
    """A directory with a file for each rank. It is made if it is missing."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._directory = directory
        self._world_size = world_size

    def prepare(self) -> None:
        safe_paths.require_directory(str(self._directory))
        self._directory.mkdir(exist_ok=True)
        safe_paths.require_directory(str(self._trace_path(0)))
        _require_writable(self._directory, "rank")
        _remove(self.parts_there())

    def part_path(self, rank: int) -> Path:
        path = self._trace_path(rank)
        return path.with_name(f"{path.name}.part")

    def parts_there(self) -> dict[int, Path]:
        return parts.numbered(self._directory, "rank", ".json.part")

    def write(self, by_rank: Mapping[int, bytes]) -> None:
        for rank, data in by_rank.items():
            info = {"backend": "hvdlite", "rank": rank, "world_size": self._world_size}
            # Before the events: tools look for the rank in the first lines.
            parts.write_trace(self._trace_path(rank), f'"distributedInfo": {json.dumps(info)}, ', [data])
        # Whoever reads the directory must not take a rank of an earlier, larger job for one of this.
        earlier = parts.numbered(self._directory, "rank", ".json")
        _remove({rank: path for rank, path in earlier.items() if rank not in by_rank})

    def _trace_path(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.json"


def _require_writable(directory: Path, prefix: str) -> None:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=f"{prefix}."):
        pass


def _remove(paths: Mapping[int, Path]) -> None:
    for path in paths.values():
        path.unlink(missing_ok=True)
