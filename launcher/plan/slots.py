"""Assigns ranks to hosts: fills the slots of the hosts in order. These functions start nothing and look nothing up.

Called by `cli`, `job` and `check`. `worker_environment` makes a worker's variables from its slot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..errors import UsageError
from .hosts import Host


@dataclass(frozen=True)
class Slot:
    """One worker and the host that it runs on.

    ``number`` identifies the worker during the whole job. Its ``rank`` (global), ``local_rank`` (within its host) and
    ``cross_rank`` (among hosts) are always looked up by its number. ``node`` is the number of its host.
    """

    number: int
    rank: int
    node: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: Host


def plan_slots(hosts: tuple[Host, ...], size: int | None = None) -> tuple[Slot, ...]:
    """Returns ``size`` slots, one per rank, filling the hosts in order; by default all slots of the hosts.

    When a job starts, each worker's number is its rank. Raises `UsageError` if there are too few slots.
    """
    total = sum(host.slots for host in hosts)
    if size is None:
        size = total
    if size > total:
        raise UsageError(
            f"-np {size} is more than the {total} slots of the hosts: give them more slots, as in host:{size}"
        )
    local_sizes: list[int] = []
    left = size
    for host in hosts:
        local_sizes.append(min(host.slots, left))
        left -= local_sizes[-1]
    cross_sizes = Counter(local_rank for local_size in local_sizes for local_rank in range(local_size))
    cross_ranks: Counter[int] = Counter()
    slots: list[Slot] = []
    for node, (host, local_size) in enumerate(zip(hosts, local_sizes, strict=True)):
        for local_rank in range(local_size):
            cross_rank, cross_size = cross_ranks[local_rank], cross_sizes[local_rank]
            rank = len(slots)
            slots.append(Slot(rank, rank, node, local_rank, local_size, cross_rank, cross_size, host))
            cross_ranks[local_rank] += 1
    return tuple(slots)
