"""
Computes the lists of ranks for hierarchical collectives: the ranks of each host, and those with the same local rank.

Only numbers: `hierarchy_selection` and `buckets.exchange` call `host_groups_of` and open groups of these ranks, and
`hierarchy` runs collectives on them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostGroups:
    """One rank's groups, each in the order of ranks.

    ``within`` are the ranks on this rank's host. ``across`` are the ranks with its local rank, one on each host.
    ``hosts`` are the ranks of every host.
    """

    within: tuple[int, ...]
    across: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]


def host_groups_of(rank: int, nodes: Sequence[Hashable]) -> HostGroups | None:
    """Returns the host groups of ``rank``; ``nodes`` are the hosts by rank.

    None where there are no two levels: one host, one rank per host, or hosts with different numbers of ranks.
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
