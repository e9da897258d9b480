"""
Command-line flags, declared as fields of the commands' dataclasses, and the functions that parse their values.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

from .units import UNITS


class UsageError(argparse.ArgumentTypeError):
    """The command line asks for something impossible. Reported in one line before any measurement, with exit code 2."""


def flag(metavar: str, read: Callable[[str], Any], what: str, name: str | None = None) -> dict[str, Any]:
    """Returns the metadata of a field that is a flag. ``read`` turns its text into a value, or raises UsageError.

    ``name`` is that of the flag, where it is not the field's.
    """
    return {"metavar": metavar, "type": read, "help": what} | ({} if name is None else {"name": name})


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
        raise UsageError(f"{text!r} is not a size, such as 64, 4K or 100M")
    return size


def read_count(text: str) -> int:
    """Returns the text as a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def some_of(known: Iterable[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """Returns a reader of comma-separated known names, which drops duplicates. ``what`` is a noun for the message."""
    choices = list(known)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(item.strip() for item in text.split(",")))
        for each in found:
            if each not in choices:
                raise UsageError(f"{each!r} is not {what}: choose from {', '.join(choices)}")
        return found

    return read


def one_of(known: Iterable[str], what: str) -> Callable[[str], str]:
    """Returns a reader of one of some known names."""

    def read(text: str) -> str:
        found = some_of(known, what)(text)
        if len(found) > 1:
            raise UsageError(f"takes one value, not {','.join(found)}")
        return found[0]

    return read
