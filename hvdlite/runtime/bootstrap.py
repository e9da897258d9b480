"""
Finds out in what kind of job this process is, and gets it into the `World` of that job's ranks.

    enter ──┬── a launcher's job, or a place that was given ── connect_ranks ──┬── make_world ── World
            ├── a worker of an elastic job: its rank in a generation ──────────┤
            └── the program's own process group, or no other ranks ────────────┘

`world` calls `enter` in `hvd.init` and keeps the result. A process without other ranks gets a world of one rank. If the
ranks of a generation cannot connect, because one of them is lost meanwhile, a worker asks for a rank in a later one. A
new worker stands by until its program calls the function of `hvd.elastic.run`, in a world of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from hvdlite_wire.codec import Refusals, encode
from hvdlite_wire.job_contract import CHAOS, answer_key, ask_key
from hvdlite_wire.linux import interface_with
from hvdlite_wire.store_requests import NewWorkerPolicy, RankAssignment, StoreRequest
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from ..calls.generation import Generation
from ..comm.engine import SingleRankFactory
from ..comm.gloo import Connecting, InitTimeout
from ..comm.gloo_sockets import cut_links
from ..comm.group import Group
from ..comm.torch_engine import TorchEngineFactory
from ..control.unchecked import StandbyController
from ..environment import Environment
from ..errors import CommunicationError, LaunchEnvironmentError, lack_of
from ..faults import arm, point
from ..log import log, open_log
from ..rendezvous.elastic_store import KeyListener, find_program, take_back, wait_for_rank, wait_for_rank_or_program
from ..rendezvous.host_address import refused_by
from ..rendezvous.launchers import ElasticWorker, read_elastic_worker, read_placement, refuse_horovod_rank
from ..rendezvous.placement import GivenPlace, Placement, placements_to_topology
from ..rendezvous.process_state import ProcessState
from ..rendezvous.store_client import StoreClient
from ..signing import Signer
from .connect_ranks import LauncherEnd, connect_all, store_client
from .make_world import InitCall, World, exchange_infos, make_world
from .process_set import Registry
from .survival import Retry

_GENERATION_LIMIT = timedelta(seconds=30)  # to connect; all ranks have called init when a generation is published
_TRIES = 5  # of the same ranks, as often as hvdlite-run lets them (`elastic.hangs`): it gives up hosts that refuse


def _connect_elastic(worker: ElasticWorker, call: InitCall) -> World:
    """Asks hvdlite-run for a rank in the next generation and connects to its ranks, until that succeeds.

    It publishes one without the rank that was lost; if it has the same ranks, the error is raised in the end.
    """
    process = call.process
    open_log(call.environment, f"worker {worker.number}")
    if given := os.environ.get(CHAOS):
        arm(given, _fault_question(worker.store_url, worker.number), cut_links)
    launcher = LauncherEnd(store_client(worker.store_url, process), worker.number, f"worker {worker.number}")
    call.undo.callback(launcher.client.close)
    # The sets need the other ranks.
    may_stand_by = process.generation == 0 and not process.has_stood_by and not process.init_arguments["process_sets"]
    if process.generation == 0 and not process.has_stood_by:
        _import_for_optimizers()
        point("init")
    if may_stand_by and (hosts := find_program(launcher.client)) is not None:
        return _stand_by(hosts, worker, call)
    retry = Retry(_TRIES)
    while True:
        if (memory := process.kept("shared memory")) is not None:
            # Once all have asked for a rank, others may use memory again that this process has written to.
            memory.wait_until_quiet()
        policy = () if process.newcomers is NewWorkerPolicy.WELCOME else (b"%d" % process.newcomers,)
        launcher.tell(StoreRequest.INIT_STARTED, call.timeout.timeout, process.generation, *policy)
        if may_stand_by:
            listening = StoreClient.from_url(worker.store_url)
            found = wait_for_rank_or_program(launcher.client, listening, worker.number)
            if not isinstance(found, RankAssignment):
                # As long as it counts as ready, the others would wait for it.
                launcher.tell(StoreRequest.INIT_FAILED, call.timeout.timeout, 0)
                if take_back(launcher.client, worker.number):
                    return _stand_by(found, worker, call)
                found = wait_for_rank(launcher.client, worker.number, 0)
            assignment, may_stand_by = found, False
        else:
            assignment = wait_for_rank(launcher.client, worker.number, process.generation)
        process.generation, process.assignment = assignment.generation, assignment
        # The ranks of the first generation begin the training, with what their programs have made.
        process.has_state |= assignment.generation == 1
        try:
            return _connect_generation(worker, assignment, launcher, call)
        except CommunicationError as error:
            if not retry.failed(assignment.size, assignment.newcomers):
                raise
            log.info("the ranks of generation %d could not connect, and try again: %s", assignment.generation, error)


def _connect_generation(
    worker: ElasticWorker, assignment: RankAssignment, launcher: LauncherEnd, call: InitCall
) -> World:
    """Connects to the ranks of a generation, and tells hvdlite-run whether that has succeeded."""
    placement = read_placement(os.environ, assignment)
    assert placement is not None, "it is a worker of hvdlite-run"
    timeout = InitTimeout(call.timeout.timeout, limit=_GENERATION_LIMIT)
    connecting = Connecting(assignment.size)
    try:
        with contextlib.ExitStack() as attempt:
            attempt.callback(call.process.world_left)
            with _ended_with(worker, assignment, connecting):
                attempted = replace(call, timeout=timeout, undo=attempt)
                world = connect_all(placement, launcher.client, assignment, attempted, connecting)
            call.undo.push(attempt.pop_all())
    except CommunicationError as error:
        by_rank = dict(connecting.addresses_by_rank)
        own = by_rank.pop(assignment.rank, ())
        others = dict.fromkeys(address for each in by_rank.values() for address in each if address not in own)
        launcher.tell_failure(assignment.generation, encode(Refusals(own, refused_by(error, others))))
        raise
    except BaseException:
        launcher.tell_failure(assignment.generation)
        raise
    launcher.tell(StoreRequest.INIT_DONE, call.timeout.timeout, assignment.generation)
    timeout.end_of_init()
    return replace(world, connecting=Connecting(assignment.size))


@contextlib.contextmanager
def _ended_with(worker: ElasticWorker, assignment: RankAssignment, connecting: Connecting) -> Iterator[None]:
    """A context in which the ranks of a generation connect: it fails as soon as one is lost, or gives up."""
    listener = KeyListener(
        StoreClient.from_url(worker.store_url),
        f"{assignment.prefix}/end",
        lambda _: None,
        lambda _: connecting.give_up(),
    )
    try:
        yield
    finally:
        connecting.close()
        listener.close()


def _stand_by(hosts: Sequence[str], worker: ElasticWorker, call: InitCall) -> World:
    """Returns a world without other ranks, which are on ``hosts``, where a new worker makes what its program needs."""
    call.process.has_stood_by = True
    # It takes the place of one that was lost, if not all others'.
    size = max(1, len(hosts))
    assignment = RankAssignment(0, size - 1, size, 1)
    placement = read_placement(os.environ, assignment)
    assert placement is not None, "it is a worker of hvdlite-run"
    topology = replace(
        placements_to_topology(0, [placement]),
        rank=assignment.rank,
        size=size,
        local_size=max(1, hosts.count(placement.host)),
    )
    generation = Generation()
    signer = Signer(os.urandom(32))
    group = Group(SingleRankFactory(), 0, 1, [placement.host], signer=signer, watch=generation.watch, label="standby")
    call.undo.callback(group.close)
    controller = StandbyController(1, generation.recorder)
    sets = Registry(group, controller, generation, is_elastic=True)
    log.info("worker %d joins a job that runs already, and makes its model before it gets a rank", worker.number)
    return World(
        topology,
        group,
        generation,
        controller,
        call.environment,
        sets,
        lambda: None,
        os.getpid(),
        assignment,
        stands_by=True,
    )


def _import_for_optimizers() -> None:
    """Makes an optimizer: PyTorch's imports for it take seconds, in which the other ranks would wait for this one."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], lr=0.0)


def _fault_question(store_url: str, worker: int) -> Callable[[int, int], bool]:
    """Returns what asks hvdlite-run, whose report has each fault of ``--chaos``, whether one may happen here now."""
    client, numbers = StoreClient.from_url(store_url), itertools.count()

    def may_begin(index: int, step: int) -> bool:
        number = next(numbers)
        try:
            client.set({ask_key(worker): b"%d %d %d" % (number, index, step)})
            (answer,) = client.get([answer_key(worker, number)])
        except (OSError, ValueError):  # the job ends
            return False
        return answer == b"now"

    return may_begin


_CANNOT_SURVIVE = (
    "hvd.init(survive=True), or HVDLITE_SURVIVE=1: the ranks of this job cannot change, so no step can go on without "
    "one of them: start it with hvdlite-run --survive --min-np N"
)


def enter(timeout: timedelta, environment: Environment, process: ProcessState) -> World:
    """Connects to the other ranks and returns the world; closes what it has opened if that fails.

    Every rank must call it, and waits for all. ``process`` has the state kept from earlier worlds.
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
        return _connect_elastic(worker, call)
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
    """Makes a world of the program's own default group, with process groups of its own: collectives must not mix."""
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
