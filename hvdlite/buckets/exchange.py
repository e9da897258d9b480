"""
`Exchange`: how ranks send and combine a bucket's gradients, in any format (what DDP calls a communication hook).

    Gradients (of a full bucket) ── Exchange.begin (launches collectives over the Links) ── ExchangeWork
                                 ── ExchangeWork.finish (after these have ended: writes the result into the gradients)

The `Reducer` decides when a bucket is full, in which order buckets are sent, and when to wait for them; its
`in_flight.BucketQueue` calls these two. The counts of ranks that used a parameter and that take part are
sent beside the gradients, and stay exact whatever an exchange does to gradients. The built-in exchanges are in
`builtin_exchanges`; users pass their own to ``hvd.DistributedOptimizer(exchange=...)``.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.hierarchy import host_groups_of
from ..comm.work import Work
from .flags import ParticipantCount
from .plan import BucketPlan


@dataclass(eq=False)
class Gradients:
    """The gradients of one bucket, all of one dtype on one device.

    On a rank that sits out a step (see `hvd.join`) ``takes_part`` is False, and all gradients are zeros. So is the
    gradient of a parameter that this rank did not use.
    """

    plan: BucketPlan
    flat: Tensor
    """All gradients, one after the other, of shape ``(numel,)``."""
    views: Callable[[], Sequence[Tensor]]
    """Returns the ``pieces``."""
    what: str
    """Names the bucket in messages, equally on all ranks."""
    takes_part: bool = True
    flat_with_counts: Tensor | None = None
    scale: float = 1.0
    """The factor that ``flat`` must still be multiplied by. It is 1 unless `Exchange.scales`."""
    launching: Callable[[], None] | None = None
    """`Exchange.begin` may call it between packing and the first launch, for timelines to show them apart."""
    ranks: int = 1
    """The number of ranks of the optimizer."""
    counting: Callable[[], ParticipantCount] | None = None
    """Waits for the counts that are sent beside the bucket, and returns the number of ranks that take part.

    None if an exchange `Exchange.carries_counts`.
    """

    @property
    def with_counts(self) -> Tensor:
        """``flat`` with the counts behind it, for exchanges with `Exchange.carries_counts`."""
        return self.flat if self.flat_with_counts is None else self.flat_with_counts

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of ``pieces``."""
        return [piece.spec.name for piece in self.plan.slices]

    @property
    def pieces(self) -> Sequence[Tensor]:
        """Each parameter's gradient in its shape, as a view of ``flat``."""
        return self.views()

    @property
    def counts(self) -> Tensor:
        """The counts behind ``flat``, which an exchange with `Exchange.carries_counts` must sum over the ranks."""
        return self.with_counts[self.flat.numel() :]


class ExchangeWork:
    """One bucket that is being exchanged: its collectives, all that must outlive them, and what is done after them."""

    def __init__(
        self,
        gradients: Gradients,
        works: Sequence[Work] = (),
        *,
        wire: Tensor | None = None,
        takes_memory: bool = False,
    ) -> None:
        """``works`` are the launched collectives, in the order of their launch.

        ``wire`` is the tensor that is sent, for a timeline. ``takes_memory``: it is in memory other than the
        gradients', which `finish` frees. On a CPU, at most two buckets at a time have such memory.
        """
        self.gradients = gradients
        self.works = works
        self.wire = wire
        self.takes_memory = takes_memory
        self.failure: Exception | None = None
        """An error on this rank alone. With `Exchange.tells_failures` all ranks learn of it at the end of the step."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        for work in self.works:  # noqa: SIM110 - asked for each bucket during backward, where a generator takes longer
            if not work.is_completed():
                return False
        return True

    def wait(self) -> None:
        """Blocks until all works are done. On a GPU the current stream waits instead of the host."""
        for work in self.works:
            work.wait()

    def finish(self, count: ParticipantCount) -> None:
        """Writes the result into ``gradients``. It is called once all works are done, in the order of the buckets.

        An average is over ``int(count)`` ranks: all, unless some have joined and do not count. The base class divides
        the gradients by it, which the works have summed.
        """
        self.gradients.flat.div_(int(count))


class FinishedExchange(ExchangeWork):
    """A bucket whose gradients are the result already."""

    def finish(self, count: ParticipantCount) -> None:
        """Does nothing."""


class Links:
    """The groups of ranks that an exchange may communicate over (see `Group` for its collectives).

    ``all`` is all ranks of the optimizer. ``within`` is the ranks on this rank's host. ``across`` is one rank of each
    host, those with this rank's local rank. A sum over ``within`` and then over ``across`` is a sum over ``all``. If
    all ranks are on one host, ``within`` is all ranks and ``across`` this rank alone. If each host has one rank, or
    hosts have different numbers of ranks, ``across`` is all ranks and ``within`` this rank alone. Two groups of
    different ranks have separate engines. ``legs`` are further pairs of such groups, each with an engine of its own,
    for exchanges that open them with `in_legs`.
    """

    def __init__(self, group: Group, within: Group | None = None, across: Group | None = None) -> None:
        """Without further groups ``across`` is all ranks."""
        self.all = group
        self.within = within or group.alone()
        self.across = across or group
        self.legs: list[Leg] = []

    @classmethod
    def by_host(cls, group: Group) -> Links:
        """Opens groups within and across hosts. Every rank must call it, and waits for all."""
        if len(set(group.hosts)) == 1:
            return cls(group) if group.size == 1 else cls(group, group, group.alone())
        if (parts := host_groups_of(group.rank, group.hosts)) is None:
            return cls(group)
        token = _token(group)
        within = group.part(parts.within, token=f"{token}.within.{parts.within[0]}")
        return cls(group, within, group.part(parts.across, token=f"{token}.across.{parts.across[0]}"))

    @classmethod
    def in_legs(cls, group: Group, count: int) -> Links:
        """Opens ``count`` legs, or ``within`` alone on a single host. Every rank must call it, and waits for all."""
        if len(set(group.hosts)) == 1:
            return cls.by_host(group)
        links, parts, token = cls(group), host_groups_of(group.rank, group.hosts), _token(group)
        within, across = ((group.rank,), tuple(range(group.size))) if parts is None else (parts.within, parts.across)
        for leg in range(count):
            inner = group.part(within, token=f"{token}.within.{within[0]}.{leg}")
            links.legs.append(Leg(inner, group.part(across, token=f"{token}.across.{across[0]}.{leg}")))
        return links


def _token(group: Group) -> str:
    token: str = group.all_gather_json(uuid.uuid4().hex, "opening the links of an exchange")[0]
    return token


class Leg(NamedTuple):
    """The groups of ranks within this rank's host and across hosts, as in `Links`, with engines of their own."""

    within: Group
    across: Group


class Exchange(ABC):
    """Combines the gradients of all ranks, one bucket at a time. Each optimizer has its own instance.

    On every rank `begin` is called for the same buckets in the same order, and `ExchangeWork.finish` in that order. So
    the collectives of several buckets pair up, if all ranks launch each collective in the same one of the two methods.
    """

    during_backward: ClassVar[bool] = True
    """Whether buckets may be sent during backward. It must be False if `begin` waits for other ranks."""

    word: ClassVar[str] = "exchange"
    """The noun for this exchange in errors and timelines, as in "the exchange of the gradients of weight"."""

    after_step: ClassVar[bool] = False
    """Whether each rank first steps with its own gradients, and the exchange then gets the changes of the parameters.

    The result is then added to the parameters as they were before the step.
    """

    aligned: ClassVar[bool] = False
    """Whether each gradient begins at a multiple of 64 bytes in ``flat``, with zeros in the gaps. If not, no gaps."""

    carries_counts: ClassVar[bool] = False
    """Whether `begin` sums `Gradients.counts` over the ranks itself, for example by an all-reduce of ``with_counts``.

    If not, a second all-reduce beside each bucket sums them.
    """

    in_parts: ClassVar[bool] = False
    """Whether only this rank's part of a bucket has the result: see `BucketPlan.bounds`."""

    tells_failures: ClassVar[bool] = False
    """Whether a step fails on all ranks if `ExchangeWork.finish` has set its ``failure`` on one of them.

    This costs one small all-reduce at the end of each step.
    """

    def open_links(self, group: Group) -> Links:
        """Opens the groups that `begin` gets, by default `Links.by_host`. Every rank calls it, and waits for all."""
        return Links.by_host(group)

    @abstractmethod
    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Launches the collectives of one bucket. It may overwrite the gradients.

        Their memory lasts until `ExchangeWork.finish` of what it returns. For more than an average of sums, return an
        object of a class that is derived from `ExchangeWork`, overrides `finish`, and has what that needs.
        """

    # -- a step that may be taken back

    @property
    def has_residuals(self) -> bool:
        """Whether ranks have kept something of their gradients that was not sent yet; some may have no part of it."""
        return False

    def begin_step(self) -> None:  # noqa: B027 - most keep no state
        """Begins a step, before its first bucket: its changes of the state can be taken back until `end_step`.

        It is called where steps go on after a rank is lost (``--survive``): they are averaged again, or discarded. And
        where a process has several optimizers: if a step is one of gradients that another optimizer's pass has left,
        all ranks drop them.
        """

    def end_step(self) -> None:  # noqa: B027
        """Makes the changes of the step final. Does nothing if they were taken back, or are final already."""

    def take_step_back(self) -> None:  # noqa: B027
        """Restores the state at `begin_step`, and ends what is still being done to buckets. The reverse of `end_step`.

        No thread of the exchange touches buckets or state after this, until the next `begin`.
        """

    # -- the state

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state by the names of parameters, for checkpoints. Empty if the exchange keeps none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a dict that `state_dict` returned, or an empty one."""
        if state:
            of = state.get("codec", f"an exchange, for {next(iter(state))!r} and others")
            raise ValueError(
                f"the checkpoint has the state of {of}, and the optimizer keeps none: make it with the same "
                "compression= or exchange=, or delete the key 'hvdlite' from the state_dict"
            )

    def check_state(self, state: Mapping[str, Any], numels: Mapping[str, int]) -> None:  # noqa: B027 - most keep none
        """Raises ValueError if a state is of another model than that whose parameters have ``numels`` real numbers."""

    def consolidate(self, plans: Sequence[BucketPlan], links: Links) -> dict[str, Any]:
        """Returns a state that any number of ranks can load, made of all ranks' states: see `consolidate_state_dict`.

        Every rank calls it, between two steps, with the same buckets and its links to the others.
        """
        if type(self).state_dict is not Exchange.state_dict:
            raise ValueError(
                f"consolidate_state_dict: {self!r} has a state on each rank, and no method consolidate(plans, links) "
                "that makes one of them: write one, or save state_dict() on every rank"
            )
        return {}

    def rescale(self, factor: float) -> None:  # noqa: B027 - most keep none
        """Multiplies what is kept of gradients for the next step: a GradScaler has changed the scale of its losses.

        It is called between two steps, if a class overrides it.
        """

    def without(self, state: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
        """Returns a dict that `state_dict` returned, without what it has of these parameters.

        The optimizer no longer has them: checkpoints have nothing of them, and between two steps the exchange loads the
        rest of its own state. The base class returns ``state`` itself, and then nothing is loaded.
        """
        return state

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """Returns the factor that gradients of this dtype are multiplied by before `begin`, with ``size`` ranks."""
        return 1.0

    def scales(self, plan: BucketPlan) -> bool:
        """Whether `begin` multiplies this bucket by `Gradients.scale` itself. If not, the bucket is scaled before."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"
