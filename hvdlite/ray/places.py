"""
The places of Ray's workers: which is which rank, and how a worker takes its place.

    own_facts on each worker ── places_of ── take on each worker ── hvd.init() in the worker

Everything but `own_facts` and `take` is computed from the facts alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..rendezvous.placement import GivenPlace, Placement, placements_to_topology
from ..runtime.world import take_place
from .ray_package import import_ray
from .store_actor import RayStore

_ray = import_ray("ray")
_util = import_ray("ray.util")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Where a worker is: Ray's id of its node, the host's name, the address that other nodes reach, its GPUs' ids."""

    node: str
    host: str
    address: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RayPlace:
    """A worker's rank, the variables to set there, and the address of its host if there are other hosts."""

    placement: Placement
    variables: dict[str, str]
    address: str | None


def own_facts() -> WorkerFacts:
    """Returns where this worker is. Ray calls it in each worker."""
    return WorkerFacts(
        node=_ray.get_runtime_context().get_node_id(),
        host=socket.gethostname(),
        address=_util.get_node_ip_address(),
        gpus=tuple(str(each) for each in _ray.get_gpu_ids()),
    )


def in_order_of_ranks(facts: Sequence[WorkerFacts]) -> list[int]:
    """Returns the numbers of the workers in the order of their ranks: those of a node follow each other."""
    nodes = list(dict.fromkeys(each.node for each in facts))
    return sorted(range(len(facts)), key=lambda number: nodes.index(facts[number].node))


def places_of(facts: Sequence[WorkerFacts], job: str) -> list[RayPlace]:
    """Returns the places of all workers; ``facts`` are in the order of the ranks. No other job has the same ``job``."""
    nodes = [each.node for each in facts]
    several = len(set(nodes)) > 1
    placements = [
        Placement(
            rank=rank,
            size=len(facts),
            node=each.node,
            host=each.host,
            local_rank=nodes[:rank].count(each.node),
            store_url=f"ray://{job}",
        )
        for rank, each in enumerate(facts)
    ]
    return [
        RayPlace(placement, _variables(rank, placements, facts), facts[rank].address if several else None)
        for rank, placement in enumerate(placements)
    ]


def _variables(rank: int, placements: Sequence[Placement], facts: Sequence[WorkerFacts]) -> dict[str, str]:
    """Returns what programs read that know torchrun's variables or Horovod's, and which GPUs the worker sees."""
    topology = placements_to_topology(rank, placements)
    own, nodes = facts[rank], list(dict.fromkeys(each.node for each in facts))
    numbers = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.size,
        "LOCAL_RANK": topology.local_rank,
        "LOCAL_WORLD_SIZE": topology.local_size,
        "NODE_RANK": nodes.index(own.node),
        "HOROVOD_RANK": topology.rank,
        "HOROVOD_SIZE": topology.size,
        "HOROVOD_LOCAL_RANK": topology.local_rank,
        "HOROVOD_LOCAL_SIZE": topology.local_size,
        "HOROVOD_CROSS_RANK": topology.cross_rank,
        "HOROVOD_CROSS_SIZE": topology.cross_size,
    }
    variables = {name: str(number) for name, number in numbers.items()} | {"HOROVOD_HOSTNAME": own.host}
    if own.gpus:
        # All of the node's, so that NCCL sees the others: first one of each rank, as cuda:LOCAL_RANK is the worker's
        # own, and then what ranks with several have besides.
        by_turns = zip_longest(*(each.gpus for each in facts if each.node == own.node))
        gpus = dict.fromkeys(gpu for turn in by_turns for gpu in turn if gpu is not None)
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def take(place: RayPlace, store: Any) -> None:
    """Makes the next `hvd.init` of this process connect as the rank of ``place``, through the actor ``store``."""
    os.environ.update(place.variables)
    take_place(GivenPlace(place.placement, RayStore(store), place.address))
