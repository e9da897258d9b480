"""`LateStart`: has a report taken on ranks that do not come to hvd.init(), before the start timeout ends the job.

    InitStarted, InitDone ──► LateStart ── 5 s before --start-timeout is over ──► Reports

`supervisor` tells it of all events. `launch` makes one for each job whose ranks stay the same.
"""

from __future__ import annotations

from collections.abc import Callable

from ..wire.messages import Event, Exited, InitDone, InitFailed, InitStarted, Interrupted, Lost
from ..workers.ending import Ending
from ..workers.observer import Observer

# A report takes this long at most.
_BEFORE_S = 5.0


class LateStart(Observer):
    """Waits for the first hvd.init() of all workers, once. Where the timeout is 10 s or less it takes no report."""

    def __init__(self, start_timeout_s: float, ending: Ending, take_report: Callable[[float], None]) -> None:
        """``take_report`` is called with the seconds for which the first rank has waited."""
        self._after_s = start_timeout_s - _BEFORE_S
        self._ending = ending
        self._take_report = take_report
        self._is_over = self._after_s <= _BEFORE_S
        self._at_s: float | None = None
        self._connected: set[int] = set()

    def on_event(self, event: Event) -> None:
        if self._is_over:
            return
        match event:
            case InitStarted():
                if self._at_s is None:
                    self._at_s = self._ending.clock() + self._after_s
            case InitDone():
                self._connected.add(event.worker)
                self._is_over = self._connected.issuperset(self._ending.running)
            # The job ends, or the program has been told that it cannot connect.
            case InitFailed() | Exited() | Interrupted() | Lost():
                self._is_over = True

    def time_left_s(self) -> float | None:
        return None if self._is_over or self._at_s is None else self._at_s - self._ending.clock()

    def time_passes(self) -> None:
        self._is_over = True
        self._take_report(self._after_s)
