"""
`Operation`: what a rank asks for, to be carried out by all ranks together; `Execution`: what it is then given.

    Operation (the same on all ranks, but for `own`) ── all have asked ── run(Execution, with everybody's `own`)

Values, without a connection. What the rules (`negotiation`) must know of an operation is its `Kind`; the collectives on
tensors, which make operations, are in `ops`; who brings ranks together is `controller`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..comm.group import Group


@dataclass(frozen=True, slots=True)
class Kind:
    """A function that all ranks call together.

    ``name`` is the function's, as messages have it; ``of_one`` the kind that does with one tensor what this one does
    with several. ``allows_joined``: ranks that have called `join` take part, with nothing to give; ``in_join_errors``
    is what Horovod calls a function where they cannot. ``is_compared``: ranks compare their arguments also under
    HVDLITE_CHECK=0. ``error_prefix`` comes before what is said of arguments that differ.
    """

    name: str
    of_one: Kind | None = None
    allows_joined: bool = False
    in_join_errors: str | None = None
    is_compared: bool = False
    error_prefix: str = ""

    @property
    def is_grouped(self) -> bool:
        """Whether it is of several tensors."""
        return self.of_one is not None

    @property
    def single(self) -> Kind:
        """The kind that does the same with one tensor; itself, unless it is grouped."""
        return self.of_one or self


ALLREDUCE = Kind("allreduce", allows_joined=True)
GROUPED_ALLREDUCE = Kind("grouped_allreduce", ALLREDUCE, allows_joined=True)
SPARSE_ALLREDUCE = Kind("sparse_allreduce")
REDUCESCATTER = Kind("reducescatter", in_join_errors="Reducescatter")
GROUPED_REDUCESCATTER = Kind("grouped_reducescatter", REDUCESCATTER)
ALLGATHER = Kind("allgather", in_join_errors="Allgather")
GROUPED_ALLGATHER = Kind("grouped_allgather", ALLGATHER)
BROADCAST = Kind("broadcast", in_join_errors="Broadcast")
ALLTOALL = Kind("alltoall", in_join_errors="Alltoall")
BARRIER = Kind("barrier")
BROADCAST_PARAMETERS = Kind("broadcast_parameters", is_compared=True)
BROADCAST_OPTIMIZER_STATE = Kind("broadcast_optimizer_state", is_compared=True)
BROADCAST_OBJECT = Kind("broadcast_object", is_compared=True)
ALLGATHER_OBJECT = Kind("allgather_object", is_compared=True)
ADD_PROCESS_SET = Kind(
    "add_process_set",
    error_prefix="Attempted to register process set with mismatching values on different ranks: ",
)

_KINDS = {value.name: value for value in list(globals().values()) if isinstance(value, Kind)}


def kind_named(name: str) -> Kind:
    """The kind of this name, as a message brings it; the rules know nothing particular of those not listed here."""
    return _KINDS.get(name) or Kind(name)


@dataclass(frozen=True, slots=True)
class Execution:
    """What an operation is given when all ranks of its process set carry it out, each in its own process.

    ``group`` are these ranks, over an engine that only operations use, one after the other: collectives on it pair up.
    ``owns`` are the `Operation.own` of all, by their rank in the group; those of ranks that have called `join` are
    None, and they take part with nothing to give. An average is the sum divided by ``divisor``.
    """

    group: Group
    what: str
    owns: list[Any]
    divisor: int


Run = Callable[[Execution], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as one rank asks for it.

    ``run`` is called once all ranks have asked. It may use any collective of ``execution.group``, and nothing else that
    waits; its result, or its error, is the handle's. ``name`` is the user's, or None. Operations of one kind and name
    pair up, those without a name in the order of their calls.

    ``same`` must be equal on all ranks; its keys are dtype, shape, device, op, prescale_factor, postscale_factor,
    root_rank and whatever else the kind has, in the order in which differences are to be told. ``own`` may differ,
    and reaches all ranks. Both are made of JSON's types: a dtype is its str, a shape a list.

    ``has_users_name`` is False for a name that only serves to pair up, of which messages say nothing: whether it pairs
    up rightly is then looked at as if there were none.
    """

    kind: Kind
    run: Run
    name: str | None = None
    same: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    has_users_name: bool = True

    def describe(self) -> str:
        """Such as ``allreduce of 'loss'``."""
        return describe(self.kind, self.name if self.has_users_name else None)


def describe(kind: Kind, name: str | None) -> str:
    """What messages call an operation, such as ``allreduce of 'loss'``."""
    return kind.name if name is None else f"{kind.name} of {name!r}"
