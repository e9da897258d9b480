"""`Observer`: what `supervisor` tells of each event of a job, before it handles the event itself, and of time."""

from __future__ import annotations

from ..protocol.messages import Event


class Observer:
    """Ignores all events, and has nothing to do in time."""

    def on_event(self, event: Event) -> None:
        """Takes note of an event."""

    def time_left_s(self) -> float | None:
        """Returns the seconds until `time_passes` must be called; None if it need not be."""
        return None

    def time_passes(self) -> None:
        """Does what is due."""
