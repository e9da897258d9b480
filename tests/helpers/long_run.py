"""Chooses how many trials and combinations a test tries; all of them together take hours of processor time.

With TEST_HVDLITE_LONG=1, which the long form of .ci/run sets, a test tries all of them. Without it, a test tries a few
that cover each kind, the same ones in every run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

IS_LONG = os.environ.get("TEST_HVDLITE_LONG") == "1"

T = TypeVar("T")


def trials(few: int, many: int) -> int:
    """Returns the number of trials: ``many`` in the long run, otherwise ``few``."""
    return many if IS_LONG else few


def chosen(every: Sequence[T], few: Sequence[T]) -> Sequence[T]:
    """Returns the cases to try: ``every`` one in the long run, otherwise ``few``, which must be among them."""
    assert all(each in every for each in few)
    return every if IS_LONG else few
