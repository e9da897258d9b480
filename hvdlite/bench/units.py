"""
Formats sizes, times, bandwidths and ratios. A KB is 1024 bytes, an MB 1024 KB and a GB 1024 MB.
"""

from __future__ import annotations

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def show_size(nbytes: float) -> str:
    """Bytes in the largest unit that they fill, such as 64 B or 1.5 MB."""
    unit = next((unit for unit in ("G", "M", "K") if nbytes >= UNITS[unit]), "")
    return f"{nbytes / UNITS[unit]:.4g} {unit}B"


def show_difference(nbytes: float | None) -> str:
    """A difference of bytes with its sign, such as +1.5 MB; – for None."""
    return "–" if nbytes is None else ("-" if nbytes < 0 else "+") + show_size(abs(nbytes))


def show_time(seconds: float) -> str:
    """A time with three digits, such as 12.3 µs."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def show_round_time(seconds: float) -> str:
    """A time without trailing zeros, for the marks of an axis, such as 10 µs."""
    number, unit = show_time(seconds).split()
    return f"{float(number):g} {unit}"


def show_bandwidth(bytes_per_s: float | None) -> str:
    """In GB/s of 10^9 bytes, as NCCL's tests have it, or a smaller unit; – for None."""
    if not bytes_per_s:
        return "–"
    scale, unit = next(((s, u) for s, u in ((1e9, "GB/s"), (1e6, "MB/s")) if bytes_per_s >= s), (1e3, "KB/s"))
    return f"{_three_digits(bytes_per_s / scale)} {unit}"


def show_ratio(ratio: float | None) -> str:
    """A ratio with three digits, such as 1.93; – for None."""
    return "–" if ratio is None else _three_digits(ratio)


def show_ranks(count: int) -> str:
    """A number of ranks, such as 1 rank or 4 ranks."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
