"""
The world that this process is in: `init`, `shutdown`, and what `rank()` and `size()` read.

    init ── World (made in `bootstrap`) ── rank(), size(), … ── shutdown

Only this module knows that there is a current world; everything below is handed its `Group` and its `Generation`. What
outlives a world in this process is in one object, a `rendezvous.process_state.ProcessState`, which `init` is handed.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from ..environment import READ_BY_INIT, read_environment
from ..errors import LaunchEnvironmentError, NotInitializedError, say_where
from ..rendezvous.process_state import ProcessState
from ..timeline import session as timeline
from ..values import MOST, seconds, shown, whole_number
from .bootstrap import World, enter
from .departure import say_farewell
from .process_set import ProcessSet, check_first_sets
from .tracebacks import shorten_tracebacks

_world: World | None = None
_process = ProcessState()


def init(
    timeout_s: float | None = None,
    *,
    process_sets: Iterable[ProcessSet] | str | None = None,
    hierarchical: bool | None = None,
    check_parameters: bool | int | None = None,
) -> None:
    """Find this process's place among the others and connect to them.

    Every rank must call it, and each waits for all. Does nothing where it has been called already; after
    `shutdown` it may be called again.

    The place comes from hvdlite-run, from torchrun (or whoever sets ``RANK``, ``WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``), from OpenMPI's or MPICH's ``mpirun``, from Slurm's ``srun``, or from
    `torch.distributed` where the program has initialised it: that is adopted with its choice of backend, given
    a group of hvdlite's own, and never destroyed here.
    A plain ``python train.py`` is one rank that needs no network. CUDA tensors travel over NCCL, CPU
    tensors through shared memory between the ranks of a host, if there is as much, and over gloo between hosts.

    ``timeout_s``: a collective that another rank does not join for this long raises
    `CommunicationError`. Unless given, it is ``HVDLITE_GLOO_TIMEOUT_SECONDS``, or 1800.

    ``process_sets``: those to register at once, equal on all ranks; more can be added at any time, with or without
    Horovod's word for that, ``"dynamic"``.

    ``hierarchical``: True has all-reduces go in two levels where several hosts have as many ranks each, more than one:
    within each host, and between the hosts, each rank with its share. False has them go in one. Unless given, it
    is ``HVDLITE_HIERARCHICAL_ALLREDUCE``; else two levels for CPU tensors where ranks of a host share memory, and for
    CUDA tensors over NCCL what is the faster at start. Rank 0's counts.

    ``check_parameters``: True has the ranks of each `DistributedOptimizer` compare the values of its parameters at the
    first step, and a `MismatchError` on all of them names what differs. A number N has them do so at every N-th step
    thereafter too (1: at every step), False never. Unless given, it is ``HVDLITE_CHECK_PARAMETERS``, or True. Rank 0's
    counts.
    """
    if _world is not None:
        return
    try:
        _init(timeout_s, process_sets, hierarchical, check_parameters)
    finally:
        # At the end, as PyTorch sets a hook of its own where the ranks are connected.
        if not _is_debugged():
            shorten_tracebacks()


def _init(
    timeout_s: float | None,
    process_sets: Iterable[ProcessSet] | str | None,
    hierarchical: bool | None,
    check_parameters: bool | int | None,
) -> None:
    global _world  # noqa: PLW0603 - the one module variable that rank(), size() and the rest read
    first_sets = check_first_sets(process_sets)
    if timeout_s is not None:
        timeout_s = seconds(timeout_s, "timeout_s")
    if _is_child_of_multiprocessing():
        raise LaunchEnvironmentError(
            "hvd.init() was called in a child process that multiprocessing started, where it would take the place "
            'of its parent\'s rank: put what the main program does under `if __name__ == "__main__":`'
        )
    if hierarchical is not None and not isinstance(hierarchical, bool):
        raise ValueError(f"hierarchical={shown(hierarchical)} is none of True, False and None")
    environment = read_environment(os.environ)
    if check_parameters is not None:
        environment = replace(environment, check_parameters=_how_often(check_parameters))
    if hierarchical is not None:
        environment = replace(environment, hierarchical=hierarchical)
    timeout = timedelta(seconds=timeout_s or environment.timeout_s)
    try:
        _world = enter(timeout, environment, _process)
    except KeyboardInterrupt as interrupt:
        say_where(interrupt, "hvd.init() for the other ranks")
        raise
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
    if leaving is None:
        return
    # The last first: one that raises, or is interrupted, does not keep the others from being left.
    with contextlib.ExitStack() as steps:
        steps.callback(_process.world_left)
        for step in (leaving.leave, leaving.group.close, leaving.sets.close, leaving.controller.close):
            steps.callback(step)
        timeline.leave(leaving.generation.recorder, leaving.group, leaving.controller)


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


def _is_debugged() -> bool:
    """Whether the log's level asks for whole tracebacks."""
    variable = READ_BY_INIT["log_level"]
    given = variable.given_in(os.environ)
    try:
        level = variable.read(given) if given.text else None
    except ValueError:  # which the user is told of, by its own message
        return False
    return isinstance(level, int) and level <= logging.DEBUG


def _how_often(check_parameters: object) -> bool | int:
    """What ``check_parameters`` of `init` means, or a ValueError."""
    if isinstance(check_parameters, bool):
        return check_parameters
    steps = whole_number(check_parameters)
    if steps is None or not 0 <= steps <= MOST:
        raise ValueError(
            f"check_parameters={shown(check_parameters)} is none of True, False and a number of steps, such as 1000"
        )
    return steps or False


def _is_child_of_multiprocessing() -> bool:
    # A spawned child imports the main program before it knows its parent; until then it is "inheriting".
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_starting or multiprocessing.parent_process() is not None


def end_of_program() -> None:
    """Leave the other ranks, if that has not been done. `hvdlite` has registered it with `atexit`."""
    world = _world
    # A forked child has the connections too, but they are not its own to close.
    if world is not None and world.pid == os.getpid():
        say_farewell(world.topology.size, shutdown, lambda: timeline.save(world.generation.recorder, world.group))
