"""
`Placement` and `Topology`: this process's rank, local rank and cross rank, and the hosts of all ranks.

    launcher's variables ── Placement of one process ── the placements of all ranks ── Topology

``rank`` is global, ``local_rank`` counts the ranks of a host, and ``cross_rank`` counts the hosts that have this local
rank. `launchers` makes a `Placement`, `rank_info` exchanges them between ranks, and `runtime.make_world` makes the
`Topology`. Nothing here communicates.

A `GivenPlace` is a rank that a program has given to this process, in place of a launcher's variables: `hvdlite.ray`
makes one in each of Ray's workers, `runtime.world.take_place` keeps it, and `runtime.bootstrap` connects with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdlite_wire.store_requests import StoreRequest


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's numbers in the job.

    ``hosts`` has every rank's host name, for messages. ``is_homogeneous``: every host has the same number of ranks.
    """

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
    """The rank, host and launcher of one process, as it reads them from its environment.

    ``node`` differs between ranks that count as being on different hosts. Usually it is the host's name; under torchrun
    it is the agent's rank, because two agents may run on one machine.

    ``worker`` is the number that hvdlite-run has given the process. In an elastic job it stays the same while the rank
    changes; otherwise it is the rank.

    ``launcher`` is the name of a launcher that gives ranks but no address to connect to. The ranks then connect by
    `rank0_stores`: through the launcher's exchange, or, if ``one_host``, without it. None if there is an address or a
    ``store_url``.
    """

    rank: int
    size: int
    node: str
    host: str
    local_rank: int | None = None
    store_url: str | None = None
    launcher: str | None = None
    one_host: bool = False
    worker: int | None = None


def placements_to_topology(rank: int, placements: Sequence[Placement]) -> Topology:
    """Returns the topology of ``rank`` from the placements of all ranks, in rank order.

    Where a placement has no local rank, the ranks of its node are numbered in rank order.
    """
    local_ranks: list[int] = []
    members: dict[str, int] = {}
    for placement in placements:
        counted = members.get(placement.node, 0)
        members[placement.node] = counted + 1
        local_ranks.append(counted if placement.local_rank is None else placement.local_rank)
    mine = placements[rank]
    same_local_rank = [
        each.node for each, local in zip(placements, local_ranks, strict=True) if local == local_ranks[rank]
    ]
    # Hosts in the order of their first rank, as hvdlite-run numbers them.
    nodes_with_my_local_rank = list(dict.fromkeys(same_local_rank))
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


class StoreConnection(Protocol):
    """What carries requests to the store that all ranks share, as `store_client.StoreClient` does."""

    def request(
        self, operation: StoreRequest, parts: Iterable[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        """Blocks until the answer is there. TimeoutError, ConnectionError and ValueError as in `StoreClient`."""

    def __hash__(self) -> int:
        """By identity: a process keeps one torch store for each connection."""

    def close(self) -> None:
        """Called when a world is left; a later request must work all the same."""


@dataclass(frozen=True)
class GivenPlace:
    """This process's rank and host, and the way to the store through which the ranks find each other.

    ``placement.store_url`` is equal on all ranks of the job, and no other job of this process has it. ``address`` is
    this host's towards the job's other hosts, whose interface gloo then uses; None if there are none.
    """

    placement: Placement
    store: StoreConnection
    address: str | None = None
