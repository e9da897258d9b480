"""
Makes a `World`: connects this process to the other ranks of a launcher's job or of an existing process group.

    Placement ── store ── every rank's info, signed ── default process group ── Group ── controller ── World

A worker of an elastic job gets its placement from a `Seat` in the store. If the ranks of that generation cannot
connect, because one of them is lost meanwhile, it asks for a seat in a later one.

`world` calls `enter` in `hvd.init` and keeps the result. A process without other ranks gets a world of one rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from ..comm.engine import EngineFactory, SingleRankFactory, TorchEngineFactory, allow_collectives
from ..comm.gloo import ConnectingRanks, Connections, InitTimeout, open_proven
from ..comm.group import Group
from ..comm.hierarchy_selection import choose_levels
from ..comm.keepalive import Keepalive
from ..control.connect import make_controller
from ..control.controller import Controller
from ..control.generation import Generation
from ..environment import DYNAMIC, Environment, launcher_variable
from ..errors import CommunicationError, LaunchEnvironmentError, MismatchError
from ..faults import arm, point
from ..log import log, open_log
from ..rendezvous.fault_questions import FaultQuestions
from ..rendezvous.given_place import GivenPlace, StoreConnection
from ..rendezvous.host_address import LOOPBACK, interface_of, no_connection_between
from ..rendezvous.launcher_store import LauncherStore
from ..rendezvous.launchers import ElasticWorker, read_elastic_worker, read_placement, refuse_horovod_rank
from ..rendezvous.placement import Placement, Topology, placements_to_topology
from ..rendezvous.process_state import ProcessState
from ..rendezvous.rank_info import RankInfo, agree_on_secret, exchange_rank_info, refuse
from ..rendezvous.seat import Newcomers, Seat, wait_for_seat
from ..rendezvous.secret import given_secret
from ..rendezvous.store_client import StoreClient, StoreRequest
from ..shm.kept_memory import KeptMemory
from ..shm.shm_factory import ShmEngineFactory
from ..signing import Signer
from ..timeline import session as timeline
from .process_set_registry import Registry
from .startup_line import log_startup
from .survival import Survival

_GIVING_UP = timedelta(seconds=1)  # the timeout for telling the launcher that init has failed

# How long the ranks of an elastic job's generation may take to connect. All have called init when it is published.
_GENERATION_LIMIT = timedelta(seconds=30)

# How often the same ranks of an elastic job try to connect before the error is raised.
_ATTEMPTS = 3

_CANNOT_SURVIVE = (
    "hvd.init(survive=True), or HVDLITE_SURVIVE=1: the ranks of this job cannot change, so no step can go on without "
    "one of them: start it with hvdlite-run --survive --min-np N"
)

_GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True)
class World:
    """The connected ranks from one `hvd.init` to the next `hvd.shutdown`, as this process sees them.

    ``group`` is the group of all ranks. ``generation`` has the state that all groups of this world share; its module
    lists the state of a process, a generation, a group, a set and a thread. ``leave`` closes the default process group
    and the store's client; call it after the group is closed. ``pid`` tells a forked child from this process. ``seat``
    is this rank's in an elastic job, otherwise None. ``survival`` is None unless steps survive the loss of a rank.
    """

    topology: Topology
    group: Group
    generation: Generation
    controller: Controller
    environment: Environment
    sets: Registry
    leave: Callable[[], None]
    pid: int
    seat: Seat | None = None
    survival: Survival | None = None


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Every rank's info, and what they need to connect to each other."""

    infos: list[RankInfo]
    connecting: ConnectingRanks


def enter(timeout: timedelta, environment: Environment, process: ProcessState) -> World:
    """Connects to the other ranks and returns the world. Every rank must call it, and waits for all.

    If it fails, it closes what it has opened. ``process`` has the state kept from earlier worlds.
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
    """Does the work of `enter`; pushes onto ``undo`` whatever must be closed if it fails."""
    if dist.is_available() and dist.is_initialized():
        if read_elastic_worker(os.environ) is not None:
            raise LaunchEnvironmentError(
                "hvd.init(): the program has initialised torch.distributed, whose ranks cannot change, and this is an "
                "elastic job (hvdlite-run --min-np): leave init_process_group() out, or start the job with -np alone"
            )
        if environment.survive:
            raise LaunchEnvironmentError(_CANNOT_SURVIVE)
        return _adopt(init_timeout, environment, process, undo)
    if process.given_place is not None:
        return _connect_given(process.given_place, init_timeout, environment, process, undo)
    worker = read_elastic_worker(os.environ)
    if worker is not None:
        return _connect_elastic(worker, init_timeout, environment, process, undo)
    placement = read_placement(os.environ)
    if environment.survive and placement is not None and placement.size > 1:
        raise LaunchEnvironmentError(_CANNOT_SURVIVE)
    if placement is None:
        refuse_horovod_rank(os.environ)
        return _alone(environment, process, undo)
    return _connect(placement, init_timeout, environment, process, undo)


def _alone(environment: Environment, process: ProcessState, undo: contextlib.ExitStack) -> World:
    placement = Placement(rank=0, size=1, node="", host=socket.gethostname(), local_rank=0)
    ranks = _exchange_infos(placement, HashStore(), None, InitTimeout(timedelta(seconds=1)), environment, process)
    return _world_of(placement, SingleRankFactory(), ranks, environment, process, undo, leave=lambda: None)


def _connect_given(
    place: GivenPlace,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
) -> World:
    if environment.survive:
        raise LaunchEnvironmentError(_CANNOT_SURVIVE)
    if place.placement.size == 1:
        return _alone(environment, process, undo)
    if place.address is not None:
        process.choose_interface(interface_of(place.address))
    return _connect_all(place.placement, place.store, None, init_timeout, environment, process, undo)


def _connect(
    placement: Placement,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
) -> World:
    if placement.store_url is None:
        return _connect_all(placement, None, None, init_timeout, environment, process, undo)
    assert placement.worker is not None, "hvdlite-run has set its number beside the store's URL"
    client = _store_client(placement.store_url, process)
    launcher = _LauncherEnd(client, placement.worker, f"rank {placement.rank} ({placement.host})")
    undo.callback(launcher.client.close)
    launcher.tell(StoreRequest.INIT_STARTED, init_timeout.left())
    try:
        world = _connect_all(placement, launcher.client, None, init_timeout, environment, process, undo)
    except BaseException:
        launcher.tell_failure()
        raise
    launcher.tell(StoreRequest.INIT_DONE, init_timeout.left())
    return world


def _connect_elastic(
    worker: ElasticWorker,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
) -> World:
    """Asks hvdlite-run for a seat in the next generation and connects to its ranks, until that succeeds.

    If the ranks of a generation cannot connect, hvdlite-run publishes another one, without the rank that was lost. If
    it consists of the same ranks, because none was lost, the error is raised in the end.
    """
    open_log(environment, f"worker {worker.number}")
    if given := launcher_variable("CHAOS", os.environ):
        arm(given, FaultQuestions(worker.store_url, worker.number).may_begin)
    if process.generation == 0:
        _import_for_optimizers()
        point("init")
    launcher = _LauncherEnd(_store_client(worker.store_url, process), worker.number, f"worker {worker.number}")
    undo.callback(launcher.client.close)
    failed_attempts, failed_size = 0, 0
    while True:
        if (memory := process.kept("shared memory")) is not None:
            # Once all have asked for a rank, others may use memory again that this process has written to.
            memory.wait_until_quiet()
        launcher.tell(StoreRequest.INIT_STARTED, init_timeout.timeout, process.generation, process.newcomers)
        seat = wait_for_seat(launcher.client, worker.number, process.generation)
        process.generation, process.seat = seat.generation, seat
        if seat.newcomers or seat.size != failed_size:
            failed_attempts = 0
        placement = read_placement(os.environ, seat)
        assert placement is not None, "it is a worker of hvdlite-run"
        attempt_timeout = InitTimeout(init_timeout.timeout, limit=_GENERATION_LIMIT)
        try:
            with contextlib.ExitStack() as attempt:
                attempt.callback(process.world_left)
                world = _connect_all(placement, launcher.client, seat, attempt_timeout, environment, process, attempt)
                undo.push(attempt.pop_all())
        except BaseException as error:
            launcher.tell_failure(seat.generation)
            failed_attempts, failed_size = failed_attempts + 1, seat.size
            if not isinstance(error, CommunicationError) or failed_attempts == _ATTEMPTS:
                raise
            log.info("the ranks of generation %d could not connect, and try again: %s", seat.generation, error)
            continue
        launcher.tell(StoreRequest.INIT_DONE, init_timeout.timeout, seat.generation)
        attempt_timeout.end_of_init()
        return world


def _import_for_optimizers() -> None:
    """Makes an optimizer, for which PyTorch imports some 800 modules.

    That takes seconds, in which the other ranks of an elastic job would wait for a worker that joins them.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)


@dataclass(frozen=True, slots=True)
class _LauncherEnd:
    """Tells hvdlite-run whether this worker's init has started, is done or has failed.

    By this hvdlite-run ends the job if ranks wait in init for a rank that never calls it. In an elastic job it gives
    the worker a seat for it. ``name`` is the worker's in error messages.
    """

    client: StoreClient
    worker: int
    name: str

    def tell(
        self,
        what: StoreRequest,
        timeout: timedelta,
        generation: int | None = None,
        newcomers: Newcomers = Newcomers.WELCOME,
    ) -> None:
        """``generation``: the last one in which a worker of an elastic job was given a seat, 0 if there is none."""
        parts = [self.worker] if generation is None else [self.worker, generation]
        if newcomers is not Newcomers.WELCOME:
            parts.append(newcomers)
        try:
            self.client.request(what, [b"%d" % part for part in parts], timeout.total_seconds())
        except (OSError, ValueError) as error:
            raise CommunicationError(
                f"hvd.init() failed on {self.name}: hvdlite-run's agent on this host does not answer: {error}"
            ) from error

    def tell_failure(self, generation: int | None = None) -> None:
        """Like `tell`, but does not wait for long, and ignores errors."""
        with contextlib.suppress(CommunicationError):
            self.tell(StoreRequest.INIT_FAILED, _GIVING_UP, generation)


def _store_client(url: str, process: ProcessState) -> StoreClient:
    """Returns this process's client of hvdlite-run's store, without open connections; one for all worlds."""
    return process.keep("store client", url, lambda: StoreClient.from_url(url), StoreClient.close)


def _connect_all(
    placement: Placement,
    client: StoreConnection | None,
    seat: Seat | None,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
) -> World:
    backend = _GLOO_AND_NCCL if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    # torch.distributed was not initialised before, so a default group that exists on failure is ours to destroy.
    undo.callback(_leave, client, Connections())
    infos: Sequence[RankInfo] = ()
    try:
        store, secret = _open_store(placement, client, seat, process, init_timeout.limit)
        ranks = _exchange_infos(placement, store, secret, init_timeout, environment, process)
        infos = ranks.infos

        def make(_: Connections) -> dist.ProcessGroup:
            dist.init_process_group(
                backend, store=store, rank=placement.rank, world_size=placement.size, timeout=init_timeout.left()
            )
            assert dist.group.WORLD is not None, "it has just been made"
            allow_collectives(dist.group.WORLD, init_timeout.timeout)
            return dist.group.WORLD

        default, connections = open_proven(make, dist.destroy_process_group, ranks.connecting, "default")
        undo.callback(connections.cut)
        if seat is not None and len({info.placement.node for info in infos}) > 1:
            process.keepalive = Keepalive(connections)
    except (LaunchEnvironmentError, CommunicationError, MismatchError):
        raise
    except RuntimeError as error:
        hosts = [info.placement.host for info in infos]
        if firewall := no_connection_between(hosts, placement.host, error):
            raise CommunicationError(f"hvd.init() failed on rank {placement.rank}: {firewall}. ({error})") from error
        raise CommunicationError(
            f"hvd.init() failed on rank {placement.rank} ({placement.host}): another rank did not call it within "
            f"{init_timeout.limit.total_seconds():g} s, ended before it did, or cannot be reached. ({error})"
        ) from error
    engine_factory = TorchEngineFactory(backend, ranks.connecting, (default, connections))
    leave = partial(_leave, client, connections)
    return _world_of(placement, engine_factory, ranks, environment, process, undo, leave, seat)


def _open_store(
    placement: Placement, client: StoreConnection | None, seat: Seat | None, process: ProcessState, timeout: timedelta
) -> tuple[Store, bytes | None]:
    """Returns the store that all ranks share, and the secret from the launcher's exchange, or None.

    Each init at the same store has its own key prefix, so that an init after a shutdown does not read older keys. In an
    elastic job it is that of the generation: a rank may have called init less often than others.
    """
    # Imported where they are used, because each launcher needs only one of them.
    if placement.launcher is not None:
        from ..rendezvous.pmi_rendezvous import rendezvous_by_pmi  # noqa: PLC0415

        return rendezvous_by_pmi(placement, os.environ, process, timeout)
    if client is not None:
        prefix = f"init{process.next_init(placement.store_url)}" if seat is None else seat.prefix
        launcher_store = process.keep("launcher store", client, lambda: LauncherStore(client, timeout))
        launcher_store.set_timeout(timeout)
        return PrefixStore(prefix, launcher_store), None
    from ..rendezvous.master_address import store_at_given_address  # noqa: PLC0415

    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    number = process.next_init((address, port))
    store = store_at_given_address(process, placement.rank, placement.size, address, port, timeout)
    store.set_timeout(timeout)
    return PrefixStore(f"init{number}", store), None


def _adopt(
    init_timeout: InitTimeout, environment: Environment, process: ProcessState, undo: contextlib.ExitStack
) -> World:
    """Makes a world of the ranks of the program's own default group, with process groups of its own.

    Separate groups keep the program's collectives from mixing with hvdlite's.
    """
    configured = str(dist.get_backend_config())
    # Keep the program's backend for CUDA tensors (with gloo, two ranks can share a GPU); CPU tensors need gloo.
    cuda = next((item.partition(":")[2] for item in configured.split(",") if item.startswith("cuda:")), None)
    backend = f"cpu:gloo,cuda:{cuda}" if cuda not in (None, "undefined") else "gloo"
    given = read_placement(os.environ) if process.given_place is None else process.given_place.placement
    host = socket.gethostname()
    placement = Placement(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        node=host if given is None else given.node,
        host=host if given is None else given.host,
        local_rank=None if given is None else given.local_rank,
    )
    assert dist.group.WORLD is not None, "it has been asked"
    store = PrefixStore(f"hvdlite.init{process.next_init_in(dist.group.WORLD)}", _get_default_store())
    ranks = _exchange_infos(placement, store, None, init_timeout, environment, process)
    return _world_of(
        placement, TorchEngineFactory(backend, ranks.connecting), ranks, environment, process, undo, leave=lambda: None
    )


def _exchange_infos(
    placement: Placement,
    store: Store,
    secret: bytes | None,
    init_timeout: InitTimeout,
    environment: Environment,
    process: ProcessState,
) -> _Ranks:
    """Exchanges every rank's info through the store. Every rank must call it, and waits for all.

    ``secret`` is from the launcher's exchange; None makes rank 0 put one into the store.
    """
    given = given_secret(os.environ)
    settings = {
        "HVDLITE_CHECK": environment.check,
        "HVDLITE_SHM": environment.shm,
        "timeline": environment.timeline,
        "hierarchical": environment.hierarchical,
        "check_parameters": environment.check_parameters,
        "survive": environment.survive,
    }
    try:
        # A secret of the user's takes precedence over the launcher's.
        if given is not None or secret is None:
            secret = agree_on_secret(store, placement.rank, given)
    except LaunchEnvironmentError:
        refuse(store, placement.rank)
        raise
    own = RankInfo.of(placement, os.getpid(), _own_version(), settings)
    infos, signer = exchange_rank_info(store, own, Signer(secret), init_timeout.limit)
    if placement.size > 1 and len({info.placement.node for info in infos}) == 1:
        # One host: let gloo listen on loopback, which no other host can reach, unless the user has chosen an interface.
        process.choose_interface(interface_of(LOOPBACK))
    names = tuple(f"rank {rank} ({info.placement.host})" for rank, info in enumerate(infos))
    return _Ranks(infos, ConnectingRanks(PrefixStore("engines", store), signer, placement.rank, names, init_timeout))


def _world_of(
    placement: Placement,
    engine_factory: EngineFactory,
    ranks: _Ranks,
    environment: Environment,
    process: ProcessState,
    undo: contextlib.ExitStack,
    leave: Callable[[], None],
    seat: Seat | None = None,
) -> World:
    open_log(environment, placement.rank)
    infos, connecting = ranks.infos, ranks.connecting
    placements = [info.placement for info in infos]
    topology = placements_to_topology(placement.rank, placements)
    generation = Generation()
    group = Group(
        engine_factory,
        placement.rank,
        placement.size,
        topology.hosts,
        signer=connecting.signer,
        watch=generation.watch,
    )
    undo.callback(group.close)
    for remark in environment.remarks if placement.rank == 0 else ():
        log.warning(remark)
    for name in ("HVDLITE_CHECK", "HVDLITE_SHM"):
        _require_same_switch(name, infos, group)
    nodes = [placement.node for placement in placements]
    # Equal on all ranks, because rank 0's setting counts.
    survives = infos[0].settings["survive"] and seat is not None
    kept = None
    if survives:
        kept = process.keep("shared memory", None, KeptMemory, KeptMemory.close)
        kept.begin([info.pid for info in infos if info.placement.node == placement.node])
    within = None
    if environment.shm and topology.local_size == len(placements) > 1:
        group = _over_shared_memory(group, generation, engine_factory, connecting, kept)
        undo.callback(group.close)
    elif environment.shm and topology.local_size > 1:
        within = _between_neighbours(placement, nodes, engine_factory, connecting, kept)
    # Rank 0's setting counts, because its measurements decide too.
    hierarchical = infos[0].settings["hierarchical"]
    gpu = _own_gpu(group, topology) if hierarchical is None else None
    choose_levels(group, engine_factory, within, nodes, hierarchical, gpu)
    # Equal on all ranks, because the comparison is a collective.
    environment = replace(
        environment,
        check_parameters=infos[0].settings["check_parameters"],
        survive=survives,
    )
    if placement.rank == 0:
        backend = engine_factory.backend if isinstance(engine_factory, TorchEngineFactory) else ""
        log_startup(group.engine, nodes, backend, replace(environment, hierarchical=hierarchical))
    timeout_s = connecting.init_timeout.timeout.total_seconds()
    controller = make_controller(group, generation, nodes, environment, timeout_s)
    undo.callback(controller.close)
    # Rank 0 writes the file, so its variable counts.
    timeline_path = infos[0].settings["timeline"]
    if timeline_path not in (None, DYNAMIC):
        undo.callback(generation.recorder.forget)
        timeline.start(generation.recorder, group, controller, timeline_path)
    sets = Registry(group, controller, generation, is_elastic=seat is not None)
    return World(topology, group, generation, controller, environment, sets, leave, os.getpid(), seat)


def _require_same_switch(name: str, infos: Sequence[RankInfo], group: Group) -> None:
    first = infos[0].settings[name]
    for rank, info in enumerate(infos):
        if info.settings[name] != first:
            raise MismatchError(
                f"hvd.init(): {name} (0 or 1) is {first!r} on {group.describe_rank(0)} and "
                f"{info.settings[name]!r} on {group.describe_rank(rank)}: every rank must pass the same value"
            )


def _over_shared_memory(
    group: Group,
    generation: Generation,
    engine_factory: EngineFactory,
    ranks: ConnectingRanks,
    kept: KeptMemory | None,
) -> Group:
    """Closes the group and returns one of the same ranks over shared memory; all ranks must be on one host.

    ``engine_factory`` makes the engines for tensors and collectives that shared memory does not support.
    """
    on_host = ShmEngineFactory(ranks, engine_factory, for_gpus=torch.cuda.is_available(), kept=kept)
    signer = group.signer.derive("shared memory")
    shared = Group(on_host, group.rank, group.size, group.hosts, signer=signer, watch=generation.watch)
    group.close()
    return shared


def _between_neighbours(
    placement: Placement,
    nodes: Sequence[str],
    engine_factory: EngineFactory,
    ranks: ConnectingRanks,
    kept: KeptMemory | None,
) -> EngineFactory:
    """Makes engines over shared memory between the ranks of this host; ``nodes`` has the node of every rank."""
    group_ranks = [rank for rank, node in enumerate(nodes) if node == placement.node]
    group_rank, token = group_ranks.index(placement.rank), f"host of rank {group_ranks[0]}"
    others = engine_factory.among(group_ranks, group_rank, token)
    neighbours = ranks.among(group_ranks, group_rank, token)
    return ShmEngineFactory(neighbours, others, for_gpus=torch.cuda.is_available(), kept=kept)


def _own_gpu(group: Group, topology: Topology) -> torch.device | None:
    """Returns this rank's GPU if hierarchical all-reduces over NCCL are possible; otherwise None.

    They need several hosts, the same number of ranks (more than one) on each, and a GPU for every rank. Every rank
    must call it, and waits for all.
    """
    if not topology.is_homogeneous or topology.local_size in (1, topology.size):
        return None
    own = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        own = torch.device("cuda", topology.local_rank % torch.cuda.device_count())
    number = None if own is None else str(torch.cuda.get_device_properties(own).uuid)
    numbers = group.all_gather_json(number, "hvd.init()")
    return own if None not in numbers and len(set(numbers)) == group.size else None


def _leave(client: StoreConnection | None, connections: Connections) -> None:
    connections.shut_down()
    if dist.is_initialized():
        dist.destroy_process_group()
    if client is not None:
        client.close()


@cache  # reading it takes a millisecond or more, and a worker of an elastic job may enter any number of worlds
def _own_version() -> str:
    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "of a source tree"
