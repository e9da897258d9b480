"""
`Placement` and `Topology`: ranks, local ranks and cross ranks, of this process and of all.

    launcher's variables ── Placement (what one process knows) ── all placements together ── Topology

Pure values and functions: nothing here talks to another process or to torch.

``rank`` is global, ``local_rank`` counts within a host, ``cross_rank`` among the hosts that have this local rank. What
a launcher's variables are called is in `launchers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's place in the job, the name of every rank's host (for messages), and whether all have as many ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]
    is_homogeneous: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """What one process knows of its own place before it has spoken to any other.

    ``node`` tells apart what counts as different hosts: usually the host's name, under torchrun the
    number of the agent, since two agents may share a machine.

    ``launcher`` is one that has told the place but no address: the ranks meet by its own means, or, with
    ``one_host``, without it. None where there is an address to meet at.
    """

    rank: int
    size: int
    node: str
    host: str
    local_rank: int | None = None
    store_url: str | None = None
    launcher: str | None = None
    one_host: bool = False


def placements_to_topology(rank: int, placements: Sequence[Placement]) -> Topology:
    """The topology of ``rank``, given the placements of all ranks in rank order.

    A placement without a local rank is counted off among the ranks of its node.
    """
    local_ranks: list[int] = []
    members: dict[str, int] = {}
    for placement in placements:
        counted = members.get(placement.node, 0)
        members[placement.node] = counted + 1
        local_ranks.append(counted if placement.local_rank is None else placement.local_rank)
    mine = placements[rank]
    # Hosts in the order of their first rank, as the launcher numbers them.
    nodes_with_my_local_rank = list(
        dict.fromkeys(
            placement.node
            for placement, local in zip(placements, local_ranks, strict=True)
            if local == local_ranks[rank]
        )
    )
    return Topology(
        rank=rank,
        size=len(placements),
        local_rank=local_ranks[rank],
        local_size=members[mine.node],
        cross_rank=nodes_with_my_local_rank.index(mine.node),
        cross_size=len(nodes_with_my_local_rank),
        hosts=tuple(placement.host for placement in placements),
        is_homogeneous=len(set(members.values())) == 1,
    )
