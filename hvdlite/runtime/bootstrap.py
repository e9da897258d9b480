"""
Finds out in what kind of job this process is, and gets it into the `World` of that job's ranks.

    enter ──┬── a launcher's job, or a place that was given ── connect_ranks ──┬── make_world ── World
            ├── a worker of an elastic job ── elastic_world ── connect_ranks ──┤
            └── the program's own process group, or no other ranks ────────────┘

`world` calls `enter` in `hvd.init` and keeps the result. A process without other ranks gets a world of one rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import torch.distributed as dist
from hvdlite_wire.linux import interface_with
from hvdlite_wire.store_requests import StoreRequest
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ..comm.engine import SingleRankFactory
from ..comm.gloo import InitTimeout
from ..comm.torch_factory import TorchEngineFactory
from ..environment import Environment
from ..errors import CommunicationError, LaunchEnvironmentError, lack_of
from ..rendezvous.launchers import read_elastic_worker, read_placement, refuse_horovod_rank
from ..rendezvous.placement import GivenPlace, Placement
from ..rendezvous.process_state import ProcessState
from .connect_ranks import LauncherEnd, connect_all, store_client
from .elastic_world import connect_elastic
from .make_world import InitCall, World, exchange_infos, make_world

_CANNOT_SURVIVE = (
    "hvd.init(survive=True), or HVDLITE_SURVIVE=1: the ranks of this job cannot change, so no step can go on without "
    "one of them: start it with hvdlite-run --survive --min-np N"
)


def enter(timeout: timedelta, environment: Environment, process: ProcessState) -> World:
    """Connects to the other ranks and returns the world. Every rank must call it, and waits for all.

    If it fails, it closes what it has opened. ``process`` has the state kept from earlier worlds.
    """
    try:
        with contextlib.ExitStack() as undo:
            undo.callback(process.world_left)
            call = InitCall(InitTimeout(timeout), environment, process, undo)
            world = _enter(call)
            undo.pop_all()
    except (OSError, RuntimeError) as error:
        if (lack := lack_of(error)) is None:
            raise
        raise CommunicationError(f"hvd.init() failed: {lack}") from error
    call.timeout.end_of_init()
    return world


def _enter(call: InitCall) -> World:
    if dist.is_available() and dist.is_initialized():
        if read_elastic_worker(os.environ) is not None:
            raise LaunchEnvironmentError(
                "hvd.init(): the program has initialised torch.distributed, whose ranks cannot change, and this is an "
                "elastic job (hvdlite-run --min-np): leave init_process_group() out, or start the job with -np alone"
            )
        if call.environment.survive:
            raise LaunchEnvironmentError(_CANNOT_SURVIVE)
        return _adopt(call)
    if call.process.given_place is not None:
        return _connect_given(call.process.given_place, call)
    worker = read_elastic_worker(os.environ)
    if worker is not None:
        return connect_elastic(worker, call)
    placement = read_placement(os.environ)
    if call.environment.survive and placement is not None and placement.size > 1:
        raise LaunchEnvironmentError(_CANNOT_SURVIVE)
    if placement is None:
        refuse_horovod_rank(os.environ)
        return _alone(call)
    return _connect(placement, call)


def _alone(call: InitCall) -> World:
    placement = Placement(rank=0, size=1, node="", host=socket.gethostname(), local_rank=0)
    ranks = exchange_infos(placement, HashStore(), None, call)
    return make_world(placement, SingleRankFactory(), ranks, call, leave=lambda: None)


def _connect_given(place: GivenPlace, call: InitCall) -> World:
    if call.environment.survive:
        raise LaunchEnvironmentError(_CANNOT_SURVIVE)
    if place.placement.size == 1:
        return _alone(call)
    if place.address is not None:
        call.process.choose_interface(interface_with(place.address))
    return connect_all(place.placement, place.store, None, call)


def _connect(placement: Placement, call: InitCall) -> World:
    if placement.store_url is None:
        return connect_all(placement, None, None, call)
    assert placement.worker is not None, "hvdlite-run has set its number beside the store's URL"
    client = store_client(placement.store_url, call.process)
    launcher = LauncherEnd(client, placement.worker, f"rank {placement.rank} ({placement.host})")
    call.undo.callback(launcher.client.close)
    launcher.tell(StoreRequest.INIT_STARTED, call.timeout.left())
    try:
        world = connect_all(placement, launcher.client, None, call)
    except BaseException:
        launcher.tell_failure()
        raise
    launcher.tell(StoreRequest.INIT_DONE, call.timeout.left())
    return world


def _adopt(call: InitCall) -> World:
    """Makes a world of the ranks of the program's own default group, with process groups of its own.

    Separate groups keep the program's collectives from mixing with hvdlite's.
    """
    configured = str(dist.get_backend_config())
    # Keep the program's backend for CUDA tensors (with gloo, two ranks can share a GPU); CPU tensors need gloo.
    cuda = next((item.partition(":")[2] for item in configured.split(",") if item.startswith("cuda:")), None)
    backend = f"cpu:gloo,cuda:{cuda}" if cuda not in (None, "undefined") else "gloo"
    place = call.process.given_place
    given = read_placement(os.environ) if place is None else place.placement
    host = socket.gethostname()
    placement = Placement(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        node=host if given is None else given.node,
        host=host if given is None else given.host,
        local_rank=None if given is None else given.local_rank,
    )
    assert dist.group.WORLD is not None, "it has been asked"
    store = PrefixStore(f"hvdlite.init{call.process.next_init_in(dist.group.WORLD)}", _get_default_store())
    ranks = exchange_infos(placement, store, None, call)
    return make_world(placement, TorchEngineFactory(backend, ranks.connecting), ranks, call, leave=lambda: None)
