"""
`Opening`: opens an optimizer's own engine between its ranks, at its first use rather than when it is constructed.
`Tuning`: what the ranks compare of the optimizer's arguments then, and the bucket cap that autotune has chosen.

    constructor: claims a number ── first step of any optimizer, or a join: begins all openings ── _run ── wait
                                     _run: compares arguments and models, opens the engine, tunes the bucket cap

`own_engine` creates an `Opening` and waits for it; the `ReducerRegistry` begins it. Each rank numbers its
optimizers in the order of construction, without communication. Optimizers with the same number belong together, in
whatever order ranks first use them. The work is an operation of the controller, named by that number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from ..buckets.exchange import Exchange, Links
from ..buckets.plan import Description, first_difference
from ..buckets.settings import Settings
from ..calls.generation import ReducerRegistry, SitsOut
from ..calls.handle import Handle
from ..calls.operation import OPTIMIZER, Execution, Operation
from ..comm.group import Group
from ..errors import MismatchError
from ..steps.step_world import Added

Submit = Callable[[Group, Operation], Handle]
"""Submits an operation, which runs once all ranks of the group have submitted it: `submit` of a controller."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An optimizer's open engine, as groups. ``cap_bytes`` is autotune's choice, or None without autotune."""

    group: Group
    links: Links
    cap_bytes: int | None


# An optimizer's arguments that ranks compare, by their names in messages: the repr of each value.
Arguments = dict[str, str]


@dataclass(frozen=True, slots=True)
class Tune:
    """Autotune of the bucket cap in bytes: ``measure`` chooses one, ``known`` was chosen before, for the same hosts.

    ``known`` is used only if it is equal on all ranks. A rank that was not in that earlier world has None.
    """

    measure: Callable[[Group], int]
    known: int | None = None

    def cap(self, group: Group) -> int:
        """Returns the cap, equal on all ranks. Every rank must call it; it waits for all."""
        known = self.known
        if group.size > 1 and group.agree(known, "autotune") is not None:
            known = None
        return self.measure(group) if known is None else known


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is done with an optimizer's new engine.

    The ranks compare ``arguments`` first. ``open_links`` opens the links of the exchange over the engine, and ``tune``
    chooses the bucket cap. ``device`` is the GPU of the parameters, or None.
    """

    arguments: Arguments
    open_links: Callable[[Group], Links]
    tune: Tune | None
    device: torch.device | None


class TuneNamed(Protocol):
    """Autotune's function that chooses the cap, in bytes, for these parameters. It waits for all ranks."""

    def __call__(self, group: Group, /, *, named: Sequence[tuple[str, Tensor]]) -> int: ...


# Returns, for a world's settings and exchange, the arguments that the ranks compare, and autotune, or None.
Describe = Callable[[Settings, Exchange], tuple[Arguments, TuneNamed | None]]


class Tuning:
    """One optimizer's arguments as the ranks of a world compare them, and autotune's choice, in all worlds."""

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self.arguments: Arguments = {}
        """What the ranks of this world compare."""
        self._tune: TuneNamed | None = None
        # The hosts of the ranks that the cap was last chosen for.
        self._tuned_for: tuple[str, ...] | None = None

    def enter(self, settings: Settings, exchange: Exchange) -> None:
        """Describes a world: a rank that was outside the process set may be in it now."""
        self.arguments, self._tune = self._describe(settings, exchange)

    @property
    def is_due(self) -> bool:
        """Whether autotune is on and has not chosen a cap yet."""
        return self._tune is not None and self._tuned_for is None

    def tune(self, added: Iterable[Added], hosts: tuple[str, ...], cap_bytes: int) -> Tune | None:
        """Returns autotune for these parameters, or None if it is off.

        It knows ``cap_bytes``, that of this or an earlier world, if it was chosen for ranks on these ``hosts``.
        """
        named = [pair for each in added for pair in each.params.items()]
        known = cap_bytes if self._tuned_for == hosts else None
        return None if self._tune is None else Tune(partial(self._tune, named=named), known)

    def note_choice(self, hosts: tuple[str, ...]) -> None:
        """Notes that the cap was chosen for ranks on these hosts."""
        self._tuned_for = hosts


class Opening:
    """The opening of one optimizer's engine in one world. It also closes the engine again."""

    def __init__(
        self,
        ranks: Group,
        registry: ReducerRegistry,
        number: int,
        member: SitsOut,
        submit: Submit | None,
        description: Description,
        plan: EnginePlan,
    ) -> None:
        """``number`` is the optimizer's number among those of these ranks. ``member`` sits out steps for `join`.

        ``submit`` is the method of the world's controller, or None if there is no world. The ranks compare
        ``description``, that of their models.
        """
        self.ranks = ranks
        self.number = number
        self._registry = registry
        self._member = ref(member)
        self._submit = submit
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
        operation = Operation(OPTIMIZER, self._run, f"optimizer {self.number}")
        if self._submit is not None and self.ranks.size > 1:
            self._handle = self._submit(self.ranks, operation)
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
            self._registry.of(self.ranks).enter(self.number, member)
        group = self.ranks.duplicate()
        try:
            with nullcontext() if plan.device is None else torch.cuda.device(plan.device):
                links = plan.open_links(group)
                opened = Opened(group, links, None if plan.tune is None else plan.tune.cap(group))
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
        raise_difference(group, group.agree(description, "comparing the models"))


def raise_difference(group: Group, descriptions: Sequence[Description] | None) -> None:
    """Raises MismatchError for the first parameter that differs between the ranks' descriptions, if one does."""
    for rank, description in enumerate(descriptions or ()):
        difference = first_difference(descriptions[0] if descriptions else (), description)
        if difference is not None:
            name, here, there = difference
            raise MismatchError(
                f"parameter {name!r} has {here} on {group.describe_rank(0)} and {there} on "
                f"{group.describe_rank(rank)}: every rank must build the same model; check the arguments that "
                "determine its sizes"
            )
