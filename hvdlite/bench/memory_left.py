"""
Whether what is to be measured fits into what this host has left.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import psutil
import torch

from .quantities import show_size
from .ranks import Ranks

SHARED = "/dev/shm"
# What is left to the rest of the machine.
_SLACK = 0.9


def why_too_large(ranks: Ranks, bytes_per_rank: int, shared_per_rank: int = 0) -> str | None:
    """Why it does not fit, in the words of the first rank that has too little, to all; None where it does.

    ``bytes_per_rank`` are of the device's memory, ``shared_per_rank`` those in /dev/shm. All ranks must call it.
    """
    local_size = ranks.topology.local_size
    why = None
    if ranks.device.type == "cuda":
        why = _shortage(bytes_per_rank, torch.cuda.mem_get_info(ranks.device)[0], "of the GPU's memory are free")
    else:
        available = min(psutil.virtual_memory().available, left_in_cgroup())
        needed = (bytes_per_rank + shared_per_rank) * local_size
        why = _shortage(needed, available, "of memory are free")
        if why is None and shared_per_rank and os.path.isdir(SHARED):
            why = _shortage(shared_per_rank * local_size, shutil.disk_usage(SHARED).free, f"of {SHARED} are free")
    host = ranks.group.hosts[ranks.rank]
    # They ask together, lest one counts what another has taken since.
    first: str | None = ranks.first(None if why is None else f"{why} on {host}")
    return first


def left_in_cgroup(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """What Slurm, a container or systemd leaves this process of the host's memory; infinite where none says."""
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return math.inf
    group = root / path.strip("/")
    return min(_left_in(each) for each in (group, *group.parents) if each.is_relative_to(root))


def _left_in(group: Path) -> float:
    try:
        most = (group / "memory.max").read_text().strip()
        taken = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Files that were read lie there until somebody needs the room.
        return math.inf if most == "max" else int(most) - taken + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return math.inf


def _shortage(needed: int, available: float, where: str) -> str | None:
    if needed <= available * _SLACK:
        return None
    return f"needs {show_size(needed)}, and {show_size(available)} {where}"
