"""
Gets a worker of an elastic job into a world: asks hvdlite-run for a rank in the next generation, and connects.

If its ranks cannot connect, because one of them is lost meanwhile, it asks for a rank in a later generation. A new
worker stands by until its program calls the function of `hvd.elastic.run`, in a world of its own (`_stand_by`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from hvdlite_wire.codec import Refusals, encode
from hvdlite_wire.job_contract import CHAOS, answer_key, ask_key
from hvdlite_wire.store_requests import NewWorkerPolicy, RankAssignment, StoreRequest

from ..calls.generation import Generation
from ..comm.engine import SingleRankFactory
from ..comm.gloo import Connecting, InitTimeout
from ..comm.gloo_sockets import cut_links
from ..comm.group import Group
from ..control.unchecked import StandbyController
from ..errors import CommunicationError
from ..faults import arm, point
from ..log import log, open_log
from ..rendezvous.elastic_store import KeyListener, find_program, take_back, wait_for_rank, wait_for_rank_or_program
from ..rendezvous.host_address import refused_by
from ..rendezvous.launchers import ElasticWorker, read_placement
from ..rendezvous.placement import placements_to_topology
from ..rendezvous.store_client import StoreClient
from ..signing import Signer
from .connect_ranks import LauncherEnd, connect_all, store_client
from .make_world import InitCall, World
from .process_set_registry import Registry
from .retry import Retry

# How long the ranks of an elastic job's generation may take to connect. All have called init when it is published.
_GENERATION_LIMIT = timedelta(seconds=30)

# How often the same ranks of an elastic job try to connect before the error is raised: as often as hvdlite-run lets
# them (`elastic.hangs`), which gives up hosts that refuse connections.
_TRIES = 5


def connect_elastic(worker: ElasticWorker, call: InitCall) -> World:
    """Asks hvdlite-run for a rank in the next generation and connects to its ranks, until that succeeds.

    If the ranks of a generation cannot connect, hvdlite-run publishes another one, without the rank that was lost. If
    it consists of the same ranks, because none was lost, the error is raised in the end.
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
            return _connect(worker, assignment, launcher, call)
        except CommunicationError as error:
            if not retry.failed(assignment.size, assignment.newcomers):
                raise
            log.info("the ranks of generation %d could not connect, and try again: %s", assignment.generation, error)


def _connect(worker: ElasticWorker, assignment: RankAssignment, launcher: LauncherEnd, call: InitCall) -> World:
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
    """A context in which the ranks of a generation connect: that fails as soon as one of them is lost, or gives up."""
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
    """Returns a world without other ranks, in which a new worker makes what its program needs to become a rank.

    ``hosts`` are those of the ranks that there are.
    """
    call.process.has_stood_by = True
    # It takes the place of one that was lost, if not all others'.
    size = max(1, len(hosts))
    assignment = RankAssignment(0, size - 1, size, 1)
    placement = read_placement(os.environ, assignment)
    assert placement is not None, "it is a worker of hvdlite-run"
    alone = placements_to_topology(0, [placement])
    local_size = max(1, hosts.count(placement.host))
    topology = replace(alone, rank=assignment.rank, size=size, local_size=local_size)
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
    """Makes an optimizer, for which PyTorch imports some 800 modules.

    That takes seconds, in which the other ranks of an elastic job would wait for a worker that joins them.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], lr=0.0)


def _fault_question(store_url: str, worker: int) -> Callable[[int, int], bool]:
    """Returns what asks hvdlite-run, through its store, whether a fault of ``--chaos`` may happen in this worker now.

    The answer comes before the fault, so hvdlite-run's report has each of them.
    """
    client, numbers = StoreClient.from_url(store_url), itertools.count()

    def may_begin(index: int, step: int) -> bool:
        """Returns whether the fault at this place of HVDLITE_CHAOS may happen in this step; waits for the answer."""
        number = next(numbers)
        try:
            client.set({ask_key(worker): b"%d %d %d" % (number, index, step)})
            (answer,) = client.get([answer_key(worker, number)])
        except (OSError, ValueError):  # the job ends
            return False
        return answer == b"now"

    return may_begin
