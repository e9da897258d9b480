"""``--summary``: how a job has ended, as one JSON object in a file, for programs that look at jobs afterwards.

    JobFacts, JobOutcome ──► summary_data ──► FILE

`launch` writes it once the job has ended, after each attempt of a job that is restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..workers.failure_message import JobOutcome
from .job_facts import JobFacts, WorkerEnd


def summary_data(facts: JobFacts, outcome: JobOutcome, command: Sequence[str], restarts: int) -> dict[str, Any]:
    """Returns what the file says of one attempt of a job, for JSON; ``restarts`` is how many there were before it.

    Times are Unix time, and seconds from its start.
    """
    verdict, rows = _verdict(outcome), () if facts.table is None else facts.table.rows()
    return {
        "verdict": verdict,
        "why": outcome.message,
        "next": _next(verdict, outcome),
        "exit_code": outcome.exit_code,
        "first_failed_rank": outcome.rank,
        "lost_host": outcome.lost_host,
        "started_at": round(facts.began_at, 3),
        "ended_at": round(facts.began_at + facts.age_s, 3),
        "duration_s": round(facts.age_s, 3),
        "command": list(command),
        "hosts": list(facts.hosts),
        "most_workers": facts.most_workers,
        "faults": facts.faults,
        "restarts": restarts,
        "bytes": {host: asdict(count) for host, count in facts.progress.total_bytes.items()},
        "generations": [{**asdict(row), "at_s": round(row.at_s, 3)} for row in rows],
        "ranks": [_rank(end) for end in facts.last_ends()],
        "losses": [_loss(end) for end in facts.ends if end.is_fault],
        "peak_memory_bytes": max((end.peak_memory for end in facts.ends), default=0),
    }


def _verdict(outcome: JobOutcome) -> str:
    """Returns "done", "interrupted", "lost host" or "failed"."""
    if outcome.exit_code == 0:
        return "done"
    if outcome.hasty and outcome.rank is None and not outcome.message:
        return "interrupted"
    return "failed" if outcome.lost_host is None else "lost host"


def _next(verdict: str, outcome: JobOutcome) -> str:
    """Returns what the user may do."""
    match verdict:
        case "done":
            return ""
        case "interrupted":
            return "Run the same command again: a program that has written a checkpoint goes on from it."
        case "lost host":
            return (
                f"Look at {outcome.lost_host}, and run the job without it (-H) meanwhile. With --min-np, or with "
                "--on-failure restart, a job goes on without a lost host."
            )
    if outcome.exit_code == 137:
        return "A process was killed, as when memory runs out: see peak_memory_bytes, and the kernel's log on its host."
    if outcome.rank is None:
        return "See why: it names the cause, and the flag that matters."
    return f"Look at the traceback in why: rank {outcome.rank} failed first, and the others ended because of it."


def _rank(end: WorkerEnd) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "worker": end.worker,
        "host": end.host,
        "steps": dict(end.last.steps),
        "steps_per_s": None if end.last.rate is None else round(end.last.rate, 3),
        "cpu_s": end.last.cpu_s,
        "peak_memory_bytes": end.peak_memory,
        "exit_code": end.exit_code,
        "ended": end.how,
    }


def _loss(end: WorkerEnd) -> dict[str, Any]:
    return {
        "at_s": round(end.at_s, 3),
        "worker": end.worker,
        "rank": end.rank,
        "host": end.host,
        "exit_code": end.exit_code,
        "how": end.how,
    }
