"""
`hvd.init`, `hvd.shutdown`, and `hvd.rank`, `hvd.size` and their like, which read the current `World`.

    init ── bootstrap.enter ── makes the World ── rank(), size(), … read it ── shutdown closes it

The current world is a variable of this module, None outside of `init` and `shutdown`. Packages that this one imports
get a `Group` and a `Generation` as arguments; packages that import this one (`ops`, `optim`) call `current_world`. What
a process keeps from one world to the next is in this module's `rendezvous.process_state.ProcessState`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from hvdlite_wire.job_contract import JOB_DIR, STORE, WORKER
from hvdlite_wire.store_requests import RankAssignment
from hvdlite_wire.worker_status import OwnStatus, Pace, Wait

from .. import forks, timeline
from ..comm import deferred_close
from ..debugger import wait_for_debugger
from ..environment import READ_BY_INIT, CheckParameters, Environment, read_environment
from ..errors import (
    CommunicationError,
    LaunchEnvironmentError,
    NotInitializedError,
    WorkerRemovedError,
    describe_interrupt,
)
from ..log import log
from ..outside_graphs import outside_graphs
from ..rendezvous.elastic_store import (
    KeyListener,
    LastVotes,
    leave_last_votes,
    read_last_votes,
    respond,
    tell_of_program,
)
from ..rendezvous.launchers import mark_taken, place_in, read_elastic_worker, require_free
from ..rendezvous.placement import GivenPlace
from ..rendezvous.process_state import ProcessState
from ..rendezvous.store_client import StoreClient
from ..values import MOST, seconds, shown, whole_number
from .bootstrap import enter
from .departure import Exchanged, hasten_end, leave_at_exit
from .hang_report import HangReporter
from .make_world import World
from .process_set import ProcessSet, check_first_sets
from .survival import Retry, Survival
from .tracebacks import remove_hooks, shorten_tracebacks

_NOT_ELASTIC = (
    "this program is not in a function of hvd.elastic.run, so that it ends when a rank is lost: hvdlite-run --min-np "
    "can replace ranks only of programs that are. hvdlite-run --on-failure restart starts other programs anew"
)

_TRIES = 3  # of the same ranks of an elastic job to begin a world
_CLOSING_S = 5.0  # that the end of the program waits for objects that the garbage collector has found to be closed

_world: World | None = None
_process = ProcessState()
_exchanged = Exchanged()


@outside_graphs
def init(
    timeout_s: float | None = None,
    *,
    process_sets: Iterable[ProcessSet] | str | None = None,
    hierarchical: bool | None = None,
    check_parameters: CheckParameters | None = None,
    survive: bool | None = None,
) -> None:
    """Find this process's rank and connect to the other ranks.

    Every rank must call it, and waits for all. A second call does nothing; after `shutdown` it may be called again.

    The rank comes from hvdlite-run, from torchrun (or any launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``
    and ``MASTER_PORT``), from OpenMPI's or MPICH's ``mpirun``, or from Slurm's ``srun``. If the program has initialised
    `torch.distributed`, the ranks are those of its default group: hvdlite uses the backend of that group, makes groups
    of its own, and never destroys the program's. In an elastic job (``hvdlite-run --min-np``) each call may give this
    process another rank, and a worker that was removed from the job gets a `WorkerRemovedError`, which ends it.
    A plain ``python train.py`` is one rank and needs no network. CUDA tensors are sent over NCCL. CPU tensors are sent
    through shared memory between the ranks of a host, if there is enough of it, and over gloo between hosts.

    ``timeout_s``: a collective that another rank does not join for this long raises
    `CommunicationError`. The default is ``HVDLITE_GLOO_TIMEOUT_SECONDS``, or 1800.

    ``process_sets``: process sets to register at once, equal on all ranks. More can be added at any time; Horovod's
    value ``"dynamic"`` is accepted and not needed.

    ``hierarchical``: True makes all-reduces run in two levels, within each host and then between hosts, if there are
    several hosts with the same number of ranks, more than one. False makes them run in one level. The default is
    ``HVDLITE_HIERARCHICAL_ALLREDUCE``. If that is not set either, CPU tensors use two levels if the ranks of a host
    share memory, and CUDA tensors over NCCL use the one that is faster at start. Rank 0's value counts.

    ``check_parameters``: True makes the ranks of each `DistributedOptimizer` compare the values of its parameters at
    the first step; if they differ, all ranks raise a `MismatchError` that names the difference. A number N makes them
    compare at every N-th step after that too (1: at every step), False never. ``"warn"`` makes a difference at the
    first step a warning of one rank, after which they train on: the default of ``horovod.torch.init``. Here the default
    is ``HVDLITE_CHECK_PARAMETERS``, or True. Rank 0's value counts.

    ``survive``: True lets the other ranks finish a step in which one is lost, with the average of their own gradients,
    in a job of ``hvdlite-run --min-np`` (the manual's page on elastic training says more). The default is
    ``HVDLITE_SURVIVE``, which ``hvdlite-run --survive`` sets, or False. Rank 0's value counts.
    """
    if _world is not None:
        return
    is_adopted = dist.is_initialized()
    if not is_adopted:  # else PyTorch's hook is the program's own process group's
        remove_hooks()
    try:
        _init(timeout_s, process_sets, hierarchical, check_parameters, survive)
        world = current_world()
        mark_taken()
        if world.topology.size > 1 and not world.stands_by:
            # hvdlite-run warns by itself, of all ranks.
            warns = not (os.environ.get(JOB_DIR) or world.environment.independent)
            _exchanged.begin(world.topology.rank, world.topology.size, is_adopted=is_adopted, warns=warns)
        if (debugged := world.environment.debug_rank) is not None:
            try:
                wait_for_debugger(debugged, world.topology.rank, world.topology.size)
            except BaseException:
                shutdown()
                raise
    finally:
        # At the end, because PyTorch installs its own hook when the ranks connect.
        if not _is_debugged():
            shorten_tracebacks()


def _init(
    timeout_s: float | None,
    process_sets: Iterable[ProcessSet] | str | None,
    hierarchical: bool | None,
    check_parameters: CheckParameters | None,
    survive: bool | None,
) -> None:
    global _world  # noqa: PLW0603 - the one module variable that rank(), size() and the rest read
    first_sets = check_first_sets(process_sets)
    if timeout_s is not None:
        timeout_s = seconds(timeout_s, "timeout_s")
    if _process.taken is None and _is_child_of_multiprocessing():
        raise LaunchEnvironmentError(
            "hvd.init() was called in a child process of multiprocessing, which has the rank of its parent: put the "
            'main program under `if __name__ == "__main__":`'
        )
    _require_place_of_its_own()
    require_free()
    environment = _environment_with(hierarchical, check_parameters, survive)
    timeout = timedelta(seconds=timeout_s or environment.timeout_s)
    _process.init_arguments = {
        "timeout_s": timeout_s,
        "process_sets": first_sets,
        "hierarchical": hierarchical,
        "check_parameters": check_parameters,
        "survive": survive,
    }
    if (worker := read_elastic_worker(os.environ)) is not None:
        _process.keep(
            "responder", worker, lambda: respond(worker, _waited_s, lambda: _process.keepalive), KeyListener.close
        )
    _start_hang_reporter(environment.stall_warning_s if environment.stall_check else None)
    survival = _process.keep("survival", None, lambda: Survival(enter_again, revoke, _has_sets, _read_last_votes))
    _process.newcomers = survival.newcomers
    retry = Retry(_TRIES)
    while True:
        try:
            _world = enter(timeout, environment, _process)
        except KeyboardInterrupt as interrupt:
            describe_interrupt(interrupt, "hvd.init() for the other ranks")
            raise
        except WorkerRemovedError:
            survival.note_removed()
            raise
        assignment = _world.assignment
        try:
            if _world.environment.survive and assignment is not None:
                _world = replace(_world, survival=survival)
                if not _world.stands_by:
                    survival.begin(_world.group, assignment)
            for process_set in first_sets:
                _world.sets.add(process_set)
        except BaseException as error:
            # In an elastic job a rank may be lost here, too: then there will be another generation.
            shutdown()
            is_lost = isinstance(error, CommunicationError)
            if assignment is None or not (is_lost and retry.failed(assignment.size, assignment.newcomers)):
                raise
        else:
            return


def _start_hang_reporter(warn_after_s: float | None) -> None:
    """Starts what answers hvdlite-run's reports, under hvdlite-run; once in a process."""
    job_dir, worker, store = (os.environ.get(name, "") for name in (JOB_DIR, WORKER, STORE))
    if not (job_dir and worker.isdigit() and store):
        return

    def start() -> HangReporter | None:
        try:
            return HangReporter(
                job_dir,
                int(worker),
                StoreClient.from_url(store),
                describe=own_status,
                waited_s=_waited_s,
                warn_after_s=warn_after_s,
            )
        except OSError as error:
            log.info("hvdlite-run --report will have no stacks of this process: %s", error)
            return None

    if (reporter := _process.keep("hang reporter", os.getpid(), start)) is not None:
        reporter.forget_note()


def own_status(in_full: bool) -> OwnStatus:
    """Returns what this rank knows of itself. Called on the reporter's thread, once a second under --watch."""
    world = None if _world is None or _world.stands_by else _world
    steps = Counter(_process.steps)
    paces = None
    if world is None:
        connects_since_s = _process.connects_since_s
        waits = [] if connects_since_s is None else [("hvd.init()", connects_since_s)]
    else:
        steps.update(dict(world.generation.reducers.steps))
        blocked = [(what, since_s) for what, since_s, _ in world.generation.watch.blocked().values()]
        waits = sorted({*blocked, *world.controller.waits()}, key=lambda each: each[1])
        if world.topology.rank == 0:  # once in each job
            paces = tuple(Pace(each.rank, round(each.cost, 4), each.phase) for each in world.controller.stragglers())
    now_s = time.monotonic()
    told = tuple(Wait(what, round(max(0.0, now_s - since_s), 3)) for what, since_s in waits)
    own = OwnStatus(steps=steps, samples=_process.samples, paces=paces, waits=told if in_full else told[:1])
    if not in_full:
        return own
    if world is not None:
        own = replace(own, optimizers=tuple(world.generation.reducers.progress()))
    if (keepalive := _process.keepalive) is not None:
        own = replace(own, addresses=tuple(keepalive.addresses), silent_s=keepalive.silences())
    return own


def note_samples(count: int) -> None:
    """Notes that this rank has processed so many more samples."""
    # A status has no number of another type, such as a batch size that is a tensor or numpy's.
    _process.samples = (_process.samples or 0) + int(count)


def _note_progress() -> None:
    """Leaves a note for hvdlite-run of how far this process has come, since it may end now."""
    reporter = _process.kept("hang reporter")
    if reporter is not None:
        reporter.note_progress()


def _waited_s() -> float:
    """For how long this process has waited for other ranks. Any thread may call it."""
    world = _world
    since_s = None if world is None else world.generation.watch.waits_since_s
    return 0.0 if since_s is None else time.monotonic() - since_s


def _environment_with(hierarchical: bool | None, check_parameters: object, survive: bool | None) -> Environment:
    """Returns what the variables say, with these arguments of `init` in their places where they are not None."""
    given: dict[str, Any] = {"hierarchical": hierarchical, "survive": survive}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={shown(value)} is none of True, False and None")
    environment = read_environment(os.environ)
    if check_parameters is not None:
        given["check_parameters"] = _how_often(check_parameters)
    return replace(environment, **{name: value for name, value in given.items() if value is not None})


def take_place(place: GivenPlace) -> None:
    """Make the next `init` connect as the rank of ``place``, whatever a launcher's variables say (`hvdlite.ray`)."""
    if _world is not None:
        raise LaunchEnvironmentError("this process is a rank already: call hvd.shutdown() first")
    _process.given_place = place


def last_assignment() -> RankAssignment | None:
    """Returns this worker's rank in the last generation of an elastic job that it was in."""
    return _process.assignment


@outside_graphs
def shutdown() -> None:
    """Disconnect from the other ranks; does nothing if `init` was not called.

    It does not wait for other ranks, except while a timeline is being recorded: then a few seconds, for their parts.
    """
    global _world
    leaving, _world = _world, None
    if leaving is None:
        return
    if forks.parent is not None:
        # This process forgets the world; its parent is the rank, and has the connections.
        leaving.sets.forget()
        leaving.leave()
        return
    _exchanged.end()
    _process.steps.update(leaving.generation.reducers.steps)
    _note_progress()
    if leaving.survival is not None:
        leaving.survival.end()
    if leaving.connecting is not None:
        # A thread that still waits for a lost rank would be in the way of the next world's groups.
        leaving.connecting.give_up_begun()
        leaving.connecting.close()
    # Run in reverse order. The stack runs all of them even if one raises or is interrupted.
    with contextlib.ExitStack() as steps:
        steps.callback(_process.world_left)
        for step in (leaving.leave, leaving.group.close, leaving.sets.close, leaving.controller.close):
            steps.callback(step)
        timeline.leave(leaving.generation.recorder, leaving.group, leaving.controller)


def note_elastic_program() -> None:
    """Note that the program can go on in another world."""
    _process.is_elastic = True


def has_state() -> bool:
    """Whether this process has the state of the training, and not only what its program has made anew."""
    return _process.has_state


def note_state() -> None:
    """Note that this rank has got the state of the training."""
    _process.has_state = True


def tell_of_elastic_program() -> None:
    """Tell new workers that they can join, on rank 0."""
    world = _world
    # Process sets that are added before the function need the other ranks.
    if world is None or world.assignment is None or world.topology.rank != 0 or world.sets.has_any or _process.has_told:
        return
    _process.has_told = True
    if (client := _process.kept("store client")) is not None:
        tell_of_program(client, world.topology.hosts)


def enter_again() -> None:
    shutdown()
    init(**_process.init_arguments)


def _has_sets() -> bool:
    return _world is not None and _world.sets.has_any


def _read_last_votes() -> list[LastVotes]:
    client = _process.kept("store client")
    try:
        return [] if client is None else read_last_votes(client)
    except (OSError, ValueError) as error:
        raise CommunicationError(f"hvd.init() failed: hvdlite-run's agent does not answer: {error}") from error


def _leave_last_votes() -> None:
    """Tells ranks in their last step that this one has ended it, or a loss would make them average without this one."""
    survival, client = _process.kept("survival"), _process.kept("store client")
    # A rank that fails is replaced, and has no last step.
    if survival is None or client is None or getattr(sys, "last_value", None) is not None:
        return
    if (votes := survival.last_votes()) is not None:
        with contextlib.suppress(OSError, ValueError):
            leave_last_votes(client, votes)


def revoke(generation: int, reason: str) -> None:
    """Make every wait for another rank in a generation's world, if it is this one, raise an error with the reason.

    It waits for no other rank, and any thread may call it.
    """
    world = _world
    if world is None or world.assignment is None or world.assignment.generation != generation:
        return
    # First the controller: what waits in a group may be one of its operations, which then must not start another.
    world.controller.revoke(reason)
    for group in (world.group, *world.sets.groups()):
        group.revoke(reason)
    if world.connecting is not None:
        # Optimizers and process sets open groups after `init`.
        world.connecting.give_up_begun()


def require_ended(what: str) -> None:
    """Block until all collectives of GPU tensors so far have ended; raises the error of one, about ``what``."""
    world = current_world()
    for group in (world.group, *world.sets.groups()):
        group.require_ended(what)


def has_exchanged() -> bool | None:
    """Whether this process has exchanged anything with other ranks; None if it has never had any."""
    return _exchanged.has_met


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` has not been called since."""
    return _world is not None


def current_world() -> World:
    """Returns the current world; raises a NotInitializedError if there is none."""
    if _world is None:
        # The first sentence is Horovod's, which users search for.
        raise NotInitializedError(
            "Horovod has not been initialized; use hvd.init(). (hvdlite: call hvd.init() once, at the "
            "start of the program, on every rank)"
        )
    return _world


def rank() -> int:
    """This process's number among all processes of the job, from 0."""
    return current_world().topology.rank


def size() -> int:
    """The number of processes of the job."""
    return current_world().topology.size


def local_rank() -> int:
    """This process's number among the processes on its host, from 0. Use it as the number of the GPU.

    In an elastic job it is the number of the process's slot, and stays the same when others leave.
    """
    return current_world().topology.local_rank


def local_size() -> int:
    """The number of the job's processes on this host."""
    return current_world().topology.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank, from 0."""
    return current_world().topology.cross_rank


def cross_size() -> int:
    """The number of hosts that have this local rank."""
    return current_world().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return current_world().topology.is_homogeneous


def _is_debugged() -> bool:
    """Whether the user has set the log level to "debug" or below, which keeps tracebacks unshortened."""
    variable = READ_BY_INIT["log_level"]
    given = variable.given_in(os.environ)
    try:
        level = variable.read(given) if given.text else None
    except ValueError:  # init has raised it already
        return False
    return isinstance(level, int) and level <= logging.DEBUG


def _how_often(check_parameters: object) -> CheckParameters:
    """Checks the argument ``check_parameters`` of `init`; raises a ValueError for a wrong one."""
    if isinstance(check_parameters, bool):
        return check_parameters
    if type(check_parameters) is str and check_parameters == "warn":
        return "warn"
    steps = whole_number(check_parameters)
    if steps is None or not 0 <= steps <= MOST:
        raise ValueError(
            f"check_parameters={shown(check_parameters)} is none of True, False, 'warn' and a number of steps, such as "
            "1000"
        )
    return steps or False


def _require_place_of_its_own() -> None:
    """Raises a LaunchEnvironmentError in a forked child that would take its parent's place among the ranks."""
    if _process.taken is None:
        return
    parent, environ = _process.taken
    if dist.is_initialized() or ((place := place_in(environ)) is not None and place == place_in(os.environ)):
        raise LaunchEnvironmentError(
            f"hvd.init(): this process (pid {os.getpid()}) is a forked child of rank {parent.rank} (pid {parent.pid}), "
            "and has that rank's place in the job: leave hvd.init() out here; or delete the launcher's variables from "
            "os.environ first, to be the only rank of a job of its own"
        )
    forks.become_rank()


def _own_rank() -> forks.Parent | None:
    return None if _world is None else forks.Parent(_world.topology.rank, _world.pid)


def _leave_to_parent() -> None:
    """Begins with nothing kept, in a forked child. What the parent has is never destroyed there."""
    global _process
    kept, _process = _process, ProcessState()
    forks.keep_for_ever(kept)
    _process.taken = kept.taken
    if _world is not None:
        forks.keep_for_ever(_world, *_world.sets.groups())
        if dist.is_initialized():
            forks.keep_for_ever(*dist.distributed_c10d._world.pg_map)
        if forks.parent is not None:
            _process.taken = (forks.parent, dict(os.environ))


forks.tell_own_rank(_own_rank)
os.register_at_fork(after_in_child=_leave_to_parent)


def _is_child_of_multiprocessing() -> bool:
    # A spawned child imports the main program before parent_process() is set; during that, `_inheriting` is True.
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_starting or multiprocessing.parent_process() is not None


def end_of_program() -> None:
    """Disconnects from the other ranks at the end of the program; `hvdlite` registers it with `atexit`."""
    if forks.parent is not None:
        return
    world = _world
    _leave_last_votes()
    if world is not None:
        _note_progress()
        leave_at_exit(
            1 if world.stands_by else world.topology.size,
            shutdown,
            lambda: timeline.save(world.generation.recorder, world.group),
            first_end=world.generation.watch.known_end,
            advice="" if world.assignment is None or world.survival or _process.is_elastic else _NOT_ELASTIC,
        )
    _exchanged.warn_at_end()
    deferred_close.finish(_CLOSING_S)
    if world is not None and world.assignment is not None:
        hasten_end()
