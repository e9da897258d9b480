"""
Expands Slurm's lists of host names, such as ``node[1-3,07],login,rack[1-2]n[0-1]``.

Pure text; what is done with the hosts is decided elsewhere.
"""

from __future__ import annotations

import itertools
import re

from ..errors import LaunchEnvironmentError

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST_HOSTS = 1 << 17  # a list of more is a mistake, and would take the memory of this host


def expand_nodelist(text: str) -> list[str]:
    """The hosts, in the order of the list. A range keeps the width of its first number (``[08-10]``)."""
    hosts: list[str] = []
    position = 0
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise _malformed(text)
        hosts += _expand_item(item[0], text)
        position = item.end()
        if position == len(text):
            return hosts
        if text[position] != ",":
            raise _malformed(text)
        position += 1


def _expand_item(item: str, text: str) -> list[str]:
    choices = []
    count = 1
    for ranges, literal in _PART.findall(item):
        choices.append([literal] if literal else _expand_ranges(ranges, text))
        count *= len(choices[-1])
        if count > _MOST_HOSTS:
            raise _malformed(text)
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or len(part) > 40:
            raise _malformed(text)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise _malformed(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _malformed(text: str) -> LaunchEnvironmentError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return LaunchEnvironmentError(
        f"SLURM_STEP_NODELIST={shown!r} is not a list of hosts such as node[1-3,7]; Slurm's srun sets it, so it was "
        "changed on the way here"
    )
