"""
Sizes, dtypes and times, as they are typed and as they are shown.

A size is in bytes: ``64``, ``4K``, ``100M``, ``1G``; K is 1024 of them, M 1024 K and G 1024 M.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from .errors import UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
# 4 B to 256 MB, by factors of 4.
DEFAULT_SIZES = tuple(4 * 4**power for power in range(14))
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int32, torch.int64),
    )
}


def parse_size(text: str) -> int:
    """The bytes that it says."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = 0 if match is None else int(match[1]) * _UNITS[match[2].upper()]
    if size == 0:
        raise UsageError(f"{text!r} is not a size, such as 64, 4K or 100M")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes of a list with commas, each once, smallest first."""
    return tuple(sorted({parse_size(item) for item in text.split(",")}))


def parse_dtypes(text: str) -> tuple[torch.dtype, ...]:
    """The dtypes of a list with commas, in its order."""
    return tuple(DTYPES[name] for name in parse_names(text, DTYPES, "a dtype that is summed"))


def parse_names(text: str, known: Iterable[str], what: str) -> tuple[str, ...]:
    """The names of a list with commas, each once, in its order; ``what`` is what they name, for the message."""
    choices = list(known)
    names = tuple(dict.fromkeys(item.strip() for item in text.split(",")))
    for name in names:
        if name not in choices:
            raise UsageError(f"{name!r} is not {what}: these are {', '.join(choices)}")
    return names


def parse_positive(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse_share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"{text!r} is not a number between 0 and 1, such as 0.5")
    return share


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name, such as float32."""
    return str(dtype).removeprefix("torch.")


def show_size(nbytes: float) -> str:
    """Bytes in the largest unit that they fill, such as 64 B or 1.5 MB."""
    for unit in ("G", "M", "K"):
        if nbytes >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.4g} {unit}B"
    return f"{nbytes:.4g} B"


def show_time(seconds: float) -> str:
    """A time with three digits, such as 12.3 µs."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def show_bandwidth(bytes_per_s: float | None) -> str:
    """In GB/s of 10^9 bytes, as NCCL's tests have it, or less; a dash where there is none."""
    if not bytes_per_s:
        return "–"
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= scale:
            return f"{_three_digits(bytes_per_s / scale)} {unit}"
    return f"{_three_digits(bytes_per_s / 1e3)} KB/s"


def show_ratio(ratio: float | None) -> str:
    """Such as 1.93; a dash where there is none."""
    return "–" if ratio is None else _three_digits(ratio)


def show_ratios(ratios: Iterable[float]) -> str:
    """From the least to the largest, such as 1.02 to 1.93, or 1.02 where they are the same."""
    ordered = sorted(ratios)
    return " to ".join(dict.fromkeys(show_ratio(each) for each in (ordered[0], ordered[-1])))


def show_round_time(seconds: float) -> str:
    """A time without more digits than it has, for the marks of an axis, such as 10 µs."""
    number, unit = show_time(seconds).split()
    return f"{float(number):g} {unit}"


def show_ranks(count: int) -> str:
    """Such as 1 rank, or 4 ranks."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _three_digits(value: float) -> str:
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"
