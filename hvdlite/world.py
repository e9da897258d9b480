"""
The world: the one group of all ranks, and the one module variable of hvdlite.

    init: launcher's variables, or torch.distributed as it stands, or nobody else ── World ── rank(), size(), …

Only this module knows that there is a current world; everything below is handed its `Group`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from .agreement.conductor import Conductor
from .agreement.connect import make_conductor
from .channels.collective import Group
from .channels.engine import AloneChannels, Channels, TorchChannels
from .environment import DYNAMIC, Environment, read_environment
from .errors import CommunicationError, LaunchEnvironmentError, MismatchError, NotInitializedError
from .farewell import say_farewell
from .log import log, open_log
from .meeting.client import Operation, StoreClient
from .meeting.rendezvous import meet
from .meeting.store import LauncherStore
from .meeting.topology import Seat, Topology, read_seat, seats_to_topology
from .process_set import ProcessSet, check_first_sets
from .registry import Registry
from .timeline import session as timeline

# As torch.distributed's own: rank 0 may evaluate or save for long while the others wait; stalls are told of before.
DEFAULT_TIMEOUT_S = 1800.0

_GIVING_UP = timedelta(seconds=1)  # for saying so

_GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"


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


_world: World | None = None
_generation = itertools.count()


def init(timeout_s: float | None = None, *, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Find this process's place among the others and connect to them.

    Every rank must call it, and each waits for all. Does nothing where it has been called already; after
    `shutdown` it may be called again.

    The place comes from hvdlite-run, from torchrun (or whoever sets ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``), from OpenMPI's or MPICH's ``mpirun``, from Slurm's ``srun``, or from
    `torch.distributed` where the program has initialised it: that is adopted with its choice of backend, given
    a group of hvdlite's own, and never destroyed here.
    A plain ``python train.py`` is one rank that needs no network. CUDA tensors travel over NCCL, CPU
    tensors over gloo.

    ``timeout_s``: a collective that another rank does not join for this long raises
    `CommunicationError`. Unless given, it is ``HVDLITE_GLOO_TIMEOUT_SECONDS``, or 1800.

    ``process_sets``: those to register at once, equal on all ranks; more can be added at any time, with or without
    Horovod's word for that, ``"dynamic"``.
    """
    global _world  # noqa: PLW0603 - the one module variable that rank(), size() and the rest read
    if _world is not None:
        return
    first_sets = check_first_sets(process_sets)
    if timeout_s is not None and (not isinstance(timeout_s, (int, float)) or not timeout_s > 0):
        raise ValueError(f"timeout_s={timeout_s!r} is not a positive number of seconds")
    if _is_child_of_multiprocessing():
        raise LaunchEnvironmentError(
            "hvd.init() was called in a child process that multiprocessing started, where it would take the place "
            'of its parent\'s rank: put what the main program does under `if __name__ == "__main__":`'
        )
    environment = read_environment(os.environ)
    timeout = timedelta(seconds=timeout_s or environment.timeout_s or DEFAULT_TIMEOUT_S)
    if dist.is_available() and dist.is_initialized():
        _world = _adopt(timeout, environment)
    else:
        seat = read_seat(os.environ)
        _world = _alone(environment) if seat is None else _connect(seat, timeout, environment)
    try:
        for process_set in first_sets:
            _world.sets.add(process_set)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the other ranks; does nothing where `init` was not called.

    Waits for nobody, unless a timeline is being recorded: then for the others to bring their parts, for a few seconds.
    """
    global _world
    leaving, _world = _world, None
    if leaving is not None:
        timeline.leave(leaving.group, leaving.conductor)
        leaving.conductor.close()
        leaving.sets.close()
        leaving.group.close()
        leaving.leave()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not been called since."""
    return _world is not None


def current_world() -> World:
    """The world, or a NotInitializedError that says what to call."""
    if _world is None:
        # The first words are Horovod's, which users search for.
        raise NotInitializedError(
            "Horovod has not been initialized; use hvd.init(). (hvdlite: call hvd.init() once, at the "
            "start of the program, on every rank)"
        )
    return _world


def rank() -> int:
    """This process's number among all, from 0."""
    return current_world().topology.rank


def size() -> int:
    """How many processes train together."""
    return current_world().topology.size


def local_rank() -> int:
    """This process's number among those of its host, from 0: the GPU to use."""
    return current_world().topology.local_rank


def local_size() -> int:
    """How many processes run on this host."""
    return current_world().topology.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank, from 0."""
    return current_world().topology.cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return current_world().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every host runs as many of the processes."""
    return current_world().topology.is_homogeneous


def _is_child_of_multiprocessing() -> bool:
    # A spawned child imports the main program before it knows its parent; until then it is "inheriting".
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_starting or multiprocessing.parent_process() is not None


def _alone(environment: Environment) -> World:
    seat = Seat(rank=0, size=1, node="", host=socket.gethostname(), local_rank=0)
    return _world_of(seat, AloneChannels(), timedelta(), environment, leave=lambda: None)


def _connect(seat: Seat, timeout: timedelta, environment: Environment) -> World:
    backend = _GLOO_AND_NCCL if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    client = None if seat.store_url is None else StoreClient.from_url(seat.store_url)
    _tell_launcher(client, Operation.JOINING, seat, timeout)
    try:
        world = _meet_all(seat, backend, client, timeout, environment)
    except BaseException:
        with contextlib.suppress(CommunicationError):
            _tell_launcher(client, Operation.GAVE_UP, seat, _GIVING_UP)
        raise
    _tell_launcher(client, Operation.JOINED, seat, timeout)
    return world


def _meet_all(
    seat: Seat, backend: str, client: StoreClient | None, timeout: timedelta, environment: Environment
) -> World:
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
    return _world_of(seat, channels, timeout, environment, leave=_destroy_default_group)


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


def _adopt(timeout: timedelta, environment: Environment) -> World:
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
    return _world_of(seat, TorchChannels(backend, timeout), timeout, environment, leave=lambda: None)


def _world_of(
    seat: Seat, channels: Channels, timeout: timedelta, environment: Environment, leave: Callable[[], None]
) -> World:
    open_log(environment, seat.rank)
    group = Group(channels, seat.rank, seat.size, [f"host of rank {rank}" for rank in range(seat.size)])
    introductions = group.all_gather_object((seat, _own_version(), environment.timeline), "hvd.init()")
    seats = [introduced for introduced, _, _ in introductions]
    topology = seats_to_topology(seat.rank, seats)
    group.hosts = topology.hosts
    for other, (_, other_version, _) in enumerate(introductions):
        if other_version != introductions[0][1]:
            raise MismatchError(
                f"hvdlite is version {introductions[0][1]} on {group.describe_rank(0)} and {other_version} on "
                f"{group.describe_rank(other)}: install the same version everywhere"
            )
    for remark in environment.remarks if seat.rank == 0 else ():
        log.warning(remark)
    group.require_agreement(environment.check, "hvd.init()", "HVDLITE_CHECK (0 or 1)")
    conductor = make_conductor(group, [seat.node for seat in seats], environment, timeout.total_seconds())
    # Rank 0 is the one to write it, so its variable counts.
    timeline_path = introductions[0][2]
    if timeline_path not in (None, DYNAMIC):
        timeline.start(group, conductor, timeline_path)
    return World(topology, group, conductor, environment, Registry(group, conductor), leave, os.getpid())


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_version() -> str:
    try:
        return version("hvdlite")
    except PackageNotFoundError:
        return "of a source tree"


def _end_of_program() -> None:
    world = _world
    # A forked child has the connections too, but they are not its own to close.
    if world is not None and world.pid == os.getpid():
        say_farewell(world.topology.size, shutdown, lambda: timeline.save(world.group))


# Registered here and not in init(), so that it runs after whatever the program registers: the last word.
atexit.register(_end_of_program)
