"""
`OwnEngine`: an optimizer's own engine between the ranks of one world, opened at first use.

    constructor ── take_number ── first step of any optimizer, or a join: begins all openings ── connect ── links
                                    `Opening`: compares arguments and models, opens the engine, tunes the bucket cap
    close ── or, while ranks have joined and take part in last steps: unpin ── the engine is given back

Each rank numbers its optimizers in the order of construction, without communication. Those with the same number belong
together, in whatever order ranks first use them. The opening is an operation of the controller, named by that number.

The `Reducer` makes one for each world, and is its `EngineUser`. The registry of reducers knows the optimizer by this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from hvdlite_wire.worker_status import StepStatus

from .. import forks
from ..buckets.exchange import Links
from ..buckets.plan import Description, first_difference
from ..buckets.settings import Settings
from ..calls.generation import Generation, SitsOut
from ..calls.handle import Handle
from ..calls.operation import OPTIMIZER, Execution, Operation
from ..comm.group import Group
from ..environment import CheckParameters
from ..errors import GradientError, MismatchError, NotInitializedError
from ..ops.base import compare
from ..outside_graphs import keep_outside_graphs
from ..runtime.survival import Survival
from ..steps.step import Step

Submit = Callable[[Group, Operation], Handle]
"""Submits an operation, which runs once all ranks of the group have submitted it: `submit` of a controller."""

# An optimizer's arguments that ranks compare, by their names in messages: the repr of each value.
Arguments = dict[str, str]


@dataclass(frozen=True, slots=True)
class Connection:
    """The ranks that gradients are averaged over, and the settings, while the world's group is open.

    ``world`` is the group of all ranks, and ``submit`` the method of the world's controller; both are None without a
    world. ``survival`` is None unless a step goes on where a rank is lost.
    """

    group: Group
    generation: Generation
    settings: Settings
    check_parameters: CheckParameters = False
    world: Group | None = None
    submit: Submit | None = None
    survival: Survival | None = None


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is done with an optimizer's new engine.

    The ranks compare ``arguments`` first. ``open_links`` opens the links of the exchange over the engine, and ``tune``
    chooses the bucket cap in bytes, unless it is None. ``device`` is the GPU of the parameters, or None.
    """

    arguments: Arguments
    open_links: Callable[[Group], Links]
    tune: Callable[[Group], int] | None
    device: torch.device | None


class Opened(NamedTuple):
    """An optimizer's open engine, as groups. ``cap_bytes`` is autotune's choice, or None without autotune."""

    group: Group
    links: Links
    cap_bytes: int | None


class Opening:
    """Opens one optimizer's engine in one world, even if the optimizer is garbage by then; and closes it again."""

    def __init__(
        self, connection: Connection, number: int, member: SitsOut, description: Description, plan: EnginePlan
    ) -> None:
        """``number`` is the optimizer's among those of these ranks, which compare ``description``, of their models."""
        self.ranks = connection.group
        self._connection = connection
        self._number = number
        self._member = ref(member)
        self._description = description
        self._plan = plan
        self._handle: Handle | None = None
        # Whether `wait` has returned the engine, or raised the error.
        self._is_told = False
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._is_closed = False

    def begin(self) -> None:
        """Submits the opening without waiting for other ranks. With no controller, or one rank, runs it at once."""
        operation = Operation(OPTIMIZER, self._run, f"optimizer {self._number}")
        if self._connection.submit is not None and self.ranks.size > 1:
            self._handle = self._connection.submit(self.ranks, operation)
            return
        handle = Handle(operation.describe())
        try:
            handle.succeed(self._run(Execution(self.ranks, handle.what, [None] * self.ranks.size, self.ranks.size)))
        except Exception as error:  # noqa: BLE001 - raised in `wait`
            handle.fail(error)
        self._handle = handle

    def is_settled(self) -> bool:
        """Whether the engine is open, or `wait` has raised why it is not."""
        return self._is_told or (self._handle is not None and self._handle.has_succeeded())

    def wait(self) -> Opened:
        """Waits for all ranks, and returns the engine. Raises the same error on every rank if the opening failed."""
        assert self._handle is not None, "it has begun"
        try:
            opened: Opened = self._handle.wait()
        finally:
            # Not where an interrupt has ended the wait.
            self._is_told = self._handle.is_ended()
        return opened

    def close(self) -> None:
        """Closes the engine, now or as soon as it is open. Waits for no other rank."""
        with self._lock:
            self._is_closed = True
            group, self._group = self._group, None
        if group is not None:
            group.close()

    def _run(self, execution: Execution) -> Opened:
        among, plan = execution.group, self._plan
        _require_same_arguments(among, plan.arguments)
        require_same_model(among, self._description)
        member = self._member()
        if member is not None:
            self._connection.generation.reducers.of(self.ranks).enter(self._number, member)
        group = self.ranks.duplicate()
        try:
            with nullcontext() if plan.device is None else torch.cuda.device(plan.device):
                links = plan.open_links(group)
                opened = Opened(group, links, None if plan.tune is None else plan.tune(group))
        except BaseException:
            group.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._group = group
                return opened
        # The optimizer was closed or garbage-collected before its first use.
        group.close()
        return opened


def _require_same_arguments(group: Group, arguments: Arguments) -> None:
    of_ranks: list[Arguments] = ([] if group.size == 1 else group.agree(arguments, OPTIMIZER.name)) or []
    for rank, others in enumerate(of_ranks):
        differing = [name for name in arguments if others[name] != of_ranks[0][name]]
        if differing:
            first, *more = differing
            also = f" ({', '.join(more)} differ, too)" if more else ""
            raise MismatchError(
                f"{OPTIMIZER.name}: {first} is {of_ranks[0][first]} on {group.describe_rank(0)} and {others[first]} on "
                f"{group.describe_rank(rank)}{also}: every rank must pass the same value"
            )


def require_same_model(group: Group, description: Description) -> None:
    """Raises MismatchError on every rank if the ranks' parameters differ. Every rank must call it; it waits for all."""
    if group.size > 1:
        _raise_difference(group, group.agree(description, "comparing the models"))


def _raise_difference(group: Group, descriptions: Sequence[Description] | None) -> None:
    for rank, description in enumerate(descriptions or ()):
        difference = first_difference(descriptions[0] if descriptions else (), description)
        if difference is not None:
            name, here, there = difference
            raise MismatchError(
                f"parameter {name!r} has {here} on {group.describe_rank(0)} and {there} on "
                f"{group.describe_rank(rank)}: every rank must build the same model; check the arguments that "
                "determine its sizes"
            )


class EngineUser(Protocol):
    """A reducer, as its engine and the ranks that join use it."""

    @property
    def step(self) -> Step:
        """The step of the current world."""

    def engine_plan(self) -> EnginePlan:
        """Returns what is to be done with the engine when it opens."""

    def opened(self, cap_bytes: int | None) -> None:
        """Called when the engine is open, with autotune's choice."""

    def sit_out(self, average_of_active: bool) -> bool: ...


class OwnEngine:
    """The engine of one optimizer in one world, and the optimizer's number among those of the same ranks."""

    def __init__(self, connection: Connection, user: EngineUser, earlier: OwnEngine | None) -> None:
        """``earlier`` is that of the world before."""
        self.ranks = connection.group
        self.group: Group | None = None
        """The ranks with the optimizer's own engine, while it is open."""
        self.links: Links | None = None
        """The links to the other ranks, once they are open."""
        self.number: int | None = None
        """The optimizer's number, once it has taken one. It keeps the number in a later world if that is free."""
        self.is_closed = False
        """Whether no step uses gradients any more. Read for each gradient."""
        self._connection = connection
        self._registry = connection.generation.reducers
        self._user = user
        self._uncompared: list[Description] = []
        self._opening: Opening | None = None
        self._spoilt_by: str | None = None
        # The number of `pin` calls without `unpin`. Finalizers must not take the lock: they call `abandon` instead.
        self._pins = 0
        self._pinning = threading.Lock()
        # What this process is, in words, if it is a forked child, whose parent has the optimizer.
        self._copied_to = ""
        if earlier is not None:
            self.number, self._copied_to = earlier.number, earlier._copied_to
            # A collective that never ends spoils the steps of its own world.
            self.is_closed = earlier.is_closed and earlier._spoilt_by is None

    @property
    def is_world_closed(self) -> bool:
        return self._connection.world is not None and self._connection.world.is_closed

    @property
    def links_for_backward(self) -> Links | None:
        """The links while something may be sent in backward: None before they are open and changes are compared."""
        return None if self._uncompared else self.links

    # -- opening

    def compare_later(self, description: Description) -> None:
        """Has the ranks compare this at the next `connect`."""
        self._uncompared.append(description)

    def only_one_thread(self) -> AbstractContextManager[None]:
        """A context that raises RuntimeError if two threads construct optimizers for these ranks at once."""
        return self._registry.of(self.ranks).making.only(OPTIMIZER.name)

    def take_number(self) -> Opening:
        """Takes a number among the optimizers of these ranks. Every rank must call it; it does not wait for them."""
        self.number = self._registry.of(self.ranks).take_number(self.number)
        # In a new world there may be no parameter left.
        description = self._uncompared.pop(0) if self._uncompared else []
        self._opening = Opening(self._connection, self.number, self, description, self._user.engine_plan())
        self._registry.open_later(self._opening)
        return self._opening

    def taken_number(self) -> int:
        if self._opening is None:
            self.take_number()
        number = self.number
        assert number is not None, "it has just been taken"
        return number

    def connect(self) -> Group:
        """Returns the ranks with the optimizer's own engine. The first call opens it and compares the models.

        Every rank must call it. Raises MismatchError on every rank if parameters or arguments differ.
        """
        if self.group is None:
            self.ranks.require_open("averaging gradients")
        opening = self._opening or self.take_number()
        self._registry.open_all()
        if self.group is None:
            self.group, self.links, cap_bytes = opening.wait()
            self._user.opened(cap_bytes)
        if self._uncompared:
            # With the change in which each was found: what is found together may be sent together.
            description = [
                (name, f"{words}, found in change {number} of the groups before this step" if number > 1 else words)
                for number, change in enumerate(self._uncompared, 1)
                for name, words in change
            ]
            self._uncompared.clear()
            what = "comparing the models, since optimizer.param_groups has changed"
            _raise_difference(self.ranks, compare(self.ranks, description, what))
        return self.group

    def connected(self) -> Links:
        """Returns the links to the other ranks. The first call opens them: see `connect`."""
        self.connect()
        links = self.links
        assert links is not None, "they have met"
        return links

    # -- closing

    def close(self) -> None:
        """Closes the engine, without waiting. A pinned one stays open, for the last steps of ranks that have joined."""
        self.is_closed = True
        self._give_back()

    def spoil(self, why: str) -> None:
        """Makes every later step raise an error with ``why``, since a collective on the engine will never end."""
        self._spoilt_by = why
        self.is_closed = True

    def pin(self) -> bool:
        """Keeps the engine open until `unpin`, even after `close`. Returns False if it is closed already."""
        with self._pinning:
            if self.is_closed and not self._pins:
                return False
            self._pins += 1
            return True

    def unpin(self) -> None:
        with self._pinning:
            self._pins -= 1
        self._give_back()

    def _give_back(self) -> None:
        with self._pinning:
            # With a collective running on it, the engine stays open until the group is closed.
            if not self.is_closed or self._pins or (self._user.step.is_sending and self.group is not None):
                return
            opening, self.group = self._opening, None
        if opening is not None:
            opening.close()

    def leave_to_parent(self) -> None:
        """Gives up the engine in a forked child, which waits for no collective of the parent's."""
        self._copied_to = forks.description()
        # For a hook that autograd is about to call, where a hook of the program has forked.
        self.is_closed = True
        self._opening = self.group = None
        self._pinning = threading.Lock()

    # -- who may use it

    def require_own(self, what: str) -> None:
        """Raises a NotInitializedError in a forked child, which names ``what``."""
        if self._copied_to:
            raise NotInitializedError(
                f"{what}: {self._copied_to}: call it in the rank's own process, or train a copy of the model with an "
                "optimizer that is not wrapped"
            )

    def require_usable(self) -> None:
        """Raises GradientError if the optimizer was closed, or can take no more steps."""
        self.require_own("averaging gradients")
        if self._spoilt_by is not None:
            raise GradientError(f"this DistributedOptimizer can take no more steps: {self._spoilt_by}")
        if self.is_closed:
            raise GradientError(
                "this DistributedOptimizer no longer averages gradients: it was closed, or a newer one has the same "
                "parameters. Use the newer one, or the original optimizer"
            )

    # -- for ranks that join

    def progress(self) -> StepStatus:
        return self._user.step.plan.progress()

    def sit_out(self, average_of_active: bool) -> bool:
        """Takes part in one step of the other ranks without gradients. Returns False if all ranks sat out."""
        return self._user.sit_out(average_of_active)

    def why_no_join(self) -> str:
        """Says why no rank of this optimizer may join, as the message of an error; empty if they may."""
        return self._user.step.why_no_join()


keep_outside_graphs(globals())
