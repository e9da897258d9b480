"""
Reads the parts of a timeline, one for each rank, and merges them into one file.

    rank N ── FILE.rank.N.part, from the start ── end: sent to rank 0, or found beside FILE ── FILE

A part is Chrome-trace JSON on the common clock already, an event in each line, and without the closing bracket, which
Perfetto does not miss. Files only: how events come into a part is in `comm.recorder`, how parts come to rank 0
is in `session`.
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
    """Where a rank's part is kept."""
    return path.with_name(f"{path.name}.rank.{rank}.part")


def prepare(path: Path) -> None:
    """See that ``path`` can be written, and remove what an earlier timeline left beside it. An OSError if not."""
    if path.exists() and not path.is_file():
        # It is replaced as a whole in the end, which would be the end of /dev/null too.
        raise FileExistsError(errno.EEXIST, "there is something that is not a file", str(path))
    files.require_directory(str(path))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}."):
        pass
    for part in _parts_beside(path):
        part.unlink()


def open_part(path: Path, rank: int) -> IO[bytes]:
    """A rank's part, new. Where there is no such directory, or it cannot be written, it has no name."""
    try:
        return open(files.create(str(part_path(path, rank))), "w+b", buffering=0)
    except OSError:
        return tempfile.TemporaryFile("w+b", buffering=0)


def events_of(data: bytes) -> list[str]:
    """The events in a part, each as JSON; one that is not whole, where its rank was killed, is left out."""
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [line.removesuffix(",") for line in lines if line.endswith("},")]


def set_right(data: bytes, gained_ns: int, over_ns: int) -> bytes:
    """A part by a clock that has gained so much, evenly over its first ``over_ns``, by the common one."""
    lines = []
    for line in events_of(data):
        event = json.loads(line)
        if "ts" in event:
            event["ts"] = round(event["ts"] * (1 - gained_ns / over_ns), 3)
        lines.append(json.dumps(event))
    return "".join(f"{line},\n" for line in lines).encode()


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """The events of all parts as one file, there at once or not at all."""
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
    """One file of the parts that lie beside it, which stay: their ranks may still be writing them."""
    write_whole(path, [part.read_bytes() for part in _parts_beside(path)])


def remove_part(path: Path, rank: int) -> None:
    """It is in the whole."""
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
