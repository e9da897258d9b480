"""
Reads numbers, names and paths that users pass as arguments.

    value ── whole_number, real_number ── an int, a float, or None where it is neither
    value ── shown ── one line for a message, whatever the value is

NumPy's numbers and tensors of one element are numbers too. What to do with any other value is decided by the
function that was given it.
"""

from __future__ import annotations

import math
import operator
import os
from typing import Any

import torch
from torch import Tensor

LONGEST_S = 1e9
"""More seconds than any program waits, and fewer than clocks and locks can count."""

MOST = 2**31 - 1
"""The highest count of anything."""

_LONGEST_SHOWN = 120


def shown(value: object) -> str:
    """A value as messages show it: one line, not too long, of whatever can be printed."""
    if isinstance(value, Tensor):
        return f"<{type(value).__name__}>"
    try:
        # Whatever an object's own method raises; an int of very many digits has no repr either.
        text = repr(value)
    except Exception:  # noqa: BLE001 - see above
        return f"<{type(value).__name__}>"
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}…"


def whole_number(value: Any) -> int | None:
    """The int that a value is, or None: a bool is none, nor is a float."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        return None
    try:
        return operator.index(value)
    except Exception:  # noqa: BLE001 - whatever an object's own method raises, a tensor's without values included
        return None


def real_number(value: Any) -> float | None:
    """The float that a value is, or None; those too large for one are infinite. A text is none, whatever it says."""
    # PyTorch's and NumPy's complex numbers have a float, without what makes them complex.
    is_complex = value.is_complex() if isinstance(value, Tensor) else "complex" in type(value).__name__
    if is_complex or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except Exception:  # noqa: BLE001 - as above
        return None


def seconds(value: object, argument: str) -> float:
    """A positive number of seconds that can be waited, or a ValueError."""
    number = None if isinstance(value, bool) else real_number(value)
    if number is None or not number > 0:
        raise ValueError(f"{argument}={shown(value)} is not a positive number of seconds, such as 60")
    if number > LONGEST_S:
        raise ValueError(f"{argument}={shown(value)} is more seconds than can be waited: give {LONGEST_S:g} at most")
    return number


def is_file_name(path: str) -> bool:
    """Whether a file may have this name at all, as far as the system's calls are concerned."""
    try:
        return path != "" and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
