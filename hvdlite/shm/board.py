"""
The vote board: words in each rank's control block by which ranks of one host agree on a call without messages.

    vote ── this rank's round and digest     open, go, paused ── rank 0's     wait ── look, spin, sleep at a bell

Rounds have numbers, from 1 on, and one is open at a time. Each rank may vote in it once; rank 0's process alone decides
it, which opens the next. What votes are about, and when one is cast, is in `control.voting`. Each word has one writer
(rank 0's are written under a lock of the coordinator), but for the bells, of which only the change counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .control_block import ControlBlock
from .futex import fence, reads_in_order, sleep_while, wake

DIGEST_BYTES = 16

# In 64-bit words. A vote and its digest share a cache line, as what rank 0 decides does.
_VOTE, _DIGEST, _ASLEEP, _OPEN, _GO, _PAUSED, _VOTES_BELL, _DECISION_BELL = 0, 1, 8, 16, 17, 18, 24, 32

# As in `peers`: how long a rank that has a core for itself looks before it sleeps, and how often it gives its core away
# where there are not as many.
_SPIN_S = 100e-6
_LOOKS_PER_CLOCK = 20
_YIELDS = 4
# A sleep at most: a bell that two ranks ring at once may be missed.
_SLEEP_S = 0.1

_READS_IN_ORDER = reads_in_order()


@runtime_checkable
class HasBoard(Protocol):
    """An engine whose ranks share memory."""

    @property
    def board(self) -> Board:
        """The board of its ranks."""
        ...


class Board:
    """The board as one rank sees it."""

    def __init__(self, rank: int, control_blocks: list[ControlBlock]) -> None:
        self.rank = rank
        self._words = [control_block.board for control_block in control_blocks]
        self._own, self._of_rank_0 = self._words[rank], self._words[0]
        self._own_digest = control_blocks[rank].board_bytes[_DIGEST * 8 : _DIGEST * 8 + DIGEST_BYTES]
        self._digests = [block.board_bytes[_DIGEST * 8 : _DIGEST * 8 + DIGEST_BYTES] for block in control_blocks]
        # Rank 0 sleeps at a bell of its own, so that a vote wakes nobody else.
        bells = (_VOTES_BELL, _DECISION_BELL)
        self._bells = [control_blocks[0].board_bytes[bell * 8 : bell * 8 + 4].cast("I") for bell in bells]
        self._bell_addresses = [control_blocks[0].board_address + bell * 8 for bell in bells]
        self._spins = len(os.sched_getaffinity(0)) >= len(control_blocks)

    # -- by any rank

    @property
    def open_round(self) -> int:
        """The number of the round in which ranks may vote now; 0 before there is any."""
        number = self._of_rank_0[_OPEN]
        if not _READS_IN_ORDER:
            # What is read next was written before it.
            fence()
        return number

    @property
    def is_paused(self) -> bool:
        """Whether rank 0 advises not to vote, since messages are under way. To be read after `open_round`."""
        return self._of_rank_0[_PAUSED] != 0

    def vote(self, number: int, digest: bytes) -> None:
        """This rank is about to make the call of this digest, in the open round or one that was just decided."""
        self._own_digest[:] = digest
        fence()
        self._own[_VOTE] = number
        fence()
        if self.rank != 0 and self._of_rank_0[_ASLEEP] and self.have_all_voted(number):
            self._ring(_OF_VOTES)

    def outcome(self, number: int) -> bool | None:
        """Whether the round, in which this rank has voted, was decided with a go; None while it is open."""
        if self.open_round <= number:
            return None
        # No later round can have had a go: that takes a vote of this rank.
        return self._of_rank_0[_GO] == number

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Return True once that is so, False if it is too late: looks when a round is decided, or all have voted."""
        if is_over() or self._came_meanwhile(is_over):
            return True
        bell = _OF_VOTES if self.rank == 0 else _OF_DECISION
        until_s = time.monotonic() + timeout_s
        self._own[_ASLEEP] = 1
        try:
            while True:
                fence()
                ring = self._bells[bell][0]
                if is_over():
                    return True
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                sleep_while(self._bell_addresses[bell], ring, min(left_s, _SLEEP_S))
        finally:
            self._own[_ASLEEP] = 0

    # -- by rank 0

    def have_all_voted(self, number: int) -> bool:
        """Whether every rank has voted in this round."""
        for words in self._words:  # a generator would take longer than all else here
            if words[_VOTE] != number:
                return False
        if not _READS_IN_ORDER:
            fence()
        return True

    def are_votes_equal(self) -> bool:
        """Whether all ranks have voted for the same call, all having voted."""
        return all(digest == self._own_digest for digest in self._digests)

    def decide(self, *, go: bool) -> None:
        """Decide the open round, and open the next, or the first. Under the coordinator's lock."""
        number = self._own[_OPEN]
        if go:
            self._own[_GO] = number
            fence()
        self._own[_OPEN] = number + 1
        fence()
        if any(words[_ASLEEP] for words in self._words[1:]):
            self._ring(_OF_DECISION)
        if self._own[_ASLEEP]:
            self._ring(_OF_VOTES)

    def pause(self, *, is_paused: bool) -> None:
        """Advise not to vote, or no more. Under the coordinator's lock."""
        self._own[_PAUSED] = int(is_paused)
        fence()

    def _came_meanwhile(self, is_over: Callable[[], bool]) -> bool:
        if not self._spins:
            for _ in range(_YIELDS):
                os.sched_yield()
                if is_over():
                    return True
            return False
        until_s = time.monotonic() + _SPIN_S
        while time.monotonic() < until_s:
            for _ in range(_LOOKS_PER_CLOCK):
                if is_over():
                    return True
        return False

    def _ring(self, bell: int) -> None:
        self._bells[bell][0] = (self._bells[bell][0] + 1) % 2**32
        wake(self._bell_addresses[bell])


_OF_VOTES, _OF_DECISION = 0, 1
