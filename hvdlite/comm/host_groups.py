"""
Splits ranks for hierarchical collectives: those of one host, and those of different hosts with one local rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostGroups:
    """Who is on this rank's host, and who, one on each host, has the same local rank; in the order of ranks.

    ``hosts`` are the ranks of each host.
    """

    within: tuple[int, ...]
    across: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]


def host_groups_of(rank: int, nodes: Sequence[Hashable]) -> HostGroups | None:
    """The host groups of ``rank``, given each rank's host.

    None where there are no two levels: of one host, of one rank on each, and of hosts that have not as many.
    """
    members: dict[Hashable, list[int]] = {}
    for other, node in enumerate(nodes):
        members.setdefault(node, []).append(other)
    within = members[nodes[rank]]
    if len(members) == 1 or len(within) == 1 or len({len(ranks) for ranks in members.values()}) > 1:
        return None
    local_rank = within.index(rank)
    hosts = tuple(tuple(ranks) for ranks in members.values())
    return HostGroups(tuple(within), tuple(ranks[local_rank] for ranks in hosts), hosts)
