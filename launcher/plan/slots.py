"""Assigns ranks to hosts: fills the slots of the hosts in order. Pure: nothing is started or looked up here.

What a worker's environment says of its slot is in `worker_environment`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import UsageError
from .hosts import Host


@dataclass(frozen=True)
class Slot:
    """One worker and where it runs.

    ``number`` is who it is, for the whole job. ``rank`` (global), ``local_rank`` (within its host) and ``cross_rank``
    (among hosts) are properties of it, which are looked up by its number. ``node`` is its host's number.
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
    """Fill the hosts in order with ``size`` ranks, or with as many as they have slots.

    At first a worker's number is its rank.
    """
    total = sum(host.slots for host in hosts)
    if size is None:
        size = total
    if size > total:
        raise UsageError(
            f"-np {size} is more than the {total} slots of the hosts; say how many they have, as in host:{size}"
        )
    local_sizes = list(_fill(hosts, size))
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


def _fill(hosts: tuple[Host, ...], size: int) -> Iterator[int]:
    for host in hosts:
        taken = min(host.slots, size)
        size -= taken
        yield taken
