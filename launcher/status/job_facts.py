"""`JobFacts`: what has become of a job so far: its age, workers and hosts, faults, generations, and how workers ended.

`supervisor` tells it of all events. `metrics` and `summary` show it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from ..protocol.messages import Event, Exited, Lost, PeakMemory, Started
from ..system.process_tree import shell_code, signal_name
from ..workers.ending import Ending
from ..workers.generation_table import GenerationTable
from ..workers.observer import Observer
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
class JobFacts(Observer):
    """The facts of one job that runs, or has run. ``table`` has the generations of an elastic job, None in others."""

    ending: Ending
    progress: JobProgress
    table: GenerationTable | None
    faults: int = 0
    """How many workers have failed by themselves, and hosts were lost, before the job's end was decided."""
    most_workers: int = 0
    hosts: dict[str, None] = field(default_factory=dict)
    ends: deque[WorkerEnd] = field(default_factory=lambda: deque(maxlen=_MOST_ENDS))

    def __post_init__(self) -> None:
        self.began_at = time.time()
        self._began_s = self.ending.clock()

    @property
    def age_s(self) -> float:
        return self.ending.clock() - self._began_s

    @property
    def generation(self) -> int:
        """The number of the newest generation; 1 in a job whose ranks stay the same, 0 before there is one."""
        if self.table is None:
            return 1
        return self.table.newest.generation if self.table.newest is not None else 0

    def on_event(self, event: Event) -> None:
        ending, roster = self.ending, self.ending.roster
        match event:
            case Started() if event.worker in roster:
                self.hosts[roster[event.worker].host] = None
                self.most_workers = max(self.most_workers, len(ending.running))
            case Exited() if event.worker in roster:
                is_fault = event.returncode != 0 and not event.peer_lost and ending.outcome is None
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
                workers, is_fault = ending.running.intersection(roster.on_host(event.host)), ending.outcome is None
                self.faults += bool(workers) and is_fault
                for worker in sorted(workers):
                    self._note_end(worker, None, f"lost {event.host}: {event.why}", 0, is_fault=is_fault)

    def _note_end(self, worker: int, exit_code: int | None, how: str, peak_memory: int, *, is_fault: bool) -> None:
        record, last = self.ending.roster[worker], self.progress.of(worker)
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
