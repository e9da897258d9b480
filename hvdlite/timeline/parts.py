"""
Reads the parts of a timeline, one for each rank, and merges them into one file.

Each rank writes FILE.rank.N.part from the start. At the end rank 0 receives the parts, or finds them beside FILE, and
writes FILE.

A part is Chrome-trace JSON, already on the common clock: one event on each line, without the closing bracket, which
Perfetto does not need. This module handles only files: `comm.recorder` writes the parts, and `session` calls this
module and sends the parts to rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from .. import files


def part_path(path: Path, rank: int) -> Path:
    """Returns the path of a rank's part."""
    return path.with_name(f"{path.name}.rank.{rank}.part")


def prepare(path: Path) -> None:
    """Check that ``path`` can be written (an OSError if not), and remove parts of an earlier timeline beside it."""
    if path.exists() and not path.is_file():
        # The file is replaced in the end, which would destroy a device such as /dev/null.
        raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(path))
    files.require_directory(str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
        pass
    for part in _parts_beside(path):
        part.unlink()


def open_part(path: Path, rank: int) -> IO[bytes]:
    """Open a new part. If its directory is missing or cannot be written, it is a temporary file without a name."""
    try:
        return open(files.create(str(part_path(path, rank))), "w+b", buffering=0)
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


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write the events of all parts as one file, atomically."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with open(files.create(str(unfinished)), "w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(line for data in parts for line in events_of(data)))
            file.write("\n]}\n")
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def join_what_is_there(path: Path) -> None:
    """Merge the parts found beside ``path``, and keep them: their ranks may still be writing."""
    write_whole(path, [part.read_bytes() for part in _parts_beside(path)])


def remove_part(path: Path, rank: int) -> None:
    """Remove a part that is in the merged file."""
    part_path(path, rank).unlink(missing_ok=True)


def _parts_beside(path: Path) -> list[Path]:
    prefix = f"{path.name}.rank."
    found = [
        (int(number), entry)
        for entry in path.parent.iterdir()
        if (number := entry.name.removeprefix(prefix).removesuffix(".part")).isdecimal()
        and number.isascii()
        and entry.name == f"{prefix}{number}.part"
        and not entry.is_symlink()
    ]
    return [entry for _, entry in sorted(found)]
