"""
Reads, corrects and merges the parts of a timeline, one for each rank.

A part is Chrome-trace JSON, already on the common clock: one event on each line, without the closing bracket, which
Perfetto does not need. This module handles only files: `comm.recorder` writes the parts, `destination` decides where
they and the merged files are, and `session` sends the parts to rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hvdlite_wire import safe_paths


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
