"""
`hvd.add_process_set`, `hvd.remove_process_set`, `hvd.global_process_set`, and `group_of` for other packages.

The functions call the `Registry` of the current world. The packages `ops` and `optim` call `group_of` to get the
`Group` of the process set that a user has passed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..comm.group import Group
from ..outside_graphs import outside_graphs
from .process_set import ProcessSet as ProcessSet  # noqa: PLC0414  # `hvdlite` re-exports it from this module
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
