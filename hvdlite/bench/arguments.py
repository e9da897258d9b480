"""
Types for the flags that commands define, and the readers of their arguments.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from .units import UNITS


class UsageError(argparse.ArgumentTypeError):
    """The command line asks for what cannot be done: told in one line before anything is measured, exit code 2."""


class Flag(NamedTuple):
    """A flag of a command; ``read`` turns its text into a value, or raises UsageError."""

    name: str
    read: Callable[[str], Any]
    metavar: str
    help: str
    default: Any = None


def read_sizes(text: str) -> tuple[int, ...]:
    """Sizes such as ``4,64B,4K,100M`` in bytes, each once, smallest first."""
    return tuple(sorted({_read_size(item.strip()) for item in text.split(",")}))


def _read_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    size = 0 if match is None else int(match[1]) * UNITS[match[2].upper()]
    if size == 0:
        raise UsageError(f"{text!r} is not a size, such as 64, 4K or 100M")
    return size


def read_count(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_share(text: str) -> float:
    """A number between 0 and 1."""
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise UsageError(f"{text!r} is not a number between 0 and 1, such as 0.5")


def some_of(known: Iterable[str], what: str) -> Callable[[str], tuple[str, ...]]:
    """Reads a list with commas of known names, each once; ``what`` says what one of them is, for the message."""
    choices = list(known)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(item.strip() for item in text.split(",")))
        for each in found:
            if each not in choices:
                raise UsageError(f"{each!r} is not {what}: these are {', '.join(choices)}")
        return found

    return read


def one_of(known: Iterable[str], what: str) -> Callable[[str], str]:
    """Reads one of some known names."""
    read_all = some_of(known, what)

    def read(text: str) -> str:
        found = read_all(text)
        if len(found) > 1:
            raise UsageError(f"one at a time, and not {','.join(found)}")
        return found[0]

    return read


def count_flag(flag: str, default: int, what: str) -> Flag:
    """A flag that says how often something is measured."""
    return Flag(flag, read_count, "COUNT", f"{what} ({default})", default)


def variants_flag(known: Iterable[str], usual: Iterable[str]) -> Flag:
    """``--variants``; ``usual`` are those that are measured without it."""
    unusual = ", ".join(each for each in known if each not in usual)
    return Flag("--variants", some_of(known, "a variant"), "NAME,…", f"of {', '.join(known)} (all but {unusual})")


BATCH = Flag("--batch", read_count, "ROWS", "of each rank (the model's own)")
DEVICE = Flag(
    "--device", one_of(("auto", "cpu", "cuda"), "a device"), "auto|cpu|cuda",
    "where tensors are; auto is cuda where there is one", "auto",
)  # fmt: skip
