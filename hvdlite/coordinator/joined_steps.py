"""
Finds the optimizers whose steps joined ranks sit out: those alive on every rank of their process set.

    a rank joins, and lists its living optimizers ── the set's other ranks pin and list theirs ── sit_out, to joined

`negotiation` calls it on rank 0. It uses no connection, thread or clock. If an optimizer has been garbage-collected on
one rank, no rank can take a step with it any more, so no rank sits out its steps. The lists stay valid until the join
ends: each rank keeps the optimizers that it has reported, and no optimizer can be made on a set while one of its ranks
has joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..calls.messages import LivingOptimizers, Pin, Pinned, SitOutSteps, Unpin


@dataclass(slots=True)
class _Sitting:
    """A process set of which a rank has joined."""

    members: frozenset[int]
    joined: list[int] = field(default_factory=list)
    living: dict[int, frozenset[int]] = field(default_factory=dict)  # by rank, the optimizers' numbers

    @property
    def is_known(self) -> bool:
        """Whether all members have reported their living optimizers."""
        return self.living.keys() >= self.members

    @property
    def common(self) -> list[int]:
        return sorted(frozenset.intersection(*self.living.values()))


class JoinedSteps:
    """Finds, for the current join, the optimizers whose steps joined ranks take part in."""

    def __init__(self, send: Callable[[int, Pin | Unpin | SitOutSteps], None]) -> None:
        self._send = send
        # The number of the join, so that a late answer is not taken for one of the next join.
        self._join = 0
        self._by_set: dict[int, _Sitting] = {}
        self._asked: set[int] = set()

    @property
    def has_any(self) -> bool:
        """Whether there are steps that joined ranks take part in."""
        return any(sitting.is_known and sitting.common for sitting in self._by_set.values())

    def joined(self, rank: int, living: Iterable[LivingOptimizers]) -> None:
        """Notes that ``rank`` has joined; ``living`` are its living optimizers, each with all members of the set."""
        for each in living:
            set_id, sitting = each.set_id, self._by_set.get(each.set_id)
            if sitting is None:
                sitting = self._by_set[set_id] = _Sitting(frozenset(each.members))
                for other in sorted(sitting.members - {rank}):
                    self._asked.add(other)
                    self._send(other, Pin(self._join, set_id))
            sitting.joined.append(rank)
            if sitting.is_known:
                self._send(rank, SitOutSteps(set_id, sitting.common))
            else:
                self._hear(sitting, set_id, rank, each.numbers)

    def pinned(self, rank: int, answer: Pinned) -> None:
        """Notes the answer of ``rank`` to `Pin`: these optimizers are alive there."""
        sitting = self._by_set.get(answer.set_id)
        if answer.join == self._join and sitting is not None and rank in sitting.members and not sitting.is_known:
            self._hear(sitting, answer.set_id, rank, answer.numbers)

    def end(self, informed: Iterable[int]) -> None:
        """Ends the join; ``informed`` are the ranks that do not need a separate `Unpin`."""
        for rank in sorted(self._asked.difference(informed)):
            self._send(rank, Unpin())
        self._asked.clear()
        self._by_set.clear()
        self._join += 1

    def _hear(self, sitting: _Sitting, set_id: int, rank: int, numbers: Iterable[int]) -> None:
        # A rank that joins before the question reaches it reports twice; it keeps both lists alive.
        sitting.living.setdefault(rank, frozenset(numbers))
        if sitting.is_known:
            for each in sitting.joined:
                self._send(each, SitOutSteps(set_id, sitting.common))
