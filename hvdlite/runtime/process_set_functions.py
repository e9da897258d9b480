"""
Public functions that add and remove process sets, and look up the set of all ranks and each set's group.

    global_process_set ── the current world's ranks          add_process_set ── its `Registry`

`world` knows which world that is. A set by itself is in `process_set`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..comm.group import Group
from .process_set import Membership, check_process_set
from .process_set import ProcessSet as ProcessSet  # noqa: PLC0414  # given to users from here, where its rank is told
from .world import current_world, is_initialized


class _AllRanks(ProcessSet):
    """The set of all ranks of the world that there is at the time."""

    def __init__(self) -> None:
        super().__init__([0])

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(current_world().group.ranks)

    def membership(self) -> Membership:
        world = current_world()
        return Membership(0, world.group.rank, world.group, world.generation)

    def __str__(self) -> str:
        return super().__str__() if is_initialized() else "global_process_set"

    __repr__ = __str__

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _AllRanks()
ProcessSet.tell_own_rank(lambda: current_world().group.rank)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or one of these ranks; the set, to be passed as ``process_set``.

    Every rank of the job must call it, member or not, with equal ranks and in the same order as other sets; it
    waits for all. A ValueError on every rank where there is such a set already. Sets may overlap.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    current_world().sets.add(chosen)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, which must have nothing under way. Every rank of the job must call it; it waits for all.

    False, without waiting, for `global_process_set`, for a set that is not registered, and before `hvd.init`.
    """
    check_process_set(process_set, "remove_process_set")
    return is_initialized() and current_world().sets.remove(process_set)


def group_of(process_set: ProcessSet, what: str = "process_set") -> Group:
    """The ranks that an operation is among; a ValueError if this one is not. ``what`` is the operation's title."""
    return check_process_set(process_set, what).require_group(what)
