"""
What one rank asks the others to do together, and what it gets when it is time to.

    Request (the same on all ranks, but for `own`) ── all have asked ── Execution (everybody's `own`) ── body(turn)

Values, without a connection; who brings ranks together is `controller`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..comm.group import Group


@dataclass(frozen=True, slots=True)
class Request:
    """An operation as one rank sees it.

    ``kind`` is the function's name, such as ``allreduce``; ``name`` the user's, or None. Operations of one kind and
    name pair up, those without a name in the order of their calls.

    ``same`` must be equal on all ranks; its keys are dtype, shape, device, op, prescale_factor, postscale_factor,
    root_rank and whatever else the kind has, in the order in which differences are to be told. ``own`` may differ,
    and reaches all ranks. Both are made of JSON's types: a dtype is its str, a shape a list.

    ``has_users_name`` is False for a name that only serves to pair up, of which messages say nothing: whether it pairs
    up rightly is then looked at as if there were none. ``is_compared``: also by a controller that trusts the program.
    """

    kind: str
    name: str | None = None
    same: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    has_users_name: bool = True
    is_compared: bool = False

    def describe(self) -> str:
        """Such as ``allreduce of 'loss'``."""
        return self.kind if self.name is None or not self.has_users_name else f"{self.kind} of {self.name!r}"


@dataclass(frozen=True, slots=True)
class Execution:
    """An operation that all ranks of a process set carry out now, each in its own process.

    ``group`` are these ranks, over an engine that only turns use, one after the other: collectives on it pair up.
    ``owns`` are the `Request.own` of all, by their rank in the group; those of ranks that have called `join` are
    None, and they take part with nothing to give. An average is the sum divided by ``divisor``.
    """

    group: Group
    what: str
    owns: list[Any]
    divisor: int
