"""What processes hold, read from /proc, and what a job holds: to find what grows with the number of repetitions.

Programs of tests import it, with this directory on their path.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# A connection may just be opened or closed, and a thread begin or end.
_MAY_COME_AND_GO = 6


def held_by(pid: int) -> dict[str, int]:
    """Returns the number of a process's threads, of its open files by kind, and of the shared memory that it maps."""
    proc = Path("/proc", str(pid))
    found = Counter(f"open: {_kind(fd)}" for fd in (proc / "fd").iterdir())
    found["threads"] = len(list((proc / "task").iterdir()))
    found["mapped shared memory"] = sum("/dev/shm" in line for line in (proc / "maps").read_text().splitlines())
    return dict(found)


def _kind(fd: Path) -> str:
    try:
        target = os.readlink(fd)
    except OSError:  # it has been closed meanwhile
        return "closed"
    return re.sub(r"^/.*?(shm)?.*", r"file \1", target).partition(":[")[0]


def memory_kib(pid: int) -> int:
    """Returns the memory of a process that is neither shared nor that of a file."""
    (line,) = [line for line in Path("/proc", str(pid), "status").read_text().splitlines() if "RssAnon" in line]
    return int(line.split()[1])


def launcher_and_agent() -> dict[str, int]:
    """Returns the pids of hvdlite-run that this worker descends from: its agent, that one's parent, the launcher."""
    pids, pid = [], os.getppid()
    for _ in range(3):
        pids.append(pid)
        pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    return dict(zip(("agent", "remote parent", "launcher"), pids, strict=True))


def grown(early: Sequence[Mapping[str, int]], late: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """Returns what ``late`` has more of than ``early``, beyond what comes and goes: the most early and the least late.

    Each has the counts at several points. Something that stays behind at each repetition is seen after a few dozens.
    """
    kinds: Iterable[str] = {kind for each in late for kind in each}
    found = {
        kind: (max(each.get(kind, 0) for each in early), min(each.get(kind, 0) for each in late)) for kind in kinds
    }
    return {kind: (before, after) for kind, (before, after) in found.items() if after > before + _MAY_COME_AND_GO}
