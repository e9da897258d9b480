"""
Command-line flags, declared as fields of the commands' dataclasses, and quantities: parsed, and shown as text.

In sizes, 1 KB is 1024 bytes, 1 MB 1024 KB, and 1 GB 1024 MB.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def show_size(nbytes: float) -> str:
    """Returns bytes in the largest unit that they fill, such as 64 B or 1.5 MB."""
    unit = next((unit for unit in ("G", "M", "K") if nbytes >= UNITS[unit]), "")
    return f"{nbytes / UNITS[unit]:.4g} {unit}B"


def show_time(seconds: float) -> str:
    """Returns a time with three digits, such as 12.3 µs."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return f"{show_ratio(seconds * scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def show_bandwidth(bytes_per_s: float | None) -> str:
    """Returns a bandwidth in GB/s of 10^9 bytes, as in NCCL's tests, or in a smaller unit; – for None or 0."""
    if not bytes_per_s:
        return "–"
    scale, unit = next(((s, u) for s, u in ((1e9, "GB/s"), (1e6, "MB/s")) if bytes_per_s >= s), (1e3, "KB/s"))
    return f"{show_ratio(bytes_per_s / scale)} {unit}"


def show_ratio(ratio: float | None) -> str:
    """Returns a number with three digits, such as 1.93; – for None."""
    return "–" if ratio is None else f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def show_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class OptionError(argparse.ArgumentTypeError):
    """The command line asks for something impossible. Reported in one line before any measurement, with exit code 2."""


def flag(metavar: str, read: Callable[[str], Any], what: str) -> dict[str, Any]:
    """Returns the metadata of a field that is a flag. ``read`` turns its text into a value, or raises OptionError."""
    return {"metavar": metavar, "type": read, "help": what}


def choice_flag(metavar: str, choices: Iterable[str], what: str) -> dict[str, Any]:
    """Returns the metadata of a flag that is one of some names."""
    return {"metavar": metavar, "choices": tuple(choices), "help": what}


def count_flag(what: str) -> dict[str, Any]:
    """Returns the metadata of a flag that sets how often something is measured."""
    return flag("COUNT", read_count, f"{what} (%(default)s)")


def read_sizes(text: str) -> tuple[int, ...]:
    """Returns sizes such as ``4,64B,4K,100M`` in bytes, without duplicates, smallest first."""
    return tuple(sorted({_read_size(item.strip()) for item in text.split(",")}))


def _read_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    size = 0 if match is None else int(match[1]) * UNITS[match[2].upper()]
    if size == 0:
        raise OptionError(f"{text!r} is not a size, such as 64, 4K or 100M")
    return size


def read_count(text: str) -> int:
    """Returns the text as a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise OptionError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def some_of(known: Iterable[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """Returns a reader of comma-separated known names, which drops duplicates. ``what`` is a noun for the message."""
    choices = list(known)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(item.strip() for item in text.split(",")))
        for each in found:
            if each not in choices:
                raise OptionError(f"{each!r} is not {what}: choose from {', '.join(choices)}")
        return found

    return read
