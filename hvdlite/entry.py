"""
How a process becomes one of the ranks: by its launcher's word, in a process group that is there, or alone.

    Seat ── a store ── the default group ── introductions ── conductor ── World

Which world is the current one is known to `world`; here nothing is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from .agreement.conductor import Conductor
from .agreement.connect import make_conductor
from .channels.choice import choose_levels
from .channels.collective import Group
from .channels.engine import AloneChannels, Channels, TorchChannels
from .environment import DYNAMIC, Environment
from .errors import CommunicationError, LaunchEnvironmentError, MismatchError
from .log import log, open_log
from .meeting.client import Operation, StoreClient
from .meeting.rendezvous import meet
from .meeting.store import LauncherStore
from .meeting.topology import Seat, Topology, read_seat, refuse_place_of_horovods, seats_to_topology
from .registry import Registry
from .shm.channels import ShmChannels
from .signing import Signer
from .timeline import session as timeline

_GIVING_UP = timedelta(seconds=1)  # for saying so

_GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"

_generation = itertools.count()


@dataclass(frozen=True)
class World:
    """All ranks of the job, the process that is in it, and what is to be done once the group is closed."""

    topology: Topology
    group: Group
    conductor: Conductor
    environment: Environment
    sets: Registry
    leave: Callable[[], None]
    pid: int


def enter(timeout: timedelta, environment: Environment) -> World:
    """The world that this process is in. Every rank must call it; it waits for all.

    Where it fails, whatever it has made by then is given back.
    """
    with contextlib.ExitStack() as undo:
        world = _enter(timeout, environment, undo)
        undo.pop_all()
    return world


def _enter(timeout: timedelta, environment: Environment, undo: contextlib.ExitStack) -> World:
    """``undo`` is given what is to be done if it fails, as soon as it has to be."""
    if dist.is_available() and dist.is_initialized():
        return _adopt(timeout, environment, undo)
    seat = read_seat(os.environ)
    if seat is None:
        refuse_place_of_horovods(os.environ)
        return _alone(environment, undo)
    return _connect(seat, timeout, environment, undo)


def _alone(environment: Environment, undo: contextlib.ExitStack) -> World:
    seat = Seat(rank=0, size=1, node="", host=socket.gethostname(), local_rank=0)
    return _world_of(seat, AloneChannels(), timedelta(), environment, undo, leave=lambda: None)


def _connect(seat: Seat, timeout: timedelta, environment: Environment, undo: contextlib.ExitStack) -> World:
    backend = _GLOO_AND_NCCL if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    client = None if seat.store_url is None else StoreClient.from_url(seat.store_url)
    if client is not None:
        undo.callback(client.close)
    _tell_launcher(client, Operation.JOINING, seat, timeout)
    try:
        world = _meet_all(seat, backend, client, timeout, environment, undo)
    except BaseException:
        with contextlib.suppress(CommunicationError):
            _tell_launcher(client, Operation.GAVE_UP, seat, _GIVING_UP)
        raise
    _tell_launcher(client, Operation.JOINED, seat, timeout)
    return world


def _meet_all(
    seat: Seat,
    backend: str,
    client: StoreClient | None,
    timeout: timedelta,
    environment: Environment,
    undo: contextlib.ExitStack,
) -> World:
    # It was not initialised before, so whatever there is of it by then is ours.
    undo.callback(_leave, client)
    try:
        store = _meeting_place(seat, client, timeout)
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=timeout)
    except LaunchEnvironmentError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"hvd.init() failed on rank {seat.rank} ({seat.host}): another rank did not call it within "
            f"{timeout.total_seconds():g} s, ended before it did, or cannot be reached. ({error})"
        ) from error
    channels = TorchChannels(backend, timeout, dist.group.WORLD)
    return _world_of(seat, channels, timeout, environment, undo, leave=partial(_leave, client))


def _tell_launcher(client: StoreClient | None, what: Operation, seat: Seat, timeout: timedelta) -> None:
    """How far this rank is: others may wait for it, and the launcher knows whether it will ever come."""
    if client is None:
        return
    try:
        client.request(what, [b"%d" % seat.rank], timeout.total_seconds())
    except (OSError, ValueError) as error:
        raise CommunicationError(
            f"hvd.init() failed on rank {seat.rank} ({seat.host}): hvdlite-run's agent cannot be asked: {error}"
        ) from error


def _meeting_place(seat: Seat, client: StoreClient | None, timeout: timedelta) -> Store | None:
    """The store in which all ranks find each other; None for the one that MASTER_ADDR and MASTER_PORT name."""
    # A prefix of its own for every init, so that one after a shutdown does not read the first one's keys.
    generation = f"init{next(_generation)}"
    if seat.launcher is not None:
        return meet(seat, os.environ, generation, timeout)
    return None if client is None else PrefixStore(generation, LauncherStore(client, timeout))


def _adopt(timeout: timedelta, environment: Environment, undo: contextlib.ExitStack) -> World:
    """Groups of our own beside the program's: its collectives cannot get between ours."""
    configured = str(dist.get_backend_config())
    # The program's choice for CUDA tensors stays (gloo lets two ranks share a GPU); CPU tensors need gloo.
    cuda = next((item.partition(":")[2] for item in configured.split(",") if item.startswith("cuda:")), None)
    backend = f"cpu:gloo,cuda:{cuda}" if cuda not in (None, "undefined") else "gloo"
    told = read_seat(os.environ)
    host = socket.gethostname()
    seat = Seat(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        node=host if told is None else told.node,
        host=host if told is None else told.host,
        local_rank=None if told is None else told.local_rank,
    )
    return _world_of(seat, TorchChannels(backend, timeout), timeout, environment, undo, leave=lambda: None)


def _world_of(
    seat: Seat,
    channels: Channels,
    timeout: timedelta,
    environment: Environment,
    undo: contextlib.ExitStack,
    leave: Callable[[], None],
) -> World:
    open_log(environment, seat.rank)
    group = Group(
        channels, seat.rank, seat.size, [f"host of rank {rank}" for rank in range(seat.size)], signer=Signer(b"")
    )
    undo.callback(group.close)
    token = secrets.token_hex(8)
    introductions = group.all_gather_json(
        (asdict(seat), _own_version(), environment.timeline, token, environment.hierarchical), "hvd.init()"
    )
    seats = [Seat(**introduced) for introduced, *_ in introductions]
    topology = seats_to_topology(seat.rank, seats)
    group.hosts = topology.hosts
    for other, (_, other_version, *_) in enumerate(introductions):
        if other_version != introductions[0][1]:
            raise MismatchError(
                f"hvdlite is version {introductions[0][1]} on {group.describe_rank(0)} and {other_version} on "
                f"{group.describe_rank(other)}: install the same version everywhere"
            )
    for remark in environment.remarks if seat.rank == 0 else ():
        log.warning(remark)
    group.require_agreement(environment.check, "hvd.init()", "HVDLITE_CHECK (0 or 1)")
    group.require_agreement(environment.shm, "hvd.init()", "HVDLITE_SHM (0 or 1)")
    nodes = [seat.node for seat in seats]
    token, within = introductions[0][3], None
    if environment.shm and topology.local_size == len(seats) > 1:
        group = _over_shared_memory(group, channels, token, timeout)
        undo.callback(group.close)
    elif environment.shm and topology.local_size > 1:
        within = _between_neighbours(seat, nodes, channels, token, timeout)
    # Rank 0's word counts, as its measurements do.
    hierarchical = introductions[0][4]
    gpu = _own_gpu(group, topology) if hierarchical is None else None
    choose_levels(group, channels, within, nodes, hierarchical, gpu)
    conductor = make_conductor(group, nodes, environment, timeout.total_seconds())
    undo.callback(conductor.close)
    # Rank 0 is the one to write it, so its variable counts.
    timeline_path = introductions[0][2]
    if timeline_path not in (None, DYNAMIC):
        undo.callback(group.recorder.forget)
        timeline.start(group, conductor, timeline_path)
    return World(topology, group, conductor, environment, Registry(group, conductor), leave, os.getpid())


def _over_shared_memory(group: Group, torchs: Channels, token: str, timeout: timedelta) -> Group:
    """The same ranks, all of one host, over what is fastest there; ``torchs`` carries what that does not."""
    store = PrefixStore(f"hvdlite.{token}", _get_default_store())
    channels = ShmChannels(store, group.rank, group.size, timeout, torchs, for_gpus=torch.cuda.is_available())
    shared = Group(channels, group.rank, group.size, group.hosts, signer=group.signer.derive("shared memory"))
    group.close()
    return shared


def _between_neighbours(seat: Seat, nodes: Sequence[str], torchs: Channels, token: str, timeout: timedelta) -> Channels:
    """Shared memory between the ranks of this host; ``nodes`` are those of all ranks."""
    ranks = [rank for rank, node in enumerate(nodes) if node == seat.node]
    place = ranks.index(seat.rank)
    store = PrefixStore(f"hvdlite.{token}.{ranks[0]}", _get_default_store())
    others = torchs.among(ranks, place, f"{token}.{ranks[0]}")
    return ShmChannels(store, place, len(ranks), timeout, others, for_gpus=torch.cuda.is_available())


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


def _leave(client: StoreClient | None) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if client is not None:
        client.close()


def _own_version() -> str:
    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "of a source tree"
