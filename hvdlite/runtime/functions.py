"""
Public functions that use the current world: process sets, timelines, `stragglers`, and Horovod's build queries.

`ops` and `optim` call `group_of` to get the `Group` of the process set that a user has passed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from .. import forks, timeline
from ..comm.group import Group
from ..comm.step_clock import RankPace as RankPace  # noqa: PLC0414  # `hvdlite` re-exports both from this module
from ..log import log
from ..outside_graphs import outside_graphs
from ..values import is_file_name, shown
from .process_set import ProcessSet as ProcessSet  # noqa: PLC0414
from .process_set import SetMembership, check_process_set
from .world import current_world, is_initialized


class _AllRanks(ProcessSet):
    """The set of all ranks of the current world; it stays valid after `shutdown` and a new `init`."""

    def __init__(self) -> None:
        super().__init__([0])

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(current_world().group.ranks)

    def membership(self) -> SetMembership:
        world = current_world()
        return SetMembership(0, world.group.rank, world.group, world.generation)

    def __str__(self) -> str:
        return super().__str__() if is_initialized() else "global_process_set"

    __repr__ = __str__

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _AllRanks()
ProcessSet.tell_own_rank(lambda: current_world().group.rank)


@outside_graphs
def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or make and register one of these ranks; returns the set.

    Every rank of the job must call it, member or not, and waits for all. The ranks must be equal, and several sets must
    be added in the same order. Sets may overlap. Raises a ValueError on every rank if a set of these ranks is
    registered already.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current_world().sets.add(chosen)
    return chosen


@outside_graphs
def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; returns True. Every rank of the job must call it, and waits for all.

    No operation of the set may be running. Returns False, without waiting, for `global_process_set`, for a set that is
    not registered, and before `hvd.init`.
    """
    check_process_set(process_set, "remove_process_set")
    return is_initialized() and current_world().sets.remove(process_set)


def group_of(process_set: ProcessSet, what: str = "process_set") -> Group:
    """Returns the group of a process set; raises a ValueError if this rank is not a member.

    ``what`` is the operation that the error message names.
    """
    return check_process_set(process_set, what).require_group(what)


def gloo_built() -> bool:
    """Whether torch was built with gloo, which sends CPU tensors between hosts."""
    return dist.is_available() and dist.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether CPU tensors can be sent between ranks; the same as `gloo_built`."""
    return gloo_built()


def nccl_built() -> int:
    """The version of NCCL that torch was built with, in NCCL's numbering (22809 is 2.28.9); 0 without NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    # A fourth entry may be a suffix.
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]  # torch has no types for it
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def mpi_built() -> bool:
    """Whether torch was built with MPI. hvdlite does not use it."""
    return dist.is_available() and dist.is_mpi_available()


def mpi_enabled() -> bool:
    """False. Even under ``mpirun``, tensors are sent over gloo and NCCL; ``mpirun`` only starts the ranks."""
    return False


def mpi_threads_supported() -> bool:
    """False, because hvdlite does not use MPI. As in Horovod, raises a `NotInitializedError` before `init`."""
    current_world()
    return False


def ddl_built() -> bool:
    """False, because torch has no IBM DDL."""
    return False


def ccl_built() -> bool:
    """False, because hvdlite does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether torch was built with CUDA, even if there is no GPU."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


@outside_graphs
def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks until `stop_timeline`, as a Chrome trace for ui.perfetto.dev.

    Every rank must call it, and waits for all. The trace is one file on rank 0's host, in rank 0's time. Each rank is a
    process in it, with rows for its steps, its buckets of gradients and its other operations. The file is complete when
    `stop_timeline` has returned or the program has ended. Until then, each rank writes a part next to it, as
    ``<file_path>.rank.N.part``; a part can be opened too, and remains if its rank crashes.

    If ``file_path`` ends in a slash, or is a directory on rank 0's host, each rank N gets a file ``rankN.json`` in it
    instead (its part is ``rankN.json.part``), which begins with a ``distributedInfo`` as torch.profiler's traces do.
    Such files of an earlier timeline are replaced, and those of ranks that this job does not have are removed.

    Raises an OSError on every rank if rank 0 cannot write there, and a ValueError if a timeline is already being
    recorded. The variable ``HVDLITE_TIMELINE``, or ``hvdlite-run --timeline-filename``, starts a timeline in `init`.
    ``mark_cycles`` has no effect: hvdlite has no cycles like Horovod's, and steps are always marked.
    """
    path = os.fspath(file_path) if isinstance(file_path, str | os.PathLike) else None
    if not isinstance(path, str):
        raise TypeError(f"start_timeline: file_path={shown(file_path)} is not a path: pass a str or a pathlib.Path")
    if not is_file_name(path):
        raise ValueError(
            f"start_timeline: file_path={shown(file_path)} is not a valid file name: it is empty, or has a NUL in it"
        )
    world = current_world()
    forks.require_rank("hvd.start_timeline()")
    if mark_cycles:
        log.info("start_timeline: mark_cycles has no effect: hvdlite has no cycles, and always marks steps")
    timeline.start(world.generation.recorder, world.group, world.controller, path)


@outside_graphs
def stop_timeline() -> None:
    """Stop recording and write the timeline. Every rank must call it, and waits for all.

    If no timeline was started, it only logs that. Raises an OSError on every rank if rank 0 cannot write the file.
    """
    world = current_world()
    forks.require_rank("hvd.stop_timeline()")
    timeline.stop(world.generation.recorder, world.group, world.controller)


@outside_graphs
def stragglers() -> list[RankPace]:
    """Returns how long each rank takes for its part of a step, the rank that costs the others most first.

    It is about the last minute, or the time since `init` if that is shorter, and a few seconds old: ranks send rank 0
    their times about once a second, and get those of all ranks about every two seconds, in jobs of more than 32 ranks
    less often. Any rank may call it, at any time; it waits for no other rank. Empty before the first few steps, with a
    single rank, and with ``HVDLITE_STRAGGLERS=0``.
    """
    return sorted(current_world().controller.stragglers(), key=lambda pace: -pace.cost)
