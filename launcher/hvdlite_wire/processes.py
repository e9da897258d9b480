"""
What Linux says of processes in /proc/PID/stat.

proc(5) counts the fields from 1. The name, the second, may hold anything: what is before it is left out.
"""

from __future__ import annotations

import os

_FLAGS, _EXIT_CODE = 9, 52
_PF_EXITING = 0x4
_FIRST = 3


class Stat:
    """The fields of one process or thread."""

    def __init__(self, fields: list[bytes]) -> None:
        self._fields = fields

    def __getitem__(self, number: int) -> int:
        """Returns the field that proc(5) gives this number."""
        return int(self._fields[number - _FIRST])

    @property
    def has_ended(self) -> bool:
        """Whether it only waits for its parent to collect it."""
        return self._fields[0] in (b"Z", b"X")


def stat_of(pid: int | str) -> Stat | None:
    """Returns the fields of a process; None if there is none, or it cannot be read."""
    try:
        return _read(f"/proc/{pid}/stat")
    except OSError:
        return None


def exit_statuses(pid: int) -> list[int]:
    """Returns the wait status of each thread of a process that exits; none as long as one of them goes on.

    None too if there is no such process, or this one can open no more files. After a process of some GB was killed, the
    kernel takes its memory back for 0.1 s before the process has ended: no instruction of it runs any more.
    """
    statuses = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                stat = _read(f"/proc/{pid}/task/{thread}/stat")
            except (FileNotFoundError, ProcessLookupError):  # it has ended entirely
                continue
            if not stat[_FLAGS] & _PF_EXITING:
                return []
            statuses.append(stat[_EXIT_CODE])
    except OSError:
        return []
    return statuses


def _read(path: str) -> Stat:
    with open(path, "rb") as file:
        return Stat(file.read().rpartition(b")")[2].split())
