"""`Watch`: shows a running job to those who look at it, in its own terminal (``--watch``) and from other processes.

    JobProgress ── after each question ──► Watch ── JobView ──► the screen's live view, or plain lines
    hvdlite-run --watch PID ── console ── WatchAsked ──► Watch ── JobView, as JSON

`supervisor` tells it of all events. Workers are asked as long as somebody looks. `launch` creates it for every job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..screen.display import View
from ..wire.messages import Event, WatchAsked
from ..workers.observer import Observer
from .job_facts import JobFacts
from .job_view import JobView
from .live_view import LiveView

EACH_S = 2.0
"""How often the workers are asked, and the view is drawn."""

# How long one look of another process has them asked for.
_LOOKED_AT_S = 3 * EACH_S
_LINE_EACH_S = 10.0


class Watch(Observer):
    """The views of one job."""

    def __init__(self, facts: JobFacts, command: Sequence[str]) -> None:
        self._facts = facts
        self._command = command
        self._line_at_s = _LINE_EACH_S / 2

    def draw_with(self, view: LiveView, set_view: Callable[[View], None]) -> None:
        """Draws the job after each question, from now on."""
        self._facts.progress.show_with(lambda: set_view(partial(view.lines, self._view())))

    def tell_with(self, say: Callable[[str], None]) -> None:
        """Says in a line how far the job is, each 10 s."""

        def tell() -> None:
            if self._facts.age_s >= self._line_at_s:
                self._line_at_s = self._facts.age_s + _LINE_EACH_S - EACH_S / 2
                say(self._view().plain_line())

        self._facts.progress.show_with(tell)

    def on_event(self, event: Event) -> None:
        if isinstance(event, WatchAsked):
            self._facts.progress.hurry(EACH_S, _LOOKED_AT_S)
            event.answer(self._view().data())

    def _view(self) -> JobView:
        return JobView.of(self._facts, self._command)
