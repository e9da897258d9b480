"""
Makes this process a rank of a new `World`: started by a launcher, in an existing process group, or alone.

    Placement ── a store ── every rank's info, signed ── the default group, proven ── controller ── World

Which world is the current one is known to `world`; here nothing is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from ..comm.engine import EngineFactory, SingleRankFactory, TorchEngineFactory, allow_collectives
from ..comm.engine_selection import choose_levels
from ..comm.gloo import ConnectingRanks, Connections, InitTimeout, open_proven
from ..comm.group import Group
from ..control.connect import make_controller
from ..control.controller import Controller
from ..control.generation import Generation
from ..environment import DYNAMIC, Environment
from ..errors import CommunicationError, LaunchEnvironmentError, MismatchError
from ..log import log, open_log
from ..rendezvous.host_address import LOOPBACK, interface_of
from ..rendezvous.launcher_store import LauncherStore
from ..rendezvous.launchers import read_placement, refuse_place_of_horovods
from ..rendezvous.placement import Placement, Topology, placements_to_topology
from ..rendezvous.process_state import ProcessState
from ..rendezvous.rank_info import RankInfo, agree_on_secret, exchange_rank_info, refuse
from ..rendezvous.secret import given_secret
from ..rendezvous.store_client import StoreClient, StoreCommand
from ..shm.shm_factory import ShmEngineFactory
from ..signing import Signer
from ..timeline import session as timeline
from .process_set_registry import Registry
from .startup_line import log_startup

_GIVING_UP = timedelta(seconds=1)  # for saying so

_GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class World:
    """One generation of the world, as this process is in it.

    ``group`` are all ranks, ``generation`` is what their groups have in common here (there it says what there is one of
    in a process, in a generation, for a group, a set, a thread); ``leave`` is to be called once the group is closed.
    """

    topology: Topology
    group: Group
    generation: Generation
    controller: Controller
    environment: Environment
    sets: Registry
    leave: Callable[[], None]
    pid: int


@dataclass(frozen=True, slots=True)
class _Meeting:
    """All ranks, known to each other and not connected yet."""

    infos: list[RankInfo]
    ranks: ConnectingRanks


def enter(timeout: timedelta, environment: Environment, process: ProcessState) -> World:
    """The world that this process is in. Every rank must call it; it waits for all.

    Where it fails, whatever it has made by then is given back. ``process`` is told when the world has been left.
    """
    init_timeout = InitTimeout(timeout)
    with contextlib.ExitStack() as undo:
        undo.callback(process.world_left)
        world = _enter(init_timeout, environment, process, undo)
        undo.pop_all()
    init_timeout.end_of_init()
    return world


def _enter(
    init_timeout: InitTimeout, environment: Environment, process: ProcessState, undo: contextlib.ExitStack
) -> World:
    """``undo`` is given what is to be done if it fails, as soon as it has to be."""
    if dist.is_available() and dist.is_initialized():
        return _adopt(init_timeout, environment, process, undo)
    placement = read_placement(os.environ)
    if placement is None:
        refuse_place_of_horovods(os.environ)
        return _alone(environment, process, undo)
    return _connect(placement, init_timeout, environment, process, undo)


def _alone(environment: Environment, process: ProcessState, undo: contextlib.ExitStack) -> World:
    placement = Placement(rank=0, size=1, node="", host=socket.gethostname(), local_rank=0)
    meeting = _meet_all(placement, HashStore(), None, InitTimeout(timedelta(seconds=1)), environment, process)
    return _world_of(placement, SingleRankFactory(), meeting, environment, undo, leave=lambda: None)


def _connect(
    placement: Placement,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
) -> World:
    backend = _GLOO_AND_NCCL if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    client = None if placement.store_url is None else StoreClient.from_url(placement.store_url)
    if client is not None:
        undo.callback(client.close)
    _tell_launcher(client, StoreCommand.JOINING, placement, init_timeout.left())
    try:
        world = _connect_all(placement, backend, client, init_timeout, environment, process, undo)
    except BaseException:
        with contextlib.suppress(CommunicationError):
            _tell_launcher(client, StoreCommand.GAVE_UP, placement, _GIVING_UP)
        raise
    _tell_launcher(client, StoreCommand.JOINED, placement, init_timeout.left())
    return world


def _connect_all(
    placement: Placement,
    backend: str,
    client: StoreClient | None,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
) -> World:
    # It was not initialised before, so whatever there is of it by then is ours.
    undo.callback(_leave, client, Connections())
    try:
        store, secret = _meeting_place(placement, client, process, init_timeout.timeout)
        meeting = _meet_all(placement, store, secret, init_timeout, environment, process)

        def make() -> dist.ProcessGroup:
            dist.init_process_group(
                backend, store=store, rank=placement.rank, world_size=placement.size, timeout=init_timeout.left()
            )
            assert dist.group.WORLD is not None, "it has just been made"
            allow_collectives(dist.group.WORLD, init_timeout.timeout)
            return dist.group.WORLD

        default, connections = open_proven(make, dist.destroy_process_group, meeting.ranks, "default")
        undo.callback(connections.cut)
    except (LaunchEnvironmentError, CommunicationError, MismatchError):
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"hvd.init() failed on rank {placement.rank} ({placement.host}): another rank did not call it within "
            f"{init_timeout.timeout.total_seconds():g} s, ended before it did, or cannot be reached. ({error})"
        ) from error
    engine_factory = TorchEngineFactory(backend, meeting.ranks, (default, connections))
    return _world_of(placement, engine_factory, meeting, environment, undo, leave=partial(_leave, client, connections))


def _tell_launcher(client: StoreClient | None, what: StoreCommand, placement: Placement, timeout: timedelta) -> None:
    """How far this rank is: others may wait for it, and the launcher knows whether it will ever come."""
    if client is None:
        return
    try:
        client.request(what, [b"%d" % placement.rank], timeout.total_seconds())
    except (OSError, ValueError) as error:
        raise CommunicationError(
            f"hvd.init() failed on rank {placement.rank} ({placement.host}): hvdlite-run's agent cannot be "
            f"asked: {error}"
        ) from error


def _meeting_place(
    placement: Placement, client: StoreClient | None, process: ProcessState, timeout: timedelta
) -> tuple[Store, bytes | None]:
    """The store in which all ranks find each other, and the secret that the launcher has carried, if it does that.

    Under a prefix of its own for every meeting there: one after a shutdown does not read the first one's keys.
    """
    # Imported where they are used: each launcher needs one of these ways.
    if placement.launcher is not None:
        from ..rendezvous.pmi_rendezvous import rendezvous_by_pmi  # noqa: PLC0415

        return rendezvous_by_pmi(placement, os.environ, process, timeout)
    if client is not None:
        number = process.next_meeting(placement.store_url)
        return PrefixStore(f"init{number}", LauncherStore(client, timeout)), None
    from ..rendezvous.master_address import store_at_given_address  # noqa: PLC0415

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    number = process.next_meeting((address, port))
    store = store_at_given_address(process, placement.rank, placement.size, address, port, timeout)
    store.set_timeout(timeout)
    return PrefixStore(f"init{number}", store), None


def _adopt(
    init_timeout: InitTimeout, environment: Environment, process: ProcessState, undo: contextlib.ExitStack
) -> World:
    """Groups of our own beside the program's: its collectives cannot get between ours."""
    configured = str(dist.get_backend_config())
    # The program's choice for CUDA tensors stays (gloo lets two ranks share a GPU); CPU tensors need gloo.
    cuda = next((item.partition(":")[2] for item in configured.split(",") if item.startswith("cuda:")), None)
    backend = f"cpu:gloo,cuda:{cuda}" if cuda not in (None, "undefined") else "gloo"
    told = read_placement(os.environ)
    host = socket.gethostname()
    placement = Placement(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        node=host if told is None else told.node,
        host=host if told is None else told.host,
        local_rank=None if told is None else told.local_rank,
    )
    assert dist.group.WORLD is not None, "it has been asked"
    store = PrefixStore(f"hvdlite.init{process.next_meeting_in(dist.group.WORLD)}", _get_default_store())
    meeting = _meet_all(placement, store, None, init_timeout, environment, process)
    return _world_of(
        placement, TorchEngineFactory(backend, meeting.ranks), meeting, environment, undo, leave=lambda: None
    )


def _meet_all(
    placement: Placement,
    store: Store,
    secret: bytes | None,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
) -> _Meeting:
    """Introduce this rank to all others; waits for them. ``secret`` is what the launcher has carried, if it has."""
    given = given_secret(os.environ)
    settings = {
        "HVDLITE_CHECK": environment.check,
        "HVDLITE_SHM": environment.shm,
        "timeline": environment.timeline,
        "hierarchical": environment.hierarchical,
        "check_parameters": environment.check_parameters,
    }
    try:
        # What the user gives counts also where the launcher has carried something.
        if given is not None or secret is None:
            secret = agree_on_secret(store, placement.rank, given)
    except LaunchEnvironmentError:
        refuse(store, placement.rank)
        raise
    own = RankInfo.of(placement, os.getpid(), _own_version(), settings)
    infos, signer = exchange_rank_info(store, own, Signer(secret), init_timeout.timeout)
    if placement.size > 1 and len({info.placement.node for info in infos}) == 1:
        # Have gloo listen where no other host gets, unless the user has said where.
        process.choose_interface(interface_of(LOOPBACK))
    names = tuple(f"rank {rank} ({info.placement.host})" for rank, info in enumerate(infos))
    return _Meeting(infos, ConnectingRanks(PrefixStore("engines", store), signer, placement.rank, names, init_timeout))


def _world_of(
    placement: Placement,
    engine_factory: EngineFactory,
    meeting: _Meeting,
    environment: Environment,
    undo: contextlib.ExitStack,
    leave: Callable[[], None],
) -> World:
    open_log(environment, placement.rank)
    infos, ranks = meeting.infos, meeting.ranks
    placements = [info.placement for info in infos]
    topology = placements_to_topology(placement.rank, placements)
    generation = Generation()
    group = Group(
        engine_factory,
        placement.rank,
        placement.size,
        topology.hosts,
        signer=ranks.signer,
        watch=generation.watch,
    )
    undo.callback(group.close)
    for remark in environment.remarks if placement.rank == 0 else ():
        log.warning(remark)
    for name in ("HVDLITE_CHECK", "HVDLITE_SHM"):
        _require_same_switch(name, infos, group)
    nodes = [placement.node for placement in placements]
    within = None
    if environment.shm and topology.local_size == len(placements) > 1:
        group = _over_shared_memory(group, generation, engine_factory, ranks)
        undo.callback(group.close)
    elif environment.shm and topology.local_size > 1:
        within = _between_neighbours(placement, nodes, engine_factory, ranks)
    # Rank 0's word counts, as its measurements do.
    hierarchical = infos[0].settings["hierarchical"]
    gpu = _own_gpu(group, topology) if hierarchical is None else None
    choose_levels(group, engine_factory, within, nodes, hierarchical, gpu)
    # For all ranks alike, since they compare together.
    environment = replace(environment, check_parameters=infos[0].settings["check_parameters"])
    if placement.rank == 0:
        backend = engine_factory.backend if isinstance(engine_factory, TorchEngineFactory) else ""
        log_startup(group.engine, nodes, backend, replace(environment, hierarchical=hierarchical))
    timeout_s = ranks.init_timeout.timeout.total_seconds()
    controller = make_controller(group, generation, nodes, environment, timeout_s)
    undo.callback(controller.close)
    # Rank 0 is the one to write it, so its variable counts.
    timeline_path = infos[0].settings["timeline"]
    if timeline_path not in (None, DYNAMIC):
        undo.callback(generation.recorder.forget)
        timeline.start(generation.recorder, group, controller, timeline_path)
    sets = Registry(group, controller, generation)
    return World(topology, group, generation, controller, environment, sets, leave, os.getpid())


def _require_same_switch(name: str, infos: Sequence[RankInfo], group: Group) -> None:
    first = infos[0].settings[name]
    for rank, info in enumerate(infos):
        if info.settings[name] != first:
            raise MismatchError(
                f"hvd.init(): {name} (0 or 1) is {first!r} on {group.describe_rank(0)} and "
                f"{info.settings[name]!r} on {group.describe_rank(rank)}: every rank must pass the same"
            )


def _over_shared_memory(
    group: Group, generation: Generation, engine_factory: EngineFactory, ranks: ConnectingRanks
) -> Group:
    """The same ranks, all of one host, over shared memory; ``engine_factory`` is for what that does not carry."""
    on_host = ShmEngineFactory(ranks, engine_factory, for_gpus=torch.cuda.is_available())
    signer = group.signer.derive("shared memory")
    shared = Group(on_host, group.rank, group.size, group.hosts, signer=signer, watch=generation.watch)
    group.close()
    return shared


def _between_neighbours(
    placement: Placement, nodes: Sequence[str], engine_factory: EngineFactory, ranks: ConnectingRanks
) -> EngineFactory:
    """Shared memory between the ranks of this host; ``nodes`` are those of all ranks."""
    group_ranks = [rank for rank, node in enumerate(nodes) if node == placement.node]
    group_rank, token = group_ranks.index(placement.rank), f"host of rank {group_ranks[0]}"
    others = engine_factory.among(group_ranks, group_rank, token)
    return ShmEngineFactory(ranks.among(group_ranks, group_rank, token), others, for_gpus=torch.cuda.is_available())


def _own_gpu(group: Group, topology: Topology) -> torch.device | None:
    """This rank's GPU, where every rank has one and the ranks are on several hosts, several on each; waits for all."""
    if not topology.is_homogeneous or topology.local_size in (1, topology.size):
        return None
    own = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        own = torch.device("cuda", topology.local_rank % torch.cuda.device_count())
    number = None if own is None else str(torch.cuda.get_device_properties(own).uuid)
    numbers = group.all_gather_json(number, "hvd.init()")
    return own if None not in numbers and len(set(numbers)) == group.size else None


def _leave(client: StoreClient | None, connections: Connections) -> None:
    connections.cut()
    if dist.is_initialized():
        dist.destroy_process_group()
    if client is not None:
        client.close()


def _own_version() -> str:
    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "of a source tree"
