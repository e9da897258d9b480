"""
`FaultQuestions`: asks hvdlite-run, through its store, whether a fault of ``--chaos`` may happen in this worker now.

    may_begin ── chaos/ask/<worker> ── hvdlite-run notes the fault ── chaos/answer/<worker>/<n> ── now, or later

`runtime.elastic_world` makes one for `faults`. The answer comes before the fault, so hvdlite-run's report has each of
them.
"""

from __future__ import annotations

import itertools

from .store_client import StoreClient


class FaultQuestions:
    """The questions of one worker."""

    def __init__(self, store_url: str, worker: int) -> None:
        self._client = StoreClient.from_url(store_url)
        self._worker = worker
        self._numbers = itertools.count()

    def may_begin(self, index: int, step: int) -> bool:
        """Returns whether the fault at this place of HVDLITE_CHAOS may happen in this step; waits for the answer."""
        number = next(self._numbers)
        try:
            self._client.set({b"chaos/ask/%d" % self._worker: b"%d %d %d" % (number, index, step)})
            (answer,) = self._client.get([b"chaos/answer/%d/%d" % (self._worker, number)])
        except (OSError, ValueError):  # the job ends
            return False
        return answer == b"now"
