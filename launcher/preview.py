"""The plan as text, for who wants to see it before anything is started.

Of a worker's environment it shows what hvdlite-run itself sets; what the user has there may be secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .plan import Slot, slot_environment, variables_set


def preview(slots: Sequence[Slot], given: Mapping[str, str], *, job_dir: str, cores: int, loopback: str | None) -> str:
    """A paragraph for each rank. The arguments by name are as in `plan.variables_set`."""
    paragraphs = []
    for slot in slots:
        own = slot_environment(slot, len(slots))
        variables = variables_set(given, own, job_dir=job_dir, cores=cores, loopback=loopback)
        place = (
            f"rank {slot.rank} on {slot.host.name}: local rank {slot.local_rank} of {slot.local_size}, "
            f"cross rank {slot.cross_rank} of {slot.cross_size}\n"
        )
        paragraphs.append(place + "".join(f"    {name}={value}\n" for name, value in variables.items()))
    return "\n".join(paragraphs)
