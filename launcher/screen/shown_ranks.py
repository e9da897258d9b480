"""Decides whose output the screen shows, by --show-ranks and --local-ranks-filter. `launch` gives it to `Screen`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import UsageError
from ..plan.job_spec import JobSpec
from ..plan.slots import Slot

Shows = Callable[[int, int | None], bool]
"""Whether a worker's output is shown, by its number and its present rank (None if it has none)."""


def shown_by_slots(job: JobSpec, slots: Sequence[Slot]) -> Shows:
    """Returns whose output is shown in a job whose ranks stay the same; raises `UsageError` for an unknown rank.

    A job that was restarted may have fewer ranks than at first.
    """
    for flag, ranks, known in (
        ("--show-ranks", job.show_ranks, {slot.number: slot.rank for slot in slots}),
        ("--local-ranks-filter", job.show_local_ranks, {slot.number: slot.local_rank for slot in slots}),
    ):
        if ranks is not None:
            strangers = ranks.difference(known.values())
            if strangers and not job.attempt:
                raise UsageError(f"{flag}: there is no rank {min(strangers)}: they are 0 to {max(known.values())}")
            shown = frozenset(number for number, rank in known.items() if rank in ranks)
            return lambda worker, _: worker in shown
    return lambda _worker, _rank: True


def shown_by_rank(job: JobSpec) -> Shows:
    """Returns whose output is shown in an elastic job.

    A worker without a rank is shown: it may be about to fail before it has one.
    """
    ranks = job.show_ranks
    return lambda _, rank: ranks is None or rank is None or rank in ranks
