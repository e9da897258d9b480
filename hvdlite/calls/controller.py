"""
The `Controller` interface: makes all ranks run the same operations in the same order.

    submit(group, operation) ── Handle ── ... all ranks of the group have submitted the same ... ── run(execution)

`ops`, `optim` and `runtime` call it. It is implemented by `control.unchecked`, which trusts the program, and by
`control.control_client`, which asks rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..comm.group import Group
from ..comm.step_clock import RankPace
from .generation import SitsOut
from .handle import Handle
from .operation import DirectCall, Kind, Operation, Run

# Makes the function that a rank that has joined runs in an operation of this kind with these `Operation.same` values.
StandIn = Callable[[Kind, Mapping[str, Any]], Run]

# On a rank that has joined: begins to sit out an optimizer's steps, and returns. The handle is the join's.
SitOut = Callable[[SitsOut, Handle], None]


class Controller(Protocol):
    """Runs operations; each rank has one."""

    def open_group(self, group: Group) -> None:
        """Allows operations among the ranks of ``group`` from now on; every one of them must call it."""
        ...

    def close_group(self, group: Group) -> None:
        """Ends operations among the ranks of ``group``; every one of them must call it."""
        ...

    def submit(self, group: Group, operation: Operation) -> Handle:
        """Submits an operation to the ranks of ``group``; it runs when all of them have submitted it.

        The handle's `wait` returns what ``operation.run`` returns, and raises what it raises.
        """
        ...

    @property
    def calls_directly(self) -> bool:
        """Whether `call_directly` may save time: if all ranks share memory."""
        ...

    def call_directly(self, group: Group, call: DirectCall) -> Any:
        """Makes a call among the ranks of ``group``, which has all ranks, and returns its result; raises its error."""
        ...

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        """Takes part in the other ranks' all-reduces with nothing to give, until all ranks have joined.

        The handle's result is the rank that joined last. ``sit_out`` is called, before the handle succeeds, for each
        optimizer that is alive on all ranks of its process set.
        """
        ...

    def waits(self) -> list[tuple[str, float]]:
        """Returns what threads of this process wait for in operations, and since when (`time.monotonic`).

        Any thread may call it.
        """
        ...

    def stragglers(self) -> tuple[RankPace, ...]:
        """Returns how long each rank takes for its part of a step, as rank 0 has last told. It does not communicate."""
        ...

    def revoke(self, reason: str) -> None:
        """Fails everything that waits for other ranks, now and later, with ``reason``. It does not block.

        Any thread may call it. The groups' own waits are failed by `Group.revoke`.
        """
        ...

    def close(self) -> None:
        """Stops running operations; waits for no other rank."""
        ...
