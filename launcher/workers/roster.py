"""What is known of each worker of a job: its host, its rank, its pid, and the last lines that it wrote.

`supervisor` keeps it up to date; `ending` and the judgements take names of workers from it, and what to quote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..protocol.messages import Exited, Output, Stream
from .failure_message import Failure, Tail, name_ranks, name_workers


@dataclass
class WorkerRecord:
    """``rank`` is the worker's rank now; None before it has one, in an elastic job."""

    host: str
    rank: int | None
    pid: int = 0
    written: Mapping[Stream, Tail] = field(default_factory=lambda: {"stderr": Tail(), "stdout": Tail()})


class Roster(dict[int, WorkerRecord]):
    """The records of workers, by their numbers."""

    def add(self, number: int, host: str, rank: int | None = None) -> None:
        self[number] = WorkerRecord(host, rank)

    def note(self, output: Output) -> None:
        """Keeps what a worker wrote, as its last lines may be the reason for its failure."""
        self[output.worker].written[output.stream].add(output.data)

    def on_host(self, host: str) -> list[int]:
        return [number for number, record in self.items() if record.host == host]

    def hosts_of(self, numbers: Iterable[int]) -> list[str]:
        """Returns the hosts of these workers, each once. Any thread may ask, also of workers that have just ended."""
        return list(dict.fromkeys(record.host for number in numbers if (record := self.get(number)) is not None))

    def name(self, numbers: Collection[int]) -> str:
        """Returns the ranks of these workers, as in ``ranks 0, 2``; those without a rank by number."""
        ranks = [rank for number in numbers if (rank := self[number].rank) is not None]
        others = [number for number in numbers if self[number].rank is None]
        named = [name_ranks(ranks)] if ranks else []
        if others:
            named.append(name_workers(others))
        return " and ".join(named)

    def failure(self, end: Exited) -> Failure:
        """Returns what is to be told of a worker that has failed."""
        record = self[end.worker]
        lines = {stream: tail.lines() for stream, tail in record.written.items()}
        return Failure(record.rank, record.host, record.pid, end.returncode, worker=end.worker, **lines)
