"""`FirstMinute`: says what a job waits for until its workers write something or are connected.

    events ──► FirstMinute ──► the screen's status, one line that is redrawn each second

Between Enter and a program's first line 10 to 20 s pass, for Python's imports. `launch` makes one where stderr is a
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ..protocol.messages import (
    Answered,
    Event,
    Exited,
    HostsFound,
    InitDone,
    InitStarted,
    Interrupted,
    Lost,
    Output,
    ScreenFailed,
    Started,
)
from ..workers.ending import Ending, Observer
from ..workers.failure_message import name_ranks, name_workers

_EACH_S = 1.0
_MOST_NAMED = 4


class FirstMinute(Observer):
    """The status of a job that has just been started, which goes away for good."""

    def __init__(self, ending: Ending, set_status: Callable[..., None]) -> None:
        self._ending = ending
        self._set_status = set_status
        self._began_at = self._ending.clock()
        self._next_at: float | None = self._began_at
        self._hosts: dict[str, bool] = {}  # of an elastic job, and whether each has answered
        self._started: set[int] = set()
        self._in_init: set[int] = set()
        self._connected: set[int] = set()

    def on_event(self, event: Event) -> None:
        if self._next_at is None:
            return
        match event:
            case Output() | Exited() | Interrupted() | ScreenFailed():
                self._end()
                return
            case HostsFound():
                self._hosts = {host: self._hosts.get(host, False) for host in event.hosts}
            case Answered():
                self._hosts[event.host] = True
            case Lost():
                self._hosts.pop(event.host, None)
            case Started():
                self._started.add(event.worker)
            case InitStarted():
                self._in_init.add(event.worker)
            case InitDone():
                self._connected.add(event.worker)
                if self._connected.issuperset(self._ending.running):
                    self._end()
                    return
            case _:
                return
        self._next_at = self._ending.clock()

    def time_left_s(self) -> float | None:
        return None if self._next_at is None else self._next_at - self._ending.clock()

    def time_passes(self) -> None:
        now_s = self._ending.clock()
        self._next_at = now_s + _EACH_S
        self._set_status(f"hvdlite-run: {self._words()} ({now_s - self._began_at:.0f} s)")

    def _end(self) -> None:
        self._next_at = None
        self._set_status()

    def _words(self) -> str:
        workers = self._ending.running
        if not workers:
            waiting = [host for host, has_answered in self._hosts.items() if not has_answered]
            return f"connecting to {_list(waiting)}" if waiting else "waiting for hosts"
        hosts = self._ending.roster.hosts_of(workers)
        on = f"on {len(hosts)} hosts" if len(hosts) > 1 else f"on {hosts[0]}"
        count = f"{len(workers)} worker{'' if len(workers) == 1 else 's'}"
        if not workers <= self._started:
            return f"starting {count} {on}"
        if not self._in_init:
            return f"{count} {on}: importing, no output yet"
        if not workers <= self._in_init:
            return f"{len(workers & self._in_init)} of {count} in hvd.init(), {self._missing(workers - self._in_init)}"
        return f"{len(workers & self._connected)} of {len(workers)} connected"

    def _missing(self, workers: Collection[int]) -> str:
        if len(workers) > _MOST_NAMED:
            return f"waiting for {len(workers)} others"
        ranks = [rank for number in workers if (rank := self._ending.roster[number].rank) is not None]
        name = name_ranks(ranks) if len(ranks) == len(workers) else name_workers(workers)
        return f"waiting for {name} on {_list(self._ending.roster.hosts_of(workers))}"


def _list(names: list[str]) -> str:
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
