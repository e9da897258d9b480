"""`RankStatus`: what is known of one rank at a moment. Reports, the live view, metrics and the summary are views of it.

WorkerStatus, as its agent tells it ──► RankStatus, with its rank and host ──► `reports`
                                            └─► `progress`, which adds what is a difference over time

The tables at the end have what the views show of a rank: a new value is a row there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hvdlite_wire.worker_status import Frame, Process, WorkerStatus

from ..workers.ending import Roster

# Functions in which a program waits for other ranks, by what their files' paths end with. A program of plain
# torch.distributed says nothing else of its waits.
_WAITS = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py", "hvdlite/comm/work.py")
# The same, for files that also have functions of other kinds: only the innermost frame counts. In the second of them
# DDP compares and sends parameters.
_WAITS_INNERMOST = (
    "torch/distributed/rendezvous.py",
    "torch/distributed/utils.py",
    "torch/distributed/_functional_collectives.py",
)
_BACKWARD = "torch/autograd/graph.py"
# There may be more such directories than a rank knows to be libraries, as by PYTHONPATH.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(.*?)(?:/|\.py|$)")
_MOST_CHARACTERS = 200
# What a report has of a rank as data, in this order, before what follows from it.
_DATA = (
    *("worker", "rank", "host", "pid", "processes", "threads", "waits", "optimizers", "libraries", "addresses"),
    *("silent_s", "source", "can_answer", "is_ending", "has_come", "load", "cores", "nccl"),
)


@dataclass(frozen=True)
class RankStatus(WorkerStatus):
    """The status of one rank. ``rank`` is None before it has one.

    ``has_come`` is False if a report has nothing of it, as its agent sent nothing in time. ``rate``: steps per second,
    ``sample_rate``: samples per second, and ``cpu_use`` processors in use; None until there are two answers, or if it
    is not known. ``cost`` and ``slow_phase``: see `hvdlite_wire.worker_status.Pace`.
    """

    rank: int | None = None
    host: str = ""
    has_come: bool = True
    rate: float | None = None
    sample_rate: float | None = None
    cpu_use: float | None = None
    cost: float | None = None
    slow_phase: str = ""

    @classmethod
    def known(cls, worker: int, roster: Roster, told: WorkerStatus | None = None, **more: Any) -> RankStatus:
        """Returns what the launcher knows of a worker, with what its agent has ``told``."""
        record = roster[worker]
        own = vars(told or WorkerStatus(pid=record.pid))
        return cls(**{**own, "worker": worker, "rank": record.rank, "host": record.host, **more})

    @property
    def name(self) -> str:
        return f"worker {self.worker}" if self.rank is None else f"rank {self.rank}"

    @property
    def step(self) -> int | None:
        """The steps of the optimizer that has taken the most, in a report of the first one; None if there is none."""
        return self.optimizers[0].step if self.optimizers else max(self.steps.values(), default=None)

    @property
    def waits_for(self) -> str:
        """What it has waited for in other ranks for the longest; "" if it does not wait."""
        return self.waits[0].what[:_MOST_CHARACTERS] if self.waits else ""

    @property
    def waited_s(self) -> float:
        return self.waits[0].waited_s if self.waits else 0.0

    @property
    def process(self) -> Process | None:
        """Its process, as the system describes it; None if that is not known."""
        return next((each for each in self.processes if each.pid == self.pid), None)

    @property
    def state(self) -> str:
        """The state of the process, as psutil names it; "" if it is not known."""
        return "" if self.process is None else self.process.state

    @property
    def main(self) -> tuple[Frame, ...]:
        """The frames of the main thread, the outermost first."""
        return next((each.frames for each in self.threads if each.is_main), ())

    def place(self) -> Frame | None:
        """Returns the innermost frame of the user's own program in the main thread; None if there is none.

        Of an installed program, it is the innermost frame of any installed package but hvdlite and torch.
        """
        inward = self.main[::-1]
        return next(filter(self.is_users, inward), None) or next(filter(_is_of_a_package, inward), None)

    def is_users(self, frame: Frame) -> bool:
        return not frame.file.startswith((*self.libraries, "<frozen")) and not _INSTALLED.search(frame.file)

    def is_waiting(self) -> bool:
        """Whether the program waits for other ranks.

        DDP waits at the end of a backward pass, where its stack is that of a rank that computes. So a backward pass in
        which the process sleeps is taken for a wait, unless gradients are averaged by hvdlite, which tells its waits.
        """
        if self.waits:
            return True
        inner, innermost = self.main[-6:], self.main[-1:]
        if any(frame.file.endswith(_WAITS) for frame in inner):
            return True
        if any(frame.file.endswith(_BACKWARD) for frame in innermost):
            return self.state == "sleeping" and not self.optimizers
        return any(frame.file.endswith(_WAITS_INNERMOST) for frame in innermost)

    def can_run(self) -> bool:
        """Whether the process can run its program: its host answers, and it is not stopped, ended, or silent."""
        return self.has_come and self.state not in ("stopped", "tracing-stop", "zombie") and not self.is_silent

    def report_data(self) -> dict[str, Any]:
        """Returns what a report has of it, for JSON."""
        data, place = asdict(self), self.place()
        return {
            **{name: data[name] for name in _DATA},
            "source": self.source.value,
            "state": self.state,
            "place": None if place is None else asdict(place),
            "is_waiting": self.is_waiting(),
        }


def _is_of_a_package(frame: Frame) -> bool:
    found = _INSTALLED.search(frame.file)
    return found is not None and found[1] not in ("torch", "hvdlite")


def sorted_by_rank(those: Iterable[RankStatus]) -> list[RankStatus]:
    """Returns them by rank; those without one at the end, by number."""
    return sorted(those, key=lambda each: (each.rank is None, each.rank, each.worker))


def in_short(number: float) -> str:
    """Returns a number with three digits or so."""
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def bytes_in_short(count: float) -> str:
    """Returns bytes in units of powers of 1000, as networks and `free --si` count them."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
    scale, unit = next((each for each in units if count >= each[0]), (1e3, "kB"))
    return f"{count / scale:.{0 if count >= 10 * scale else 1}f} {unit}"


# -- what the views show


class LiveColumn(NamedTuple):
    """``importance``: the columns with the lowest are left out first on narrow terminals."""

    importance: int
    cell: Callable[[RankStatus], str | None]


LIVE_COLUMNS: Mapping[str, LiveColumn] = {
    "step": LiveColumn(6, lambda rank: None if rank.step is None else str(rank.step)),
    "steps/s": LiveColumn(5, lambda rank: None if rank.rate is None else in_short(rank.rate)),
    "samples/s": LiveColumn(4, lambda rank: None if rank.sample_rate is None else in_short(rank.sample_rate)),
    "memory": LiveColumn(2, lambda rank: bytes_in_short(rank.memory) if rank.memory else None),
    "CPU": LiveColumn(1, lambda rank: None if rank.cpu_use is None else f"{rank.cpu_use:.0%}"),
    "GPU": LiveColumn(3, lambda rank: None if rank.gpu_use is None else f"{rank.gpu_use:.0%}"),
}


class Metric(NamedTuple):
    """A value of each rank for Prometheus; None where a rank has none. Gauges are of ranks that run."""

    name: str
    kind: str
    about: str
    value: Callable[[RankStatus], float | None]


METRICS = (
    Metric(
        "hvdlite_resident_bytes", "gauge", "Resident memory of the rank's process.", lambda rank: rank.memory or None
    ),
    Metric(
        "hvdlite_cpu_seconds_total",
        "counter",
        "Processor time of the rank's process.",
        lambda rank: rank.cpu_s if rank.memory else None,
    ),
    Metric(
        "hvdlite_waiting_seconds",
        "gauge",
        "For how long the rank has waited for other ranks; 0 if it does not.",
        lambda rank: rank.waited_s if rank.steps or rank.waits_for else None,
    ),
    Metric(
        "hvdlite_silent",
        "gauge",
        "Whether the rank did not answer: it is stopped, or an extension holds the interpreter's lock.",
        lambda rank: rank.is_silent,
    ),
)


def _buckets(rank: RankStatus) -> str | None:
    return f"{rank.optimizers[0].sent} of {rank.optimizers[0].buckets}" if rank.optimizers else None


def _waits(rank: RankStatus) -> str | None:
    if rank.waits:
        return rank.waits[0].what
    missing = rank.optimizers[0].missing if rank.optimizers else ()
    return f"no gradient yet: {', '.join(missing)}" if missing else None


# Of reports, by name; "–" stands for None.
REPORT_COLUMNS: Mapping[str, Callable[[RankStatus], object]] = {
    "rank": lambda rank: rank.rank,
    "worker": lambda rank: rank.worker,
    "host": lambda rank: rank.host,
    "pid": lambda rank: rank.pid,
    "state": lambda rank: rank.state or None,
    "cpu s": lambda rank: None if rank.process is None else f"{rank.process.cpu_s:.1f}",
    "MiB": lambda rank: None if rank.process is None else f"{rank.process.memory / 2**20:.0f}",
    "step": lambda rank: rank.step,
    "buckets": _buckets,
    "waits for": _waits,
}


def report_table(ranks: Sequence[RankStatus]) -> list[list[str]]:
    """Returns the rows of a report's table, the names of the columns first."""
    rows = [[cell(rank) for cell in REPORT_COLUMNS.values()] for rank in ranks]
    return [[*REPORT_COLUMNS], *(["–" if each is None else str(each) for each in row] for row in rows)]
