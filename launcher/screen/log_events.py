"""`LogEvents`: writes what happens to a job into the file of ``--log-json``, beside the workers' output.

events ──► LogEvents ──► the screen, which keeps the order of output and events ──► JsonLog
"""

from __future__ import annotations

from collections.abc import Callable

from ..system.signals import shell_code, signal_name
from ..wire.messages import Event, Exited, InitDone, InitStarted, Interrupted, Lost, Stalled, Started
from ..workers.observer import Observer
from ..workers.roster import Roster


class LogEvents(Observer):
    """The events of one job."""

    def __init__(self, roster: Roster, record: Callable[..., None]) -> None:
        """``record`` gets the kind of each event and its facts by name: `Screen.record`."""
        self._roster = roster
        self._record = record

    def on_event(self, event: Event) -> None:  # one place for all kinds
        match event:
            case Started() if event.worker in self._roster:
                self._record("started", **self._about(event.worker), pid=event.pid)
            case InitStarted() if event.worker in self._roster:
                self._record("init", **self._about(event.worker))
            case InitDone() if event.worker in self._roster:
                self._record("connected", **self._about(event.worker))
            case Stalled() if event.worker in self._roster:
                self._record("stalled", **self._about(event.worker), waited_s=event.waited_s)
            case Exited() if event.worker in self._roster:
                code = shell_code(event.returncode)
                self._record("exited", **self._about(event.worker), exit_code=code, peer_lost=event.peer_lost)
            case Lost():
                self._record("lost", host=event.host, why=event.why)
            case Interrupted():
                self._record("signal", signal=signal_name(event.signum))

    def _about(self, worker: int) -> dict[str, object]:
        record = self._roster[worker]
        return {"worker": worker, "rank": record.rank, "host": record.host}
