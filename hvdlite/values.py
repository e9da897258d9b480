"""
Checks and converts numbers and paths that users pass as arguments, and formats any value for an error message.

NumPy's numbers and tensors of one element count as numbers.
"""

from __future__ import annotations

import math
import operator
import os
from typing import Any

import torch
from torch import Tensor

LONGEST_S = 2e6
"""The longest timeout that is accepted, 23 days: `select.poll` can still count its milliseconds."""

MOST = 2**31 - 1
"""The highest rank, number of steps, or other count that is accepted."""

_LONGEST_SHOWN = 120


def shown(value: object) -> str:
    """Formats a value for a message: its repr as one line of printable characters, cut at a limit."""
    if isinstance(value, Tensor):
        return f"<{type(value).__name__}>"
    try:
        # An object's own __repr__ may raise anything; the repr of an int of very many digits raises too.
        text = repr(value)
    except Exception:  # noqa: BLE001 - see above
        return f"<{type(value).__name__}>"
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}…"


def whole_number(value: Any) -> int | None:
    """Returns the value as an int, or None if it is not a whole number; bools and floats give None."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        return None
    try:
        return operator.index(value)
    except Exception:  # noqa: BLE001 - an object's own method may raise anything, and so do tensors without values
        return None


def real_number(value: Any) -> float | None:
    """Returns the value as a float, or None if it is not a real number; text gives None.

    Numbers too large for a float give infinity.
    """
    # float() of PyTorch's and NumPy's complex numbers drops the imaginary part.
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
    """Returns a positive number of seconds, `LONGEST_S` at most; raises a ValueError for anything else."""
    number = None if isinstance(value, bool) else real_number(value)
    if number is None or not number > 0:
        raise ValueError(f"{argument}={shown(value)} is not a positive number of seconds, such as 60")
    if number > LONGEST_S:
        raise ValueError(f"{argument}={shown(value)} is too many seconds: pass {LONGEST_S:.0f} at most")
    return number


def is_file_name(path: str) -> bool:
    """Whether the operating system accepts this text as a path."""
    try:
        return path != "" and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
