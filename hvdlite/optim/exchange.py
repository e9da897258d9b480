"""
`Exchange`, the interface for how ranks combine a bucket's gradients (what DDP calls a communication hook).

    Gradients (of a full bucket) ── begin (launch what is to travel over the Links) ── ExchangeWork
                                 ── finish (when that is done: leave the result in the gradients)

An exchange sees gradients and nothing else. When a bucket is full, in which order buckets travel and who waits for them
is the `Reducer`'s; which ranks have used a parameter, and how many take part, travels beside the gradients, exactly.
Those that come with hvdlite are in `exchanges`; a user passes another to ``hvd.DistributedOptimizer(exchange=...)``.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..comm.group import Group
from ..comm.host_groups import host_groups_of
from ..comm.work import Work
from .flags import ParticipantCount
from .plan import BucketPlan


class Gradients:
    """The gradients of one bucket, of one dtype on one device.

    ``flat``, of shape ``(numel,)``, holds them one after the other; ``pieces``, one for each of ``names``, are the same
    memory in the parameters' shapes. A parameter that this rank did not use has zeros. On a rank that sits out a step
    (see `hvd.join`) ``takes_part`` is False, and all are zeros.
    """

    def __init__(
        self,
        plan: BucketPlan,
        flat: Tensor,
        views: Callable[[], Sequence[Tensor]],
        *,
        what: str,
        takes_part: bool = True,
        with_counts: Tensor | None = None,
        scale: float = 1.0,
        launching: Callable[[], None] | None = None,
    ) -> None:
        """``views`` gives the pieces; ``what`` are words for the bucket, the same on all ranks, for errors and stalls.

        ``with_counts`` and ``scale`` are what exchanges look at that say so: ``flat`` with the counts behind it, and
        what it is still to be multiplied by. ``launching`` may be called in `Exchange.begin` when all is packed, before
        the first launch: a timeline then shows the one apart from the other.
        """
        self.plan = plan
        self.flat = flat
        self.what = what
        self.takes_part = takes_part
        self.with_counts = flat if with_counts is None else with_counts
        self.scale = scale
        self.launching = launching
        self._views = views

    @property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of ``pieces``."""
        return [piece.spec.name for piece in self.plan.slices]

    @property
    def pieces(self) -> Sequence[Tensor]:
        """Each parameter's gradient in its shape, as a view of ``flat``."""
        return self._views()

    @property
    def counts(self) -> Tensor:
        """What lies behind ``flat``, of an exchange that has them carried."""
        return self.with_counts[self.flat.numel() :]


@dataclass(slots=True)
class ExchangeWork:
    """What `Exchange.begin` has launched for one bucket, and what `Exchange.finish` needs of it."""

    works: Sequence[Work] = ()
    kept: Any = None
    # What travels, for a timeline; and whether it is in memory beside the gradients, which is free after `finish`.
    wire: Tensor | None = None
    takes_memory: bool = False
    # What has gone wrong on this rank alone, which the others are to be told of at the end of the step.
    failure: Exception | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        for work in self.works:  # noqa: SIM110 - asked for each bucket during backward, where a generator takes longer
            if not work.is_completed():
                return False
        return True

    def wait(self) -> None:
        """Block until all works are done; on a GPU the current stream waits instead of the host."""
        for work in self.works:
            work.wait()


class Links:
    """The ranks that an exchange may communicate with, as groups (see `Group` for what they can do).

    ``all`` are all ranks of the optimizer, ``within`` those on this rank's host, and ``across`` one rank of each host,
    those with this rank's local rank: a sum over ``within`` and then over ``across`` is one over ``all``. Where there
    are no two levels to be had (all ranks on one host, one on each, or hosts with different numbers of ranks) one of
    the two is all ranks and the other this rank by itself. Each has an engine of its own.
    """

    def __init__(self, group: Group, *, by_host: bool) -> None:
        """Opens groups within and across hosts where ``by_host``, for which it waits for all ranks."""
        self.all = self.across = group
        self.within = group.alone()
        if not by_host or group.size == 1:
            return
        if len(set(group.hosts)) == 1:
            self.within, self.across = self.across, self.within
            return
        host_groups = host_groups_of(group.rank, group.hosts)
        if host_groups is not None:
            (token, *_) = group.all_gather_json(uuid.uuid4().hex, "opening the links of an exchange")
            self.within = group.part(host_groups.within, token=f"{token}.within.{host_groups.within[0]}")
            self.across = group.part(host_groups.across, token=f"{token}.across.{host_groups.across[0]}")


class Exchange(ABC):
    """Combines the gradients of all ranks, a bucket at a time. One is made for each optimizer.

    On every rank `begin` is called for the same buckets in the same order, and `finish` in that order. So collectives
    of several buckets pair up, as long as each is launched in the one or the other by all ranks alike.
    """

    by_host: ClassVar[bool] = True
    """Whether the links are to lead within hosts and across them; else all ranks are across."""

    during_backward: ClassVar[bool] = True
    """Whether buckets may travel during backward; not, where `begin` waits for other ranks."""

    word: ClassVar[str] = "exchange"
    """What it is called in errors and timelines, as in "the exchange of the gradients of weight"."""

    after_step: ClassVar[bool] = False
    """Whether each rank steps with its own gradients, and is given what the step has changed in place of gradients.

    What `finish` leaves is then added to the parameters as they were before the step.
    """

    aligned: ClassVar[bool] = False
    """Whether each gradient begins at a multiple of 64 bytes in ``flat``, behind zeros; else there are no gaps."""

    carries_counts: ClassVar[bool] = False
    """Whether `begin` has `Gradients.counts` summed over the ranks, as by an all-reduce of ``with_counts``.

    Else they travel in an all-reduce of their own beside each bucket.
    """

    tells_failures: ClassVar[bool] = False
    """Whether a step fails on all ranks where `finish` has left an `ExchangeWork.failure` on one of them.

    For that the ranks tell each other at the end of each step.
    """

    @abstractmethod
    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        """Launch what is to travel. The gradients may be overwritten; they stay in place until `finish`."""

    @abstractmethod
    def finish(self, gradients: Gradients, begun: ExchangeWork, count: ParticipantCount) -> None:
        """Leave the result in the gradients, when all works of ``begun`` are done.

        An average is over ``int(count)`` ranks: all, unless some have joined and do not count.
        """

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by the names of parameters, for checkpoints; nothing where there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, or nothing."""
        if state:
            raise ValueError(
                f"the checkpoint has the state of an exchange, for {next(iter(state))!r} and others, and {self!r} has "
                "none: make the optimizer with the same exchange=, or delete the key 'exchange' from the state_dict"
            )

    def scale_before(self, dtype: torch.dtype, size: int) -> float:
        """What gradients of this dtype are multiplied by as they come, for so many ranks."""
        return 1.0

    def scales(self, plan: BucketPlan) -> bool:
        """Whether `begin` can multiply a bucket by `Gradients.scale` better than who fills it."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"
