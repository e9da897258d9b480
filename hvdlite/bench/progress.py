"""
How far the measuring is: a bar on rank 0's stderr, by tqdm where it is there.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

# Under hvdlite-run every redrawing is a line.
_LINE_EVERY_S = 2.0


class Progress:
    """A bar of so many turns; none where nobody would see it, or tqdm is not installed."""

    def __init__(self, turns: int, *, shown: bool) -> None:
        self._bar: Any = None
        is_terminal = sys.stderr.isatty()
        if not shown or not (is_terminal or "HVDLITE_RANK" in os.environ):
            return
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            return
        style = {"leave": False} if is_terminal else {"mininterval": _LINE_EVERY_S, "ncols": 80, "ascii": True}
        self._bar = tqdm(total=turns, unit="turn", **style)

    def begin(self, what: str) -> None:
        """What is measured now."""
        if self._bar is not None:
            self._bar.set_description(what, refresh=False)

    def advance(self, turns: int = 1) -> None:
        """So many turns are done."""
        if self._bar is not None:
            self._bar.update(turns)

    def close(self) -> None:
        """Leave the screen to the results."""
        if self._bar is not None:
            self._bar.close()
