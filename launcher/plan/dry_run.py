"""Shows the plan of a job as text, before anything is started, for hvdlite-run --dry-run.

Of each worker's environment it shows only what hvdlite-run sets: the user's other variables may be secret.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from hvdlite_wire.job_contract import worker_form

from ..system.job_directory import temporary_directory
from ..system.machine import usable_cores
from ..system.network import loopback_interface
from .chaos_spec import ChaosSpec
from .hosts import Host, Slot
from .job_spec import ElasticSpec, JobSpec
from .worker_environment import HostEnvironment, elastic_environment, job_dir, slot_environment, variables_set


def dry_run(job: JobSpec, slots: Sequence[Slot], by_flags: Mapping[str, str]) -> str:
    """Returns what all of the job's ``slots`` share, and a paragraph for each, with what is known on this host.

    ``by_flags`` are the variables that flags set for all workers.
    """
    first, is_alone = slots[0].host, len({slot.host for slot in slots}) == 1
    address = "127.0.0.1" if is_alone else f"<the address of {first.label}>"
    places: list[tuple[str, Mapping[str, str]]] = []
    for slot in slots:
        own = slot_environment(slot, len(slots), master_address=address, master_port=0)
        own["MASTER_PORT"] = f"<a free port of {first.label}>"
        place = (
            f"rank {slot.rank} on {slot.host.label}: local rank {slot.local_rank} of {slot.local_size}, "
            f"cross rank {slot.cross_rank} of {slot.cross_size}"
        )
        places.append((place, _variables(job, slot.host, own, slot.local_size, by_flags, is_alone=is_alone)))
    return "\n".join(_paragraphs(job, places, "all ranks"))


def elastic_dry_run(
    job: JobSpec, hosts: Sequence[Host], workers: Sequence[tuple[int, Host, int]], by_flags: Mapping[str, str]
) -> str:
    """Returns the rules of an elastic job, its ``hosts`` now, and one paragraph for each of its first ``workers``.

    Each of these is a number, a host and a slot there. ``by_flags`` are the variables that flags set for all workers.
    """
    assert job.elastic is not None, "the caller has asked"
    is_alone = job.elastic.discovery is None and len(hosts) == 1
    places: list[tuple[str, Mapping[str, str]]] = []
    chaos = job.elastic.chaos or ChaosSpec()
    for number, host, slot in workers:
        faults = worker_form(each.of_worker for each in chaos.of_worker(number, job.elastic.policy.first_np))
        own = elastic_environment(number, host.label, slot, faults)
        place = f"worker {number} on {host.label}: local rank {slot}"
        places.append((place, _variables(job, host, own, host.slots, by_flags, is_alone=is_alone)))
    return "\n".join([_rules(job.elastic, hosts, has_workers=bool(workers)), *_paragraphs(job, places, "all workers")])


def _rules(elastic: ElasticSpec, hosts: Sequence[Host], *, has_workers: bool) -> str:
    policy, script = elastic.policy, elastic.discovery
    most = "with as many as there are slots" if policy.max_np is None else f"with {policy.max_np} at most"
    spares = f"; {policy.spares} besides wait for a place (--spares)" if policy.spares else ""
    found = ", ".join(f"{host.label}:{host.slots}" for host in hosts) or "none"
    lines = [
        f"elastic job: {policy.first_np} or more ranks at the beginning, {policy.min_np} or more later, {most}{spares}",
        f"hosts: {found}" if script is None else f"hosts: {found} (what --host-discovery-script prints now)",
        f"after a failure: {policy.on_failure.words(policy)}",
    ]
    if not has_workers:
        lines.append(
            f"too few slots to begin: waits for hosts for {policy.elastic_timeout_s:g} s (--elastic-timeout), "
            "and starts no worker before"
        )
    return "".join(f"{line}\n" for line in lines)


def _paragraphs(job: JobSpec, places: Sequence[tuple[str, Mapping[str, str]]], all_of_them: str) -> list[str]:
    """Returns a paragraph for each place with its own variables, after one for what all of them share."""
    runs = f"runs {shlex.join(job.command)} in {job.cwd}" if job.command else ""
    if len(places) < 2:
        return [f"{place}{runs and f'; {runs}'}\n{_lines(variables)}" for place, variables in places]
    first = places[0][1]
    shared = {name: value for name, value in first.items() if all(own.get(name) == value for _, own in places)}
    own = [(place, {name: of[name] for name in of if name not in shared}) for place, of in places]
    head = f"{all_of_them}{runs and f': {runs}'}\n{_lines(shared)}"
    return [head, *(f"{place}\n{_lines(variables)}" for place, variables in own)]


def _variables(
    job: JobSpec, host: Host, own: Mapping[str, str], slots: int, by_flags: Mapping[str, str], *, is_alone: bool
) -> dict[str, str]:
    """Returns what hvdlite-run sets for a worker, with words for what only its host knows.

    ``slots`` is how many workers the host has. ``is_alone``: the job has no other host.
    """
    given = job.environment.here if host.is_here else job.environment.elsewhere
    names = job.interface_of(host)
    interface = f"<the first of {names} that the host has>" if names and "," in names else names
    is_known = host.is_here and is_alone
    if is_known:
        directory = job_dir("<job>", temporary_directory())
        facts = HostEnvironment(directory, usable_cores(), interface or loopback_interface(), slots, is_alone)
    else:
        interface = interface or "<the interface towards the other hosts>"
        facts = HostEnvironment("<the host's directory for the job>", 1, interface, slots, is_alone)
    variables = variables_set(given, own, facts)
    if not is_known and "OMP_NUM_THREADS" not in given:
        variables["OMP_NUM_THREADS"] = f"<the host's cores / {slots}>"
    directories = ["hvdlite-run's sitecustomize", *(["hvdlite's horovod"] if job.as_horovod else [])]
    path = ", ".join(f"<the directory of {each} on that host>" for each in directories)
    return {**variables, **by_flags, "PYTHONPATH": f"{path}, then its other value"}


def _lines(variables: Mapping[str, str]) -> str:
    return "".join(f"    {name}={value}\n" for name, value in variables.items())
