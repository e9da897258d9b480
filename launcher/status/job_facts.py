"""`JobFacts`: what has become of a job so far: its age, workers and hosts, faults, generations, and how workers ended.

`supervisor` tells it of all events. `metrics`, `summary` and the end of the job's output show it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..protocol.messages import Event, Exited, InitStarted, Lost, PeakMemory, Started
from ..system.process_tree import shell_code, signal_name
from ..workers.ending import Ending, Observer
from ..workers.failure_message import name_ranks, name_workers
from .progress import JobProgress
from .rank_status import RankStatus

# An elastic job may have any number of workers, one after another, and of generations.
_MOST_ENDS = 10_000
_MOST_ROWS = 50
_MOST_NAMED = 16


@dataclass(frozen=True)
class GenerationRow:
    """One generation of an elastic job. ``at_s`` counts from the job's start; ``came`` and ``left`` name workers."""

    generation: int
    at_s: float
    size: int
    came: Sequence[str]
    left: Sequence[str]


class GenerationTable:
    """The first generation and the newest ones, shown at the job's end."""

    def __init__(self) -> None:
        self._first: list[GenerationRow] = []
        self._newest: deque[GenerationRow] = deque(maxlen=_MOST_ROWS)

    def add(self, row: GenerationRow) -> None:
        (self._newest if self._first else self._first).append(row)

    def rows(self) -> list[GenerationRow]:
        return [*self._first, *self._newest]

    def text(self) -> str:
        """Returns the table; nothing if there was one generation at most."""
        if not self._newest:
            return ""
        lines = [f"{'generation':>10}  {'after':>9}  {'ranks':>5}  changes", *_lines(self._first[0])]
        if omitted := self._newest[0].generation - self._first[0].generation - 1:
            lines.append(f"{'...':>10}  {omitted} more")
        return "\n".join([*lines, *(line for row in self._newest for line in _lines(row))])


def _lines(row: GenerationRow) -> list[str]:
    changes = [*(f"- {each}" for each in row.left), *(f"+ {each}" for each in row.came)] or ["the same ranks again"]
    first = f"{row.generation:>10}  {row.at_s:>7.1f} s  {row.size:>5}  {changes[0]}"
    return [first, *(" " * 30 + each for each in changes[1:])]


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
    _has_init: set[int] = field(default_factory=set)
    # The ranks, by the worker's number, of those that have trained a model of their own, and met no other rank.
    _apart: dict[int, int | None] = field(default_factory=dict)

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
        return self.table.rows()[-1].generation if self.table.rows() else 0

    def on_event(self, event: Event) -> None:
        ending, roster = self.ending, self.ending.roster
        match event:
            case Started() if event.worker in roster:
                self.hosts[roster[event.worker].host] = None
                self.most_workers = max(self.most_workers, len(ending.running))
            case InitStarted():
                self._has_init.add(event.worker)
            case Exited() if event.worker in roster:
                is_fault = event.returncode != 0 and not event.peer_lost and ending.outcome is None
                how = f"killed by {signal_name(-event.returncode)}" if event.returncode < 0 else ""
                if event.returncode >= 0:
                    how = "lost a peer" if event.peer_lost else f"exit code {event.returncode}"
                if event.apart and event.returncode == 0:
                    self._apart[event.worker] = roster[event.worker].rank
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

    def warning(self) -> str:
        """Returns the warning of ranks that trained without each other (`host.worker_hooks`); "" if none did."""
        if not self._apart or self.most_workers < 2:
            return ""
        first = "" if self._apart.keys() <= self._has_init else "call hvd.init(), and "
        what = "trained without the others: it made an optimizer and exchanged nothing, so its model is its own"
        if (count := len(self._apart)) > 1:
            what = "trained without each other: each made an optimizer and exchanged nothing, so there are "
            what += f"{count} models"
        ranks = [rank for rank in self._apart.values() if rank is not None]
        # In an elastic job a worker has no rank before it calls hvd.init().
        name, numbers = (name_ranks, sorted(ranks)) if len(ranks) == count else (name_workers, [*self._apart])
        more = f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""
        return (
            f"warning: {name(numbers[:_MOST_NAMED])}{more} {what}. To train one model, {first}wrap the optimizer: "
            "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()); with Accelerate on CPUs, "
            "set ACCELERATE_USE_CPU=1. If this is meant, give --independent"
        )
