"""
Formats sizes, times, bandwidths and ratios as text. In sizes, 1 KB is 1024 bytes, 1 MB 1024 KB, and 1 GB 1024 MB.
"""

from __future__ import annotations

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def show_size(nbytes: float) -> str:
    """Returns bytes in the largest unit that they fill, such as 64 B or 1.5 MB."""
    unit = next((unit for unit in ("G", "M", "K") if nbytes >= UNITS[unit]), "")
    return f"{nbytes / UNITS[unit]:.4g} {unit}B"


def show_difference(nbytes: float | None) -> str:
    """Returns a difference in bytes with its sign, such as +1.5 MB; – for None."""
    return "–" if nbytes is None else ("-" if nbytes < 0 else "+") + show_size(abs(nbytes))


def show_time(seconds: float) -> str:
    """Returns a time with three digits, such as 12.3 µs."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def show_round_time(seconds: float) -> str:
    """Returns a time without trailing zeros, such as 10 µs, for the ticks of an axis."""
    number, unit = show_time(seconds).split()
    return f"{float(number):g} {unit}"


def show_bandwidth(bytes_per_s: float | None) -> str:
    """Returns a bandwidth in GB/s of 10^9 bytes, as in NCCL's tests, or in a smaller unit; – for None or 0."""
    if not bytes_per_s:
        return "–"
    scale, unit = next(((s, u) for s, u in ((1e9, "GB/s"), (1e6, "MB/s")) if bytes_per_s >= s), (1e3, "KB/s"))
    return f"{_three_digits(bytes_per_s / scale)} {unit}"


def show_ratio(ratio: float | None) -> str:
    """Returns a ratio with three digits, such as 1.93; – for None."""
    return "–" if ratio is None else _three_digits(ratio)


def show_count(count: int, noun: str) -> str:
    """Returns a count with its noun, such as 1 rank or 4 ranks."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
