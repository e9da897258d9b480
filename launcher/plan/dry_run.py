"""Shows the plan of a job as text, before anything is started.

Of a worker's environment it shows what hvdlite-run itself sets; what the user has there may be secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .exported_variables import Environment
from .hosts import Host
from .slots import Slot
from .worker_environment import HostEnvironment, slot_environment, variables_set


def preview(
    slots: Sequence[Slot],
    environment: Environment,
    facts_of: Callable[[Host], HostEnvironment | None],
    interface_of: Callable[[Host], str | None] = lambda _: None,
    by_flags: Mapping[str, str] | None = None,
) -> str:
    """A paragraph for each rank. ``facts_of`` a host are None where only the host itself knows them.

    ``interface_of`` a host is what the user wants there; ``by_flags`` are variables that flags set for all.
    """
    hosts = {slot.host for slot in slots}
    first = slots[0].host
    address = "127.0.0.1" if len(hosts) == 1 else f"<the address of {first.label}>"
    paragraphs = []
    for slot in slots:
        own = slot_environment(slot, len(slots), master_address=address, master_port=0)
        own["MASTER_PORT"] = f"<a free port of {first.label}>"
        given = environment.here if slot.host.is_here else environment.elsewhere
        facts = facts_of(slot.host)
        interface = interface_of(slot.host) or "<towards the others>"
        variables = variables_set(given, own, facts or HostEnvironment("<its own>", 1, interface)) | dict(
            by_flags or {}
        )
        if facts is None and "OMP_NUM_THREADS" not in given:
            variables["OMP_NUM_THREADS"] = f"<its cores / {slot.local_size}>"
        place = (
            f"rank {slot.rank} on {slot.host.label}: local rank {slot.local_rank} of {slot.local_size}, "
            f"cross rank {slot.cross_rank} of {slot.cross_size}\n"
        )
        paragraphs.append(place + "".join(f"    {name}={value}\n" for name, value in variables.items()))
    return "\n".join(paragraphs)
