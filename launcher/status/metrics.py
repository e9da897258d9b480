"""``--metrics-textfile``: a job's numbers in a file for Prometheus, as node_exporter's textfile collector reads it.

    JobFacts, RankStatus ──► Metrics ──► FILE, replaced as a whole each 10 s and at the end

No port is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..system.user_files import ReplacedFile
from ..version import VERSION
from .job_facts import JobFacts
from .rank_status import METRICS, RankStatus

METRICS_EACH_S = 10.0
"""How often the file is written."""

Sample = tuple[Mapping[str, str], float]


class Metrics:
    def __init__(self, path: str, facts: JobFacts, say: Callable[[str], None]) -> None:
        """``say`` tells the user, once, that the file cannot be written any more."""
        self._file = ReplacedFile(f"--metrics-textfile {path}", path, say, after=". The job goes on")
        self._facts = facts
        self._due_at_s = 0.0

    def show(self) -> None:
        if self._facts.age_s >= self._due_at_s:
            self._due_at_s = self._facts.age_s + METRICS_EACH_S - 0.5  # the questions come at nearly that interval
            self.write(is_up=True)

    def write(self, *, is_up: bool, exit_code: int | None = None) -> None:
        """Writes the file; tells once if that fails, and goes on to try."""
        self._file.write(metrics_text(self._facts, is_up=is_up, exit_code=exit_code))


def metrics_text(facts: JobFacts, *, is_up: bool, exit_code: int | None = None) -> str:
    """Returns the numbers of a job in Prometheus' text format."""
    ranks = facts.progress.of_running() if is_up else facts.last_ranks()
    return "".join(
        line
        for name, kind, about, samples in _families(facts, ranks, is_up=is_up, exit_code=exit_code)
        if samples
        for line in (f"# HELP {name} {about}\n", f"# TYPE {name} {kind}\n", *(_line(name, *each) for each in samples))
    )


def _families(
    facts: JobFacts, ranks: Sequence[RankStatus], *, is_up: bool, exit_code: int | None
) -> Iterator[tuple[str, str, str, list[Sample]]]:
    """Yields name, type, help and samples of each metric."""
    one: Callable[[float], list[Sample]] = lambda value: [({}, value)]  # noqa: E731  # the shortest form
    yield "hvdlite_build_info", "gauge", "Version of hvdlite-run.", [({"version": VERSION}, 1)]
    yield "hvdlite_up", "gauge", "Whether the job runs.", one(is_up)
    yield "hvdlite_start_time_seconds", "gauge", "When the job began, in Unix time.", one(round(facts.began_at, 3))
    yield "hvdlite_workers", "gauge", "Workers that run.", one(len(ranks) if is_up else 0)
    yield "hvdlite_generation", "gauge", "Generation of an elastic job; 1 in others.", one(facts.generation)
    yield "hvdlite_faults_total", "counter", "Workers that failed by themselves, and lost hosts.", one(facts.faults)
    if exit_code is not None:
        yield "hvdlite_exit_code", "gauge", "Exit code of hvdlite-run.", one(exit_code)
    for way in ("sent", "received"):
        about = f"Bytes that the host has {way} over the interface towards the job's other hosts."
        totals = facts.progress.total_bytes.items()
        counts: list[Sample] = [({"host": host}, getattr(total, way)) for host, total in totals]
        yield f"hvdlite_network_{way}_bytes_total", "counter", about, counts
    named = [
        (each, {"rank": "" if each.rank is None else str(each.rank), "worker": str(each.worker), "host": each.host})
        for each in ranks
    ]
    steps: list[Sample] = [
        ({**labels, "optimizer": name.removeprefix("optimizer ")}, count)
        for rank, labels in named
        for name, count in rank.steps.items()
    ]
    yield "hvdlite_steps_total", "counter", "Steps that an optimizer has taken.", steps
    for name, kind, about, value_of in METRICS:
        if is_up or kind == "counter":
            found = ((labels, value_of(rank)) for rank, labels in named)
            yield name, kind, about, [(labels, value) for labels, value in found if value is not None]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inner}}} {float(value):.15g}\n" if inner else f"{name} {float(value):.15g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
