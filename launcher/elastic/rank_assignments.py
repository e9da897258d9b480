"""Writes into the store what the workers of an elastic job read there: their ranks, and changes of hosts.

    a worker asks after generation g ── a `RankAssignment`, or a `Dismissal` (see `hvdlite_wire.store_requests`)
    the ranks of generation g meet under world<g>/; its rank 0 reads world<g>/hosts/<n>, n = 0, 1, ...

`elastic_job` decides what is written. An assignment is deleted when the worker asks again or has ended, and the keys of
a generation when that is revoked, so the store does not grow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection

from hvdlite_wire.store_requests import ANSWERS, Dismissal, RankAssignment, assignment_key, standby_key

from ..store.server import Store


class RankAssignments:
    """The ranks assigned to one job's workers, and the keys of its current generation."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: dict[int, int] = {}  # the generation after which each worker asks for one, or asked last
        self._given: dict[int, bytes] = {}
        self._stand_by: set[int] = set()  # those that have taken back that they have asked, and were answered
        self._notices = 0
        self._notified_at = 0.0  # the time that was sent with the last change of hosts

    def asked(self, worker: int, after: int) -> None:
        self._take_away(worker)
        self._asked[worker] = after

    @property
    def those_who_asked(self) -> Collection[int]:
        return self._asked.keys()

    def give(self, worker: int, answer: RankAssignment | Dismissal) -> None:
        key = self._given[worker] = assignment_key(worker, self._asked[worker])
        self._store.put(key, ANSWERS.encode(answer))

    def take_back(self, worker: int) -> bool:
        """Answers a worker that takes back that it has asked: it can unless it has a rank by now."""
        can = worker not in self._given
        self._stand_by.add(worker)
        self._store.put(standby_key(worker), b"%d" % can)
        return can

    def forget(self, worker: int) -> None:
        if worker in self._stand_by:
            self._stand_by.discard(worker)
            self._store.delete(standby_key(worker))
        if worker in self._asked and worker not in self._given:
            self.give(worker, Dismissal("it has ended"))  # nobody reads it, but the store drops the request
        self._take_away(worker)
        self._asked.pop(worker, None)

    def tell_of_hosts(self, generation: int, *, added: bool, removed: bool) -> None:
        """Tells rank 0 of a generation that hosts have changed."""
        # Workers ignore a change that is not newer than the last one, and the clock may be set back.
        self._notified_at = max(time.time(), self._notified_at + 0.001)
        news = {"timestamp": self._notified_at, "added": added, "removed": removed}
        self._store.put(b"world%d/hosts/%d" % (generation, self._notices), json.dumps(news).encode())
        self._notices += 1

    def revoke(self, generation: int, why: str) -> None:
        """Makes all requests for keys of a generation, and of earlier ones, fail with the reason ``why``."""
        self._store.revoke(generation, why)

    def begin(self, generation: int) -> None:
        self.revoke(generation - 1, f"there is generation {generation}")
        self._notices = 0

    def _take_away(self, worker: int) -> None:
        if key := self._given.pop(worker, None):
            self._store.delete(key)
