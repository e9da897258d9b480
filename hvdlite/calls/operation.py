"""
`Kind`: the functions that ranks call together; `Operation`: a rank's request for one; `Execution`: its run's arguments.

    Operation (the same on all ranks, but for `own`) ── all have asked ── run(Execution, with every rank's `own`)
    DirectCall ── Controller.call_directly ── all ranks of the host vote for it ── result(all ranks' data)
                                          └─ no vote, or no go ── operation(), submitted as any other

A `Kind` holds what the rules in `coordinator.negotiation` need to know of an operation. `ops`, `optim` and `runtime`
make operations and submit them to their rank's `Controller`: that of `control.unchecked`, which trusts the program, or
of `control.control_client`, which asks rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.step_clock import RankPace
from ..shm.board import VoteData
from .generation import SitsOut
from .handle import Handle


@dataclass(frozen=True, slots=True)
class Kind:
    """A function that all ranks call together, by its name in messages.

    ``of_one`` is, for a kind with several tensors, the kind that does the same with one. ``allows_joined``: ranks that
    have called `join` take part. ``in_join_errors``: Horovod's name of it in errors about join. ``is_compared``: ranks
    compare their arguments even under HVDLITE_CHECK=0. ``error_prefix`` begins the message about different arguments.
    """

    name: str
    of_one: Kind | None = None
    allows_joined: bool = False
    in_join_errors: str | None = None
    is_compared: bool = False
    error_prefix: str = ""

    @property
    def is_grouped(self) -> bool:
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
LOAD_CHECKPOINT = Kind("load_checkpoint", is_compared=True)
ELASTIC_STATE = Kind("hvd.elastic state.sync", is_compared=True)
OPTIMIZER = Kind("hvd.DistributedOptimizer")
ADD_PROCESS_SET = Kind(
    "add_process_set",
    error_prefix="Attempted to register process set with mismatching values on different ranks: ",
)

CONNECTING = frozenset({OPTIMIZER, ADD_PROCESS_SET, ELASTIC_STATE})
"""Operations in which ranks open engines: they wait for each other outside of any engine."""

_KINDS = {value.name: value for value in list(globals().values()) if isinstance(value, Kind)}


def kind_named(name: str) -> Kind:
    """The kind with this name, as received in a message; a plain `Kind` if the name is not listed here."""
    return _KINDS.get(name) or Kind(name)


@dataclass(frozen=True, slots=True)
class Execution:
    """The arguments of `Operation.run`, which all ranks of the process set call, each in its own process.

    ``group`` has these ranks, on an engine that only operations use, one at a time, so collectives on it pair up.
    ``owns`` are all ranks' `Operation.own`, by rank in the group. They are None for ranks that have called `join`,
    which take part with nothing to give. An average is the sum divided by ``divisor``.
    """

    group: Group
    what: str
    owns: list[Any]
    divisor: int


Run = Callable[[Execution], Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation as one rank requests it.

    ``run`` is called once all ranks have made the request. It may use any collective of ``execution.group``, and must
    not block on anything else. Operations of one kind and name pair up; those without a name in the order of their
    calls. ``same`` must be equal on all ranks, and differences are reported in the order of its keys. ``own`` may
    differ, and is sent to all ranks. Both consist of JSON's types: a dtype is its str, a shape a list.
    ``has_users_name`` is False for a name that only serves for pairing: messages omit it, and calling threads must
    match as if there were no name.
    """

    kind: Kind
    run: Run
    name: str | None = None
    same: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    has_users_name: bool = True

    def describe(self) -> str:
        return describe(self.kind, self.name if self.has_users_name else None)


@dataclass(frozen=True, slots=True, eq=False)
class DirectCall:
    """One rank's call among all ranks that waits for its result, with so few data that they go with the vote on it.

    ``agreed`` is all that must be equal on all ranks, but the user's ``name``; equal bytes mean that rank 0 would let
    the operations begin. ``tensor`` has this rank's data, contiguous on the CPU; None if there are none. ``result``
    makes the result, which is never None, from the data of all ranks. ``operation`` makes the same call as an
    operation. ``is_inference`` is whether the caller is in `torch.inference_mode`.
    """

    kind: Kind
    name: str | None
    agreed: bytes
    tensor: Tensor | None
    result: Callable[[VoteData], Any]
    operation: Callable[[], Operation]
    is_inference: bool

    def result_elsewhere(self, data: VoteData) -> Any:
        """Makes the result on another thread than the caller's, which may be making it, too."""
        with torch.inference_mode(self.is_inference), torch.no_grad():
            return self.result(data.copy())

    def describe(self) -> str:
        return describe(self.kind, self.name)


def describe(kind: Kind, name: str | None) -> str:
    """An operation's description in messages, such as ``allreduce of 'loss'``."""
    return kind.name if name is None else f"{kind.name} of {name!r}"


# Makes the function that a rank that has joined runs in an operation of this kind with these `Operation.same` values.
StandIn = Callable[[Kind, Mapping[str, Any]], Run]

# On a rank that has joined: begins to sit out an optimizer's steps, and returns. The handle is the join's.
SitOut = Callable[[SitsOut, Handle], None]


class Controller(Protocol):
    """Runs operations; each rank has one."""

    def open_group(self, group: Group) -> None:
        """Allows operations among the ranks of ``group`` from now on; every one of them must call it."""

    def close_group(self, group: Group) -> None: ...
    def submit(self, group: Group, operation: Operation) -> Handle:
        """Submits an operation to the ranks of ``group``; it runs when all of them have submitted it."""

    @property
    def calls_directly(self) -> bool:
        """Whether `call_directly` may save time: if all ranks share memory."""

    def call_directly(self, group: Group, call: DirectCall) -> Any:
        """Makes a call among the ranks of ``group``, which has all ranks, and returns its result; raises its error."""

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        """Takes part in the other ranks' all-reduces with nothing to give, until all ranks have joined.

        The handle's result is the rank that joined last. ``sit_out`` is called, before the handle succeeds, for each
        optimizer that is alive on all ranks of its process set.
        """

    def waits(self) -> list[tuple[str, float]]:
        """What this process's threads wait for in operations, since when (`time.monotonic`). Any thread may call it."""

    def stragglers(self) -> tuple[RankPace, ...]:
        """Returns how long each rank takes for its part of a step, as rank 0 has last told. It does not communicate."""

    def revoke(self, reason: str) -> None:
        """Fails, now and later, everything that waits for other ranks but in groups. Any thread; it never blocks."""

    def close(self) -> None:
        """Stops running operations; waits for no other rank."""
