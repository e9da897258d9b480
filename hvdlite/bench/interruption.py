"""
Ctrl-C, and a launcher's word to end: the measuring stops where it is, and what was measured is kept.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import NoReturn

_WORD_S = 1.0


class Interruption:
    """Makes SIGINT and SIGTERM a KeyboardInterrupt, until it is `settle`d; ignores them from then on.

    Made in the main thread. A signal that is ignored already (as in a script's background job) stays so.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        caught = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._raise) for each in caught}

    def settle(self) -> None:
        """Let nothing interrupt what keeps the results."""
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)

    def release(self) -> None:
        """Leave signals to whoever had them: there is nothing to keep any more."""
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def expect(self) -> None:
        """Wait a moment for one: other ranks that hear of it earlier, and end, look like ranks that are lost."""
        time.sleep(_WORD_S)

    def _raise(self, signum: int, frame: FrameType | None) -> NoReturn:
        self.signum = signum
        raise KeyboardInterrupt
