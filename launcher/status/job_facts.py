"""`JobFacts`: what has become of a job so far: its age, workers and hosts, faults, generations, and how workers ended.

`supervisor` tells it of all events. `metrics` and `summary` show it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from ..system.signals import shell_code, signal_name
from ..wire.messages import Event, Exited, Lost, PeakMemory, Started
from ..workers.generation_table import GenerationRow, GenerationTable
from ..workers.roster import Roster
from .progress import JobProgress
from .rank_status import RankStatus

# An elastic job may have any number of workers, one after another.
_MOST_ENDS = 10_000


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker has ended. ``is_fault``: by itself, and not since the job was ending or another was lost.

    ``at_s`` counts from the job's start, ``last`` is how far it had come.
    """

    worker: int
    rank: int | None
    host: str
    at_s: float
    exit_code: int | None
    how: str
    is_fault: bool
    peak_memory: int
    last: RankStatus


@dataclass
class JobFacts:
    """The facts of one job that runs, or has run.

    ``running`` returns the numbers of the workers that run, ``is_ending`` whether the job's end is decided. ``table``
    has the generations of an elastic job, None in others.
    """

    roster: Roster
    progress: JobProgress
    running: Callable[[], Collection[int]]
    is_ending: Callable[[], bool]
    table: GenerationTable | None
    clock: Callable[[], float]
    faults: int = 0
    """How many workers have failed by themselves, and hosts were lost, before the job's end was decided."""
    most_workers: int = 0
    hosts: dict[str, None] = field(default_factory=dict)
    ends: deque[WorkerEnd] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))

    def __post_init__(self) -> None:
        self.began_at = time.time()
        self._began_s = self.clock()

    @property
    def age_s(self) -> float:
        return self.clock() - self._began_s

    @property
    def generation(self) -> int:
        """The number of the newest generation; 1 in a job whose ranks stay the same, 0 before there is one."""
        if self.table is None:
            return 1
        return self.table.newest.generation if self.table.newest is not None else 0

    def on_event(self, event: Event) -> None:
        match event:
            case Started() if event.worker in self.roster:
                self.hosts[self.roster[event.worker].host] = None
                self.most_workers = max(self.most_workers, len(self.running()))
            case Exited() if event.worker in self.roster:
                is_fault = event.returncode != 0 and not event.peer_lost and not self.is_ending()
                how = f"killed by {signal_name(-event.returncode)}" if event.returncode < 0 else ""
                if event.returncode >= 0:
                    how = "lost a peer" if event.peer_lost else f"exit code {event.returncode}"
                self._note_end(event.worker, shell_code(event.returncode), how, event.peak_memory, is_fault=is_fault)
                self.faults += is_fault
            case PeakMemory():
                for index, end in enumerate(self.ends):
                    if end.worker == event.worker:
                        self.ends[index] = replace(end, peak_memory=max(event.size, end.peak_memory))
            case Lost():
                workers = [worker for worker in self.roster.on_host(event.host) if worker in self.running()]
                if workers:
                    self.faults += not self.is_ending()
                for worker in workers:
                    self._note_end(worker, None, f"lost {event.host}: {event.why}", 0, is_fault=not self.is_ending())

    def time_left_s(self) -> None:
        """It has nothing to do in time."""

    def time_passes(self) -> None:
        """See `time_left_s`."""

    def _note_end(self, worker: int, exit_code: int | None, how: str, peak_memory: int, *, is_fault: bool) -> None:
        record, last = self.roster[worker], self.progress.of(worker)
        peak = max(peak_memory, last.memory)
        self.ends.append(WorkerEnd(worker, record.rank, record.host, self.age_s, exit_code, how, is_fault, peak, last))
        self.progress.forget(worker)

    def last_ends(self) -> list[WorkerEnd]:
        """Returns how the last worker of each rank has ended, by rank."""
        last = {end.rank: end for end in self.ends if end.rank is not None}
        return [last[rank] for rank in sorted(last)]

    def last_ranks(self) -> list[RankStatus]:
        """Returns how far each rank had come when the last worker with that rank ended."""
        return [replace(end.last, rank=end.rank) for end in self.last_ends()]

    def rows(self) -> Sequence[GenerationRow]:
        """Returns the generations that are known, as rows of `GenerationTable`."""
        return () if self.table is None else self.table.rows()
