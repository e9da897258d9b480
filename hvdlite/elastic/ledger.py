"""
`Division`: how an epoch's samples are divided among ranks, of which some may be lost within a step.

    pool ── divide ── a share per rank ── a loss: the others keep theirs ── and divide what is left of the lost ones'

A *share* is a list of the samples that a rank draws, in order; all shares of a division have the same length. The
ranks of a division keep the numbers that they had when it was made, as its *members*. All of this follows from the
division's few numbers, which are saved with the sampler's state, and are equal on all ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from hvdlite_wire.codec import decode, encode

Kept = TypeVar("Kept")


class Loss(NamedTuple):
    """Members that were lost in the same step, or a step that the others have discarded.

    ``trained``: how many samples of each share had been trained by then. ``discarded``: how many behind those were in
    the discarded step. ``is_added``: these, and what the lost members had left, were added to the shares of the others,
    which was too late where a rank had drawn the last sample of its share.
    """

    trained: int
    lost: tuple[int, ...]
    is_added: bool
    discarded: int = 0


@dataclass
class Division:
    """A pool of samples that some ranks divide, and those of them that were lost in a step.

    ``skipped``: how many samples at the beginning of the pool had been processed before. ``processed``: how many of
    each share have been since.
    """

    size: int
    skipped: int = 0
    processed: int = 0
    losses: list[Loss] = field(default_factory=list)

    @property
    def members(self) -> list[int]:
        """The members that are left."""
        lost = {member for loss in self.losses for member in loss.lost}
        return [member for member in range(self.size) if member not in lost]

    def shares(self, pool: Sequence[int]) -> tuple[dict[int, list[int]], list[int]]:
        """Returns the share of each member that is left, and the samples that are in no share.

        ``pool`` is without the samples that are skipped. In a share ``~index`` is a sample that is repeated, so that
        all shares have the same length.
        """
        shares, rest = divide(pool, range(self.size)), []
        for trained, lost, is_added, discarded in self.losses:
            rest += left_of([shares.pop(member) for member in lost], trained)
            rest += left_of([share[: trained + discarded] for share in shares.values()], trained)
            if is_added:
                for member, added in divide(rest, shares).items():
                    shares[member] += added
                rest = []
        return shares, rest

    def left(self, pool: Sequence[int]) -> list[int]:
        """Returns the samples of the whole pool that have not been processed."""
        shares, rest = self.shares(pool[self.skipped :])
        return left_of(shares.values(), self.processed) + rest


@dataclass
class Ledger:
    """What was drawn in an epoch before the current division.

    ``carried``: samples of the epoch before, which come first. ``divisions``: those of this epoch that lost ranks
    within a step. ``counted``: how many samples all ranks together had processed at the end of the last of these.
    """

    carried: list[int] = field(default_factory=list)
    divisions: list[Division] = field(default_factory=list)
    counted: int = 0

    def left(self, samples: Sequence[int]) -> list[int]:
        """Returns which of the epoch's samples were left at the end of the last of the divisions."""
        pool = [*self.carried, *samples]
        for division in self.divisions:
            pool = division.left(pool)
        return pool


def plain(value: object) -> Any:
    """Returns a ledger or losses as numbers and lists, for a state or a message."""
    return json.loads(encode(value))


def from_plain(of: type[Kept], saved: Any) -> Kept:
    """Returns the value of this type that `plain` was called on."""
    return decode(of, json.dumps(saved))


def divide(pool: Sequence[int], members: Collection[int]) -> dict[int, list[int]]:
    """Returns a share of the pool for each member; the first samples are repeated where it cannot be divided evenly."""
    missing = -len(pool) % len(members)
    padded = [*pool, *(~index for index in itertools.islice(itertools.cycle(pool), missing))]
    return {member: padded[place :: len(members)] for place, member in enumerate(members)}


def left_of(shares: Iterable[Sequence[int]], start: int) -> list[int]:
    """Returns the samples of shares of the same length from place ``start`` on, without those that are repeated."""
    return [index for row in zip(*(share[start:] for share in shares), strict=True) for index in row if index >= 0]


class Votes:
    """Tells how many samples of each share the steps that have ended have trained, from when they were recorded.

    Some programs record a batch after its step, others before it. The first two steps of a division, which are equally
    large, show which: by what was recorded between them, and before the first. In doubt this returns less, since it is
    better to train samples twice than never.
    """

    def __init__(self) -> None:
        # By an optimizer's number: how many of its steps have ended in this division, and what had been recorded before
        # the end of the first and of the last of them; and, over all divisions, how much is recorded after its step.
        self._ended: dict[int, tuple[int, int, int]] = {}
        self._late: dict[int, int] = {}

    def begin(self) -> None:
        """Notes that another division begins."""
        self._ended.clear()

    def note(self, number: int, recorded: int) -> None:
        """Notes that a step of the optimizer with this number has ended, when so many samples had been recorded."""
        count, first, _ = self._ended.get(number, (0, recorded, recorded))
        if count == 1 and recorded > first:
            self._late[number] = self._late_of(number, number, recorded)
        self._ended[number] = (count + 1, first, recorded)

    def trained(self, number: int | None, recorded: int) -> int:
        """Returns how many samples of each share were trained before the step of this optimizer that has not ended."""
        ends = [last + self._late_of(each, number, recorded) for each, (_, _, last) in self._ended.items()]
        return min(max(ends, default=0), recorded)

    def another_ends(self, number: int, recorded: int) -> bool:
        """Whether another optimizer's step has ended when so many samples were recorded: it has trained these."""
        return any(last == recorded for each, (_, _, last) in self._ended.items() if each != number)

    def late(self, number: int, recorded: int | None = None) -> int:
        """Returns how many samples of a step of this optimizer are recorded after it, as far as that is known.

        ``recorded``: how many are in its next step, which has not ended.
        """
        if recorded is not None and number in self._ended:
            return self._late_of(number, number, recorded)
        return self._late.get(number, 0)

    def _late_of(self, number: int, in_step: int | None, recorded: int) -> int:
        count, first, _ = self._ended[number]
        known = self._late.get(number)
        if count == 1 and number == in_step:
            late = max(0, recorded - 2 * first)
            return late if known is None else min(known, late)
        return known or 0
