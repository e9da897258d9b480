"""Runs a job, and restarts it after a failure, as often as its `RestartSpec` allows.

    run_attempts ──► launch ── a worker failed, or a host was lost ──► launch, on the hosts that are left ...

For programs without elastic training: all processes of an attempt have ended when the next one begins. `cli` calls it
for every job. Jobs without a `RestartSpec` are launched once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace

from ..agents.wait_for_agents import UnreachableError
from ..plan.hosts import Host
from ..plan.job_spec import JobSpec
from ..plan.worker_environment import WorkerEnvironment
from ..store.server import Store
from ..system.terminal_text import say
from ..workers.failure_message import JobOutcome
from .launch import count_slots, launch


def run_attempts(job: JobSpec, new_store: Callable[[], Store] | None = None) -> JobOutcome:
    """Runs a job and returns the outcome of its last attempt; see `launch`.

    ``new_store`` makes the store of each attempt, for a caller that exchanges values with the workers.

    Standard input goes to the first attempt. Files of ``record_dir`` and ``report_dir`` are in a directory
    ``restart.N`` for the N-th restart.
    """
    if job.restart is None:
        return launch(job, None if new_store is None else new_store())
    hosts = count_slots(job)
    outcome = _attempt(job, hosts, 0, new_store)
    for number in range(1, job.restart.max_restarts + 1):
        if not outcome.may_be_followed:
            break
        hosts = tuple(host for host in hosts if host.is_here or host.label != outcome.lost_host)
        why = outcome.message.split("\n")[0].partition(". ")[0]
        if number == 1:
            _close_standard_input()
        while _has_slots(job, hosts):
            size = _size(job, hosts)
            say(
                f"restart {number} of {job.restart.max_restarts} (--max-restarts): {why}; now {size} "
                f"worker{'s' if size > 1 else ''} on {', '.join(host.label for host in hosts)}"
            )
            try:
                outcome = _attempt(job, hosts, number, new_store)
            except UnreachableError as error:
                hosts = tuple(host for host in hosts if host.label not in error.hosts)
                why = f"{', '.join(sorted(error.hosts))} cannot be reached"
                continue
            break
        else:
            break
    return outcome


def _attempt(job: JobSpec, hosts: tuple[Host, ...], number: int, new_store: Callable[[], Store] | None) -> JobOutcome:
    assert job.restart is not None
    counts = {
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_MAX_RESTARTS": str(job.restart.max_restarts),
    }
    here, elsewhere = job.environment.here, job.environment.elsewhere
    attempt = replace(
        job,
        hosts=hosts,
        attempt=number,
        size=job.size if number == 0 else _size(job, hosts),
        environment=WorkerEnvironment({**here, **counts}, {**elsewhere, **counts}),
        record_dir=_directory(job.record_dir, number),
        report_dir=_directory(job.report_dir, number),
    )
    return launch(attempt, None if new_store is None else new_store())


def _has_slots(job: JobSpec, hosts: Collection[Host]) -> bool:
    assert job.restart is not None
    slots, least = sum(host.slots for host in hosts), job.restart.min_np
    if slots < least:
        left = ", ".join(host.label for host in hosts) or "none"
        say(f"no restart: the hosts that are left ({left}) have {slots} slots for at least {least} workers (--min-np)")
    return slots >= least


def _size(job: JobSpec, hosts: Collection[Host]) -> int:
    slots = sum(host.slots for host in hosts)
    return slots if job.size is None else min(job.size, slots)


def _directory(path: str | None, number: int) -> str | None:
    return path if number == 0 or path is None else os.path.join(path, f"restart.{number}")


def _close_standard_input() -> None:
    """Makes later reads of standard input return its end.

    A thread of the first attempt may still be in a read. What that returns was meant for workers that have ended.
    """
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
