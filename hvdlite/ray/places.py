"""
How Ray's workers become ranks: which is which rank, how each takes its place, and the store through which they meet.

    own_facts on each worker ── places_of ── take on each worker ── hvd.init() in the worker
    LauncherStore ── RayStore.request ── Ray's own messages ── StoreActor, which keeps keys and values

Requests are those of hvdlite-run's store (`hvdlite_wire.store_requests`). Who may use Ray's cluster may read and change
what is in the store. Ray need not be installed where hvdlite is.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from hvdlite_wire.store_requests import StoreRequest

from ..rendezvous.placement import GivenPlace, Placement, placements_to_topology
from ..runtime.world import take_place


def import_ray(module: str, extra: str = "") -> Any:
    """Returns a module of Ray's, such as ``ray.util``; an ImportError with pip's command if it is not installed.

    ``extra`` is the part of Ray that has it, such as ``[train]``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # `ray.train` without its extra raises this for one of the packages that it needs.
        if error.name == "ray" or extra:
            raise ImportError(
                f"hvdlite.ray needs {module}, which is not installed: pip install 'ray{extra}'"
            ) from error
        raise


_ray = import_ray("ray")
_errors = import_ray("ray.exceptions")
_util = import_ray("ray.util")

# Requests that wait, from several threads of each rank.
_MOST_AT_ONCE = 10_000


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


class StoreActor:
    """Keys and values. Ray runs the methods as coroutines of one thread."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._changed = asyncio.Condition()

    async def request(self, operation: int, parts: list[bytes], timeout_s: float | None) -> list[bytes] | None:
        """Returns the answer to a request; None if keys were not set within ``timeout_s``."""
        async with self._changed:
            if operation in (StoreRequest.GET, StoreRequest.WAIT):
                try:
                    await asyncio.wait_for(self._changed.wait_for(lambda: self._has(parts)), timeout_s)
                except asyncio.TimeoutError:
                    return None
            answer = self._answer(operation, parts)
            self._changed.notify_all()
        return answer

    def _has(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _answer(self, operation: int, parts: list[bytes]) -> list[bytes]:  # noqa: PLR0911  # one for each request
        values = self._values
        match StoreRequest(operation), parts:
            case StoreRequest.SET, _:
                values.update(zip(parts[::2], parts[1::2], strict=True))
                return []
            case StoreRequest.GET, _:
                return [values[key] for key in parts]
            case StoreRequest.WAIT, _:
                return []
            case StoreRequest.CHECK, _:
                return [b"%d" % self._has(parts)]
            case StoreRequest.ADD, [key, amount]:
                values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
                return [values[key]]
            case StoreRequest.COMPARE_SET, [key, expected, desired]:
                # As in torch's stores: a key that is not set counts as empty, and the caller gets its own value back.
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [values.get(key, expected)]
            case StoreRequest.APPEND, [key, tail]:
                values[key] = values.get(key, b"") + tail
                return []
            case StoreRequest.DELETE, [key]:
                return [b"%d" % (values.pop(key, None) is not None)]
            case StoreRequest.COUNT, []:
                return [b"%d" % len(values)]
        raise ValueError(f"the store has no operation {operation} with {len(parts)} arguments")


def start_store() -> Any:
    """Starts a `StoreActor`, and returns its handle. It ends when no process has the handle any more."""
    return _ray.remote(StoreActor).options(num_cpus=0, max_concurrency=_MOST_AT_ONCE).remote()


class RayStore:
    """A worker's connection to the `StoreActor`: a `rendezvous.placement.StoreConnection`. Any thread may use it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def request(
        self, operation: StoreRequest, parts: Iterable[bytes] = (), timeout_s: float | None = None
    ) -> list[bytes]:
        try:
            answer: list[bytes] | None = _ray.get(self._actor.request.remote(int(operation), list(parts), timeout_s))
        except _errors.RayActorError as error:
            raise ConnectionError(
                "the Ray actor with the job's store has ended, because the program that made the ranks has, or its "
                f"node was lost ({str(error).splitlines()[0]})"
            ) from error
        if answer is None:
            raise TimeoutError("no answer in time")
        return answer

    def close(self) -> None:
        return
