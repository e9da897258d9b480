"""
Makes a `World` of ranks that can reach each other: its group, over shared memory and by levels, and its controller.

    store ── every rank's info, signed ── ConnectedRanks ── Group ── controller ── World

`log_startup` has the line that rank 0 logs at start:

    4 ranks on 2 hosts (2 + 2); CPU tensors: shared memory within hosts, gloo (eth0) between; OMP threads 1; check on
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from hvdlite_wire.linux import LOOPBACK, interface_with
from hvdlite_wire.store_requests import RankAssignment
from torch._C._distributed_c10d import PrefixStore, Store

from .. import timeline
from ..calls.generation import Generation
from ..calls.operation import Controller
from ..comm.engine import Engine, EngineFactory
from ..comm.gloo import Connecting, ConnectingRanks, InitTimeout
from ..comm.gloo_sockets import own_addresses
from ..comm.group import Group
from ..comm.hierarchy import choose_levels
from ..comm.work import CollectiveWatch
from ..control.control_client import make_controller
from ..environment import DYNAMIC, Environment
from ..errors import LaunchEnvironmentError, MismatchError
from ..log import log, open_log
from ..rendezvous.placement import Placement, Topology, placements_to_topology
from ..rendezvous.process_state import ProcessState
from ..rendezvous.rank_info import RankInfo, agree_on_secret, exchange_rank_info, given_secret, refuse
from ..shm.segment import KeptMemory
from ..shm.setup import ShmEngineFactory
from ..signing import Signer
from .process_set import Registry
from .survival import Survival


def log_startup(engine: Engine, nodes: Sequence[Hashable], environment: Environment) -> None:
    """Logs the line; HVDLITE_VERBOSE prints it, too. ``nodes``: equal entries are of ranks on one host."""
    line = describe_start(engine, nodes, environment)
    log.info("%s", line)
    if environment.verbose and (environment.log_level is None or environment.log_level > logging.INFO):
        print(f"hvdlite: {line}", file=sys.stderr, flush=True)


def describe_start(engine: Engine, nodes: Sequence[Hashable], environment: Environment) -> str:
    counts = list(Counter(nodes).values())
    parts = [f"{_counted(len(nodes), 'rank')} on {_counted(len(counts), 'host')}"]
    if len(counts) > 1:
        parts[0] += f" ({' + '.join(map(str, counts))})"
    if len(nodes) > 1:
        parts.append(f"CPU tensors: {_way_of_cpu(engine, counts, environment)}")
        if torch.cuda.is_available():
            parts.append(f"CUDA tensors: {_way_of_cuda(engine)}")
    parts.append(f"OMP threads {torch.get_num_threads()}")
    if len(nodes) > 1:
        parts.append(f"check {'on' if environment.check else 'off'}")
    return "; ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _way_of_cpu(engine: Engine, counts: Sequence[int], environment: Environment) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    gloo = f"gloo ({interface})" if interface else "gloo"
    first, *between = (gloo if each == "gloo" else each for each in engine.ways["cpu"])
    if between:
        return f"{first} within hosts, {between[0]} between"
    if first != gloo:
        return first
    if max(counts) == 1:
        return gloo
    if not environment.shm:
        why = "HVDLITE_SHM=0"
    elif len(set(counts)) > 1:
        why = "hosts have different numbers of ranks"
    elif len(counts) > 1 and environment.hierarchical is False:
        why = "hierarchical all-reduces are turned off"
    else:
        why = "there is too little shared memory"
    return f"{gloo}, not shared memory: {why}"


def _way_of_cuda(engine: Engine) -> str:
    *_, name = ways = engine.ways["cuda"]
    levels = ", within hosts and then between" if len(ways) > 1 else ""
    if name != "nccl":
        return name + levels
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch has no types for it
    return f"NCCL {'.'.join(map(str, version[:3]))}{levels}"


@dataclass(frozen=True)
class World:
    """The connected ranks from one `hvd.init` to the next `hvd.shutdown`, as this process sees them.

    ``leave`` closes the default process group and the store's client; call it after the group is closed. ``pid`` tells
    a forked child from this process. ``assignment`` is there in an elastic job, ``survival`` where steps survive the
    loss of a rank. ``stands_by``: this process is no rank yet, and ``topology`` has the numbers that it will probably
    have. ``connecting`` ends waits for an elastic job's ranks while groups are opened after `hvd.init`.
    """

    topology: Topology
    group: Group
    generation: Generation
    controller: Controller
    environment: Environment
    sets: Registry
    leave: Callable[[], None]
    pid: int
    assignment: RankAssignment | None = None
    survival: Survival | None = None
    stands_by: bool = False
    connecting: Connecting | None = None


@dataclass(frozen=True, slots=True)
class InitCall:
    """One call of `hvd.init`; ``process`` is kept from earlier worlds, ``undo`` has what to close if the call fails."""

    timeout: InitTimeout
    environment: Environment
    process: ProcessState
    undo: contextlib.ExitStack


@dataclass(frozen=True, slots=True)
class ConnectedRanks:
    """Every rank's info, and what they need to connect to each other."""

    infos: list[RankInfo]
    connecting: ConnectingRanks


def exchange_infos(
    placement: Placement, store: Store, secret: bytes | None, call: InitCall, assignment: RankAssignment | None = None
) -> ConnectedRanks:
    """Exchanges every rank's info through the store; ``secret`` is from the launcher's exchange, if it has one.

    Every rank must call it, and waits for all.
    """
    given, environment = given_secret(os.environ), call.environment
    settings: dict[str, Any] = {
        "HVDLITE_CHECK": environment.check,
        "HVDLITE_SHM": environment.shm,
        "timeline": environment.timeline,
        "hierarchical": environment.hierarchical,
        "check_parameters": environment.check_parameters,
        "survive": environment.survive,
        "addresses": [],
    }
    if assignment is not None and assignment.generation > 1:
        # With these hvdlite-run finds hosts that refuse connections; in the first generation it ends the job for them.
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        settings["addresses"] = call.process.keep("own addresses", interfaces, own_addresses)
    try:
        # A secret of the user's takes precedence over the launcher's.
        if given is not None or secret is None:
            secret = agree_on_secret(store, placement.rank, given)
    except LaunchEnvironmentError:
        refuse(store, placement.rank)
        raise
    own = RankInfo(placement, os.getpid(), own_version(), settings)
    infos, signer = exchange_rank_info(store, own, Signer(secret), call.timeout.limit)
    if placement.size > 1 and len({info.placement.node for info in infos}) == 1:
        # One host: let gloo listen on loopback, which no other host can reach, unless the user has chosen an interface.
        call.process.choose_interface(interface_with(LOOPBACK))
    names = tuple(f"rank {rank} ({info.placement.host})" for rank, info in enumerate(infos))
    connecting = ConnectingRanks(PrefixStore("engines", store), signer, placement.rank, names, call.timeout)
    return ConnectedRanks(infos, connecting)


def make_world(
    placement: Placement,
    engine_factory: EngineFactory,
    ranks: ConnectedRanks,
    call: InitCall,
    leave: Callable[[], None],
    assignment: RankAssignment | None = None,
) -> World:
    """Makes the groups, the controller and the rest of a world. Every rank must call it, and waits for all."""
    environment, process, undo = call.environment, call.process, call.undo
    open_log(environment, placement.rank)
    infos, connecting = ranks.infos, ranks.connecting
    placements = [info.placement for info in infos]
    topology = placements_to_topology(placement.rank, placements)
    generation = Generation(CollectiveWatch(connecting.ends))
    connecting.ends.give_up_connecting = Connecting(placement.size).give_up_begun
    own, size, signer, watch = placement.rank, placement.size, connecting.signer, generation.watch
    group = Group(engine_factory, own, size, topology.hosts, signer=signer, watch=watch)
    undo.callback(group.close)
    for remark in environment.remarks if placement.rank == 0 else ():
        log.warning(remark)
    for name in ("HVDLITE_CHECK", "HVDLITE_SHM"):
        _require_same_switch(name, infos, group)
    nodes = [placement.node for placement in placements]
    # Rank 0's settings count: for the timeline's file, for measurements, and where all ranks must compare or survive.
    settings = infos[0].settings
    survives = settings["survive"] and assignment is not None
    within = kept = None
    if survives:
        kept = process.keep("shared memory", None, KeptMemory, KeptMemory.close)
        kept.begin([info.pid for info in infos if info.placement.node == placement.node])
    if environment.shm and topology.local_size > 1:
        over_memory = ShmEngineFactory(connecting, engine_factory, for_gpus=torch.cuda.is_available(), kept=kept)
        neighbours = [rank for rank, node in enumerate(nodes) if node == placement.node]
        if len(neighbours) == len(nodes):
            over_network, signer = group, group.signer.derive("shared memory")
            group = Group(over_memory, own, size, group.hosts, signer=signer, watch=watch)
            over_network.close()
            undo.callback(group.close)
        else:
            token = f"host of rank {neighbours[0]}"
            within = over_memory.among(neighbours, neighbours.index(placement.rank), token)
    hierarchical = settings["hierarchical"]
    gpu = _own_gpu(group, topology) if hierarchical is None else None
    choose_levels(group, engine_factory, within, nodes, hierarchical, gpu)
    environment = replace(environment, check_parameters=settings["check_parameters"], survive=survives)
    if own == 0:
        log_startup(group.engine, nodes, replace(environment, hierarchical=hierarchical))
    controller = make_controller(group, generation, nodes, environment, connecting.init_timeout)
    undo.callback(controller.close)
    timeline_path = settings["timeline"]
    if timeline_path not in (None, DYNAMIC):
        undo.callback(generation.recorder.forget)
        try:
            timeline.start(generation.recorder, group, controller, timeline_path)
        except timeline.NotWrittenError as error:
            if assignment is None:
                raise
            # An elastic job comes here again whenever its ranks change, when the directory may be full or gone.
            if own == 0:
                log.warning("%s", error)
    sets = Registry(group, controller, generation, is_elastic=assignment is not None)
    return World(topology, group, generation, controller, environment, sets, leave, os.getpid(), assignment)


def _require_same_switch(name: str, infos: Sequence[RankInfo], group: Group) -> None:
    first = infos[0].settings[name]
    for rank, info in enumerate(infos):
        if info.settings[name] != first:
            raise MismatchError(
                f"hvd.init(): {name} (0 or 1) is {first!r} on {group.describe_rank(0)} and "
                f"{info.settings[name]!r} on {group.describe_rank(rank)}: every rank must pass the same value"
            )


def _own_gpu(group: Group, topology: Topology) -> torch.device | None:
    """Returns this rank's GPU if hierarchical all-reduces over NCCL are possible; all ranks must call it, and wait."""
    if not topology.is_homogeneous or topology.local_size in (1, topology.size):
        return None
    own = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        own = torch.device("cuda", topology.local_rank % torch.cuda.device_count())
    number = None if own is None else str(torch.cuda.get_device_properties(own).uuid)
    numbers = group.all_gather_json(number, "hvd.init()")
    return own if None not in numbers and len(set(numbers)) == group.size else None


@cache  # reading it takes a millisecond or more, and a worker of an elastic job may enter any number of worlds
def own_version() -> str:
    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "of a source tree"
