"""
The `Controller` interface: has all ranks carry out the same operations in the same order.

    submit(group, operation) ── Handle ── ... all ranks of the group have asked for the same ... ── run(execution)

Implemented by `unchecked`, which trusts the program, and by `control_client`, which asks rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..comm.group import Group
from .handle import Handle
from .operation import Kind, Operation, Run
from .reducer_registry import SitsOut

# For a rank that has joined: what it does in an operation of this kind, with what is the same on all ranks.
StandIn = Callable[[Kind, Mapping[str, Any]], Run]

# For a rank that has joined: begins to sit out the steps of an optimizer, and returns. The handle is the join's.
SitOut = Callable[[SitsOut, Handle], None]


class Controller(Protocol):
    """Carries out operations; each rank has one."""

    def open_channel(self, group: Group) -> None:
        """From now on operations among these ranks can be submitted; every one of them must call it."""
        ...

    def close_channel(self, group: Group) -> None:
        """No more operations among these ranks; every one of them must call it."""
        ...

    def submit(self, group: Group, operation: Operation) -> Handle:
        """Ask for an operation among the ranks of ``group``; it runs when all of them have.

        What ``operation.run`` returns is what the handle's `wait` returns, and what it raises is raised there.
        """
        ...

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        """Take part with nothing to give until all ranks have joined; the handle's result is the last one's rank.

        ``sit_out`` is called, before the handle succeeds, for each optimizer that lives on all ranks of its set.
        """
        ...

    def close(self) -> None:
        """Carry out nothing any more. Waits for nobody."""
        ...
