"""`History`: a job's numbers over time, for the page of ``--summary``; `launch` has it called after each question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .job_facts import JobFacts
from .job_view import JobView

# So many points are as many as a chart can show.
_MOST = 600


@dataclass(frozen=True)
class Moment:
    """``rate``: steps per second. ``memory`` (bytes) and ``costs`` are by the rank's name, the network by host."""

    at_s: float
    ranks: int
    rate: float | None
    sample_rate: float | None
    memory: Mapping[str, float]
    costs: Mapping[str, float]
    sent: Mapping[str, float]
    received: Mapping[str, float]


class History:
    """The moments of one job. Once there are too many, every other one is dropped, and fewer are noted."""

    def __init__(self, facts: JobFacts) -> None:
        self.moments: list[Moment] = []
        self._facts = facts
        self._every = 1
        self._asked = 0

    def note(self) -> None:
        """Notes how the job is now, if it is time."""
        self._asked += 1
        if self._asked % self._every == 0:
            self.moments.append(_moment_of(JobView.of(self._facts, ())))
        if len(self.moments) == _MOST:
            del self.moments[::2]
            self._every *= 2


def _moment_of(view: JobView) -> Moment:
    return Moment(
        at_s=view.age_s,
        ranks=len(view.ranks),
        rate=view.rate,
        sample_rate=view.sample_rate,
        memory={rank.name: rank.memory for rank in view.ranks if rank.memory},
        costs={rank.name: rank.cost for rank in view.ranks if rank.cost is not None},
        sent={host: load.sent for host, load in view.hosts.items() if load.sent is not None},
        received={host: load.received for host, load in view.hosts.items() if load.received is not None},
    )
