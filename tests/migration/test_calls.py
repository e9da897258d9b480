"""What each call of `horovod.torch` comes to is what it came to in Horovod 0.28.1, or it is said below why not.

`recorded.json` has what Horovod itself did (see `record.py`); `calls.py` makes the same calls of hvdlite, unchanged, with
1 to 4 ranks, through shared memory and through gloo.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PAGE = Path(__file__).parents[2] / "examples" / "horovod" / "README.md"
RECORDED = json.loads((HERE / "recorded.json").read_text())

ANY_DTYPE = "any dtype"
ADASUM = "`Adasum` is there without MPI, for any number of ranks, in process sets too"
TENSORS = "what is no tensor is a TypeError"
# By what a call is entered under, or the first part of that: what hvdlite does otherwise, in the page's words.
DIFFERENT = {
    **{f"{kind}allreduce{form}({argument})": words
       for kind, first in (("", "tensor"), ("grouped_", "tensors")) for form in ("", "_", "_async", "_async_")
       for argument, words in ((f"{first}): torch.uint8", ANY_DTYPE), (f"{first}): torch.int8", ANY_DTYPE),
                               (f"{first}): torch.int16", ANY_DTYPE))},
}  # fmt: skip


def outcomes(size: int, path: str) -> list[dict[str, Any]]:
    """By rank, what came of each call."""
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(size)]


def recorded(name: str, size: int) -> list[Any]:
    """By rank, what came of it in Horovod."""
    of_size = RECORDED["calls"][name][str(size)]
    return of_size if isinstance(of_size, list) else [of_size] * size


def agree(theirs: Any, ours: Any) -> bool:
    """Whether results are the same, but for the last bit of a float: who adds up first is not promised."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(agree(theirs[key], ours[key]) for key in theirs)
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(theirs) == len(ours) and all(map(agree, theirs, ours))
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=2e-7)
    return bool(theirs == ours)


def does_the_same(theirs: Any, ours: Any) -> bool:
    """Whether a call gave the same, or raised what is caught by all that caught Horovod's."""
    if "raises" in theirs:
        return "raises" in ours and set(theirs["raises"]) <= set(ours["raises"])
    return agree(theirs, ours)
