"""
The files of a timeline: one that holds all ranks, or a directory with a file for each rank; and each rank's part.

    FILE                   all ranks, for Perfetto; each rank's part is FILE.rank.N.part until then
    DIRECTORY/rankN.json   one rank, for tools that read a trace per rank; its part is DIRECTORY/rankN.json.part

Both are written on rank 0's host, from the parts that rank 0 receives or finds there. Each file of a directory begins
with ``distributedInfo``, as traces of torch.profiler do, by which such tools know whose it is. A part is Chrome-trace
JSON on the common clock, as `comm.recorder` writes it: one event on each line, without the closing bracket, which
Perfetto does not need. `session` sends the parts to rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from hvdlite_wire import safe_paths


def shown_path(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path, which ends in a slash if it is that of a directory: it does already, or there is one.

    Made absolute at the start of a timeline, because a program may change its directory before the end.
    """
    text = os.fspath(path)
    is_directory = text.endswith("/") or os.path.isdir(text)
    return os.path.join(os.path.abspath(text), "") if is_directory else os.path.abspath(text)


def destination_at(path: str, world_size: int) -> OneFile | FilePerRank:
    """Returns the destination that `shown_path` has described."""
    return FilePerRank(Path(path), world_size) if path.endswith("/") else OneFile(Path(path))


class OneFile:
    """A file that holds all ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        """Check that the files can be written, an OSError if not, and remove parts of an earlier timeline."""
        if self._path.exists() and not self._path.is_file():
            # The file is replaced in the end, which would destroy a device such as /dev/null.
            raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(self._path))
        safe_paths.require_directory(str(self._path))
        _require_writable(self._path.parent, self._path.name)
        _remove(self.parts_there())

    def part_path(self, rank: int) -> Path:
        """Returns the path of the part that a rank writes, on its own host."""
        return self._path.with_name(f"{self._path.name}.rank.{rank}.part")

    def parts_there(self) -> dict[int, Path]:
        """Returns the parts found on this host, by rank."""
        return numbered(self._path.parent, f"{self._path.name}.rank.", ".part")

    def write(self, by_rank: Mapping[int, bytes]) -> None:
        """Write the ranks' parts as complete traces."""
        write_trace(self._path, "", by_rank.values())


class FilePerRank:
    """A directory with a file for each rank, made if it is missing. It has the methods of `OneFile`."""

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
        return numbered(self._directory, "rank", ".json.part")

    def write(self, by_rank: Mapping[int, bytes]) -> None:
        for rank, data in by_rank.items():
            info = {"backend": "hvdlite", "rank": rank, "world_size": self._world_size}
            # Before the events: tools look for the rank in the first lines.
            write_trace(self._trace_path(rank), f'"distributedInfo": {json.dumps(info)}, ', [data])
        # Whoever reads the directory must not take a rank of an earlier, larger job for one of this.
        earlier = numbered(self._directory, "rank", ".json")
        _remove({rank: path for rank, path in earlier.items() if rank not in by_rank})

    def _trace_path(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.json"


def _require_writable(directory: Path, prefix: str) -> None:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=f"{prefix}."):
        pass


def _remove(paths: Mapping[int, Path]) -> None:
    for path in paths.values():
        path.unlink(missing_ok=True)


def open_part(path: Path) -> IO[bytes]:
    """Open a new part. If its directory is missing or cannot be written, it is a temporary file without a name."""
    try:
        return open(safe_paths.new_file(str(path)), "w+b", buffering=0)
    except OSError:
        return tempfile.TemporaryFile("w+b", buffering=0)


def events_of(data: bytes) -> list[str]:
    """Returns the events of a part as JSON; a line cut short because its rank was killed is left out."""
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [line.removesuffix(",") for line in lines if line.endswith("},")]


def set_right(data: bytes, gained_ns: int, over_ns: int) -> bytes:
    """Returns a part with its times corrected to the common clock.

    The rank's clock has gained ``gained_ns`` on it, evenly over the first ``over_ns`` of the part.
    """
    lines = []
    for line in events_of(data):
        event = json.loads(line)
        if "ts" in event:
            event["ts"] = round(event["ts"] * (1 - gained_ns / over_ns), 3)
        lines.append(json.dumps(event))
    return "".join(f"{line},\n" for line in lines).encode()


def write_trace(path: Path, head: str, parts: Iterable[bytes]) -> None:
    """Write the events of the parts as one complete trace, atomically. ``head`` is JSON of the fields before them."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with open(safe_paths.new_file(str(unfinished)), "w") as file:
            file.write(f'{{"displayTimeUnit": "ms", {head}"traceEvents": [\n')
            file.write(",\n".join(line for data in parts for line in events_of(data)))
            file.write("\n]}\n")
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def numbered(directory: Path, before: str, after: str) -> dict[int, Path]:
    """Returns the files of a directory whose names are a rank between ``before`` and ``after``, in order of ranks."""
    found = [
        (int(number), entry)
        for entry in directory.iterdir()
        if (number := entry.name.removeprefix(before).removesuffix(after)).isdecimal()
        and number.isascii()
        and entry.name == f"{before}{number}{after}"
        and not entry.is_symlink()
    ]
    return dict(sorted(found))
