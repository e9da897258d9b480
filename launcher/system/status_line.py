"""`StatusLine`: one line on the terminal that says what is being waited for, and goes away.

`agents` shows one while it connects to hosts. Once a job runs, `screen.job_screen` owns the terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from .terminal_text import say, visible

_ERASE, _UNWRAPPED, _WRAPPED = "\r\x1b[K", "\x1b[?7l", "\x1b[?7h"


class StatusLine:
    """The line, where ``stream`` is a terminal that can draw in place; elsewhere nothing is written."""

    def __init__(self, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
        """``stream`` is stderr by default."""
        self._stream = sys.stderr if stream is None else stream
        self._is_on = self._stream.isatty() and environ.get("TERM") != "dumb"
        self._text = ""

    def show(self, text: str) -> None:
        """Draws this text in place of the last one; "" removes it. It is cut at the terminal's width."""
        if self._is_on and text != self._text:
            line = f"{_UNWRAPPED}hvdlite-run: {visible(text)}{_WRAPPED}" if text else ""
            self._stream.write((_ERASE if self._text else "") + line)
            self._stream.flush()
            self._text = text

    def say(self, text: str) -> None:
        """Writes a line of the launcher above it."""
        shown = self._text
        self.show("")
        say(text) if self._stream is sys.stderr else say(f"hvdlite-run: {text}\n", self._stream)
        self.show(shown)
