"""Reads the JSON in which workers and agents tell what workers do: nothing in it is trusted to have the right form.

What has not is left out, since half a report is better than none. `rank_facts` and `progress` call these functions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MOST = 1000


def parsed(text: str) -> dict[str, Any]:
    """Returns the mapping that this JSON is; an empty one if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return mapping(value)


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> Sequence[Any]:
    return value[:_MOST] if isinstance(value, list) else ()


def number(value: Any, otherwise: int = 0) -> int:
    return value if type(value) is int and value >= 0 else otherwise


def seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def part(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else 0.0


def text(value: Any, most: int = _MOST) -> str:
    # A program names its threads, functions and parameters as it likes: nothing of that may control the terminal.
    return "".join(each if each.isprintable() else "?" for each in value[:most]) if isinstance(value, str) else ""


def wait(value: Any, most: int = _MOST) -> tuple[str, float] | None:
    """Returns for what, and for how long, a worker waits; None if it is no ``[what, seconds]``."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        return None
    return (text(value[0], most), seconds(value[1])) if isinstance(value[1], int | float) else None
