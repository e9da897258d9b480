"""
Finds the optimizers whose steps joined ranks sit out: those that live on every rank of their process set.

    a rank joins, and says which live there ── the others of the set pin theirs, and say which ── sit_out, to who joined

Pure, as all of `negotiation`, whose part it is. An optimizer that is gone on one rank, as the garbage collector of
that rank would have it, is one that no step can be taken with any more, and so nobody sits out a step of it. What is
said here holds until the join ends, since whoever has said what lives keeps it so long; and while a rank of the set
has joined, no other is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Sitting:
    """A process set of which a rank has joined."""

    members: frozenset[int]
    joined: list[int] = field(default_factory=list)
    living: dict[int, frozenset[int]] = field(default_factory=dict)  # by rank, the optimizers' numbers

    @property
    def is_known(self) -> bool:
        """Whether all members have said what lives there."""
        return self.living.keys() >= self.members

    @property
    def common(self) -> list[int]:
        return sorted(frozenset.intersection(*self.living.values()))


class JoinedSteps:
    """Finds, for the current join, the optimizers whose steps joined ranks take part in."""

    def __init__(self, tell: Callable[[int, list[Any]], None]) -> None:
        self._tell = tell
        # So that an answer is not taken for that to a later question.
        self._join = 0
        self._by_set: dict[int, _Sitting] = {}
        self._asked: set[int] = set()

    @property
    def has_any(self) -> bool:
        """Whether there are steps that those who have joined take part in."""
        return any(sitting.is_known and sitting.common for sitting in self._by_set.values())

    def joined(self, rank: int, living: Iterable[tuple[int, Iterable[int], Iterable[int]]]) -> None:
        """``rank`` has joined; by set it is in: its number, the members, and the optimizers that live there."""
        for set_id, members, numbers in living:
            sitting = self._by_set.get(set_id)
            if sitting is None:
                sitting = self._by_set[set_id] = _Sitting(frozenset(members))
                for other in sorted(sitting.members - {rank}):
                    self._asked.add(other)
                    self._tell(other, ["pin", self._join, set_id])
            sitting.joined.append(rank)
            if sitting.is_known:
                self._tell(rank, ["sit_out", set_id, sitting.common])
            else:
                self._hear(sitting, set_id, rank, numbers)

    def pinned(self, rank: int, join: int, set_id: int, numbers: Iterable[int]) -> None:
        """``rank`` has been asked, and these live there."""
        sitting = self._by_set.get(set_id)
        if join == self._join and sitting is not None and rank in sitting.members and not sitting.is_known:
            self._hear(sitting, set_id, rank, numbers)

    def end(self, told: Iterable[int]) -> None:
        """The join is over; ``told`` are the ranks that hear of that anyway."""
        for rank in sorted(self._asked.difference(told)):
            self._tell(rank, ["unpin"])
        self._asked.clear()
        self._by_set.clear()
        self._join += 1

    def _hear(self, sitting: _Sitting, set_id: int, rank: int, numbers: Iterable[int]) -> None:
        # A rank that was asked, and joined before that came, says so twice: it keeps both.
        sitting.living.setdefault(rank, frozenset(numbers))
        if sitting.is_known:
            for each in sitting.joined:
                self._tell(each, ["sit_out", set_id, sitting.common])
