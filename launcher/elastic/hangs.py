"""`Hangs`: finds workers of an elastic job that no longer respond while others wait for them.

    store ── ping/<worker>/<n> ── a thread of the worker ── Alive ──► Hangs ──► workers to end

Each worker is asked at least four times within the limit, and its answer says how long it has waited for other ranks.
Only a process that is stopped (SIGSTOP), or in which a C extension holds the interpreter's lock, cannot answer. It is
ended once it has been silent for the whole limit, if another worker waits then: in a collective, or in hvd.init() for
what ranks do. A spare waits for nobody.
A worker that answers may take its time, for example for a validation on rank 0 alone. Some seconds before one is ended,
a report is taken, which says where it stands.

`elastic_job` calls it. It uses no connection, thread or clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..protocol.messages import Alive, Unresponsive
from ..store.server import Store

_ASKED_PER_LIMIT = 4
_LONGEST_PAUSE_S = 2.5
# A report takes 4.5 s at most, and up to a pause passes until it is begun.
_REPORT_BEFORE_S = 7.0
# With a shorter limit no report is taken: a worker may be silent for half of it and respond.
_LEAST_LIMIT_S = 2 * _REPORT_BEFORE_S


@dataclass
class _LastQuestion:
    number: int
    at_s: float
    is_answered: bool = False
    waits: bool = False
    """Whether the worker waited for other ranks, by its last answer."""
    is_told: bool = False
    """Whether a report was taken, since the worker does not answer."""

    def key(self, worker: int) -> bytes:
        return b"ping/%d/%d" % (worker, self.number)


class Hangs:
    """The questions to all workers of one job, and what they have answered."""

    def __init__(
        self,
        limit_s: float,
        store: Store,
        clock: Callable[[], float],
        tell: Callable[[Unresponsive], None] = lambda _: None,
    ) -> None:
        """``limit_s`` is --hang-timeout; 0 for never, which asks nothing. ``tell`` has a report taken."""
        self.limit_s = limit_s
        self._pause_s = min(limit_s / _ASKED_PER_LIMIT, _LONGEST_PAUSE_S)
        self._store = store
        self._clock = clock
        self._tell = tell
        self._asked: dict[int, _LastQuestion] = {}
        self._looked_at_s = clock()

    def begin(self, worker: int) -> None:
        """Begins to ask a worker that has called hvd.init(), if it has not been asked before."""
        if self.limit_s and worker not in self._asked:
            self._ask(worker, 0)

    def forget(self, worker: int) -> None:
        asked = self._asked.pop(worker, None)
        if asked is not None and not asked.is_answered:
            self._store.delete(asked.key(worker))

    def answered(self, alive: Alive) -> None:
        """Takes a worker's answer; ignores one to an earlier question."""
        asked = self._asked.get(alive.worker)
        if asked is None or asked.is_answered or alive.number != asked.number:
            return
        self._store.delete(asked.key(alive.worker))
        # A collective takes a while in any case.
        asked.is_answered, asked.waits = True, alive.waited_s >= self._pause_s
        asked.at_s = self._clock()

    def due_s(self) -> float | None:
        """When `look` must be called, by the clock; None if no worker is to be asked."""
        return self._looked_at_s + self._pause_s if self._asked else None

    def look(self, waiting: Collection[int]) -> list[int]:
        """Asks again, and returns the workers to end. ``waiting`` are those in hvd.init() that wait for ranks."""
        now_s = self._clock()
        late_s = now_s - self._looked_at_s - self._pause_s
        if late_s < 0:
            return []
        self._looked_at_s = now_s
        if late_s > self._pause_s:
            # The launcher itself was stopped, and answers of that time are not read yet.
            for asked in self._asked.values():
                asked.at_s += late_s
        for worker, asked in list(self._asked.items()):
            if asked.is_answered:
                self._ask(worker, asked.number + 1, waits=asked.waits)
        silent = self._awaited(waiting, now_s, self.limit_s)
        if self.limit_s >= _LEAST_LIMIT_S:
            for worker in self._awaited(waiting, now_s, self.limit_s - _REPORT_BEFORE_S):
                asked = self._asked[worker]
                if not asked.is_told and worker not in silent:
                    self._tell(Unresponsive(worker, now_s - asked.at_s))
                asked.is_told = True
        return silent

    def those_who_wait(self, waiting: Collection[int]) -> list[int]:
        """Returns the workers that waited for others by their last answers, and those of ``waiting``, as for `look`."""
        return [worker for worker, asked in self._asked.items() if asked.waits or worker in waiting]

    def _awaited(self, waiting: Collection[int], now_s: float, limit_s: float) -> list[int]:
        """Returns the workers that have been silent for so long, if others wait."""
        silent = [
            worker for worker, asked in self._asked.items() if not asked.is_answered and now_s - asked.at_s >= limit_s
        ]
        return silent if any(worker not in silent for worker in self.those_who_wait(waiting)) else []

    def _ask(self, worker: int, number: int, *, waits: bool = False) -> None:
        asked = self._asked[worker] = _LastQuestion(number, self._clock(), waits=waits)
        self._store.put(asked.key(worker), b"%d" % number)
