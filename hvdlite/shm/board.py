"""
The vote board: words in shared memory by which the ranks of one host agree on a call without messages.

Rounds are numbered from 1, and one is open at a time, in which each rank may vote once. `control.voting` casts the
votes (round and digest), each in its rank's control block. Rank 0's `coordinator` alone decides the round, which opens
the next. Each word has one writer (rank 0's are written under a lock of the coordinator), except the bells (futexes),
of which only the change matters.

A vote may come with a few bytes of data: after a go every rank has all ranks' bytes, and needs no further word. They
lie in slots that take turns with each such go; `ops.direct` reads them.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .arithmetic import Arithmetic
from .control_block import READS_IN_ORDER, VOTE_SLOTS, ControlBlock, Payloads, comes_soon, fence, sleep_while, wake

DIGEST_BYTES = 16

# Offsets in 64-bit words. A vote and its digest share a cache line, and so do rank 0's decisions. The lowest bit of
# _WITH_DATA is the slot for the next data, and the others are the last round that was decided with data.
_VOTE, _DIGEST, _ASLEEP, _OPEN, _GO, _PAUSED, _WITH_DATA, _VOTES_BELL, _DECISION_BELL = 0, 1, 8, 16, 17, 18, 19, 24, 32

# The longest sleep: the ring may be lost if two ranks ring at once.
_SLEEP_S = 0.1


@runtime_checkable
class HasBoard(Protocol):
    """An engine whose ranks share memory."""

    @property
    def board(self) -> Board: ...


class VoteData(Payloads):
    """One rank's view of a slot of the data that ranks write beside their votes.

    A thread whose call was handed over to another may go on to read its slot: what it makes then is dropped.
    """

    def __init__(self, rank: int, pieces: Sequence[Tensor]) -> None:
        """``pieces`` are the bytes of the slot, by rank, `PAYLOAD_BYTES` each."""
        super().__init__(pieces)
        self._rank, self._own = rank, pieces[rank].data_ptr()
        self._arithmetics: dict[tuple[object, torch.dtype], Arithmetic] = {}

    def write(self, address: int, nbytes: int) -> None:
        ctypes.memmove(self._own, address, nbytes)

    def copy(self) -> VoteData:
        """Returns the same data in memory of this process, for another thread."""
        return VoteData(self._rank, [piece.clone() for piece in self.pieces])

    def reduced(self, op: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns all ranks' tensors of this shape, reduced by an op of torch.distributed as `collectives` do it."""
        arithmetic = self._arithmetics.get((op, dtype))
        if arithmetic is None:
            arithmetic = Arithmetic(op, dtype, len(self.pieces))
            # The memory of those that have some is for one thread at a time; a thread that was handed over may go on.
            if not arithmetic.is_wide:
                self._arithmetics[op, dtype] = arithmetic
        result = torch.empty(shape, dtype=dtype, device="cpu")
        arithmetic.into(self.elements(dtype, result.numel()), result.view(-1), is_apart=True)
        return result


class Board:
    """One rank's view of the vote board."""

    def __init__(self, rank: int, control_blocks: list[ControlBlock]) -> None:
        self.rank = rank
        self._words = [control_block.board for control_block in control_blocks]
        self._own, self._of_rank_0 = self._words[rank], self._words[0]
        self._own_digest = control_blocks[rank].board_bytes[_DIGEST * 8 : _DIGEST * 8 + DIGEST_BYTES]
        self._digests = [block.board_bytes[_DIGEST * 8 : _DIGEST * 8 + DIGEST_BYTES] for block in control_blocks]
        # Rank 0 has a bell of its own, so that a vote wakes no other rank.
        bells = (_VOTES_BELL, _DECISION_BELL)
        self._bells = [control_blocks[0].board_bytes[bell * 8 : bell * 8 + 4].cast("I") for bell in bells]
        self._bell_addresses = [control_blocks[0].board_address + bell * 8 for bell in bells]
        # Two: ranks may still read the data of one go while others write those of the next. Before the one after that
        # every rank votes, and has read the first.
        self._data = [VoteData(rank, [block.vote_data[slot] for block in control_blocks]) for slot in range(VOTE_SLOTS)]
        self._spins = len(os.sched_getaffinity(0)) >= len(control_blocks)

    # -- by any rank

    @property
    def open_round(self) -> int:
        """The number of the round that is open for votes; 0 before the first."""
        number = self._of_rank_0[_OPEN]
        if not READS_IN_ORDER:
            # Order this read before the caller's next reads.
            fence()
        return number

    @property
    def is_paused(self) -> bool:
        """Whether rank 0 advises not to vote, because messages are in progress. Read it after `open_round`."""
        return self._of_rank_0[_PAUSED] != 0

    @property
    def data(self) -> VoteData:
        """The data that go with the votes of the open round; this rank writes its own before it votes."""
        # The slot changes with a go alone, for which this rank's vote is needed.
        return self._data[self._of_rank_0[_WITH_DATA] & 1]

    def vote(self, number: int, digest: bytes) -> None:
        """Vote in round ``number`` (the open round, or one just decided) for the call with this digest."""
        self._own_digest[:] = digest
        fence()
        self._own[_VOTE] = number
        fence()
        if self.rank != 0 and self._of_rank_0[_ASLEEP] and self.have_all_voted(number):
            self._ring(_OF_VOTES)

    def outcome(self, number: int) -> bool | None:
        """Whether the round was decided with a go, if this rank voted in it; None while the round is open."""
        if self.open_round <= number:
            return None
        # _GO cannot name a later round: a go needs this rank's vote, and it has not voted again.
        return self._of_rank_0[_GO] == number

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until ``is_over()``, for at most ``timeout_s``; returns whether it is.

        It is checked at each decision, and on rank 0 also when all have voted.
        """
        if is_over() or comes_soon(is_over, has_core=self._spins):
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

    # -- by rank 0; to decide or pause needs the coordinator's lock

    def have_all_voted(self, number: int) -> bool:
        """Whether every rank has voted in round ``number``."""
        for words in self._words:  # a generator would take longer than the rest of this method
            if words[_VOTE] != number:
                return False
        if not READS_IN_ORDER:
            fence()
        return True

    def are_votes_equal(self) -> bool:
        """Whether all ranks voted for the same call. Every rank must have voted."""
        return all(digest == self._own_digest for digest in self._digests)

    def decide(self, *, go: bool, has_data: bool = False) -> None:
        """Decides the open round, and opens the next; ``has_data``: the votes of a go came with data."""
        number = self._own[_OPEN]
        last = self._own[_WITH_DATA]
        # The thread that decides may be interrupted anywhere, and another decide or close the round: what is written
        # twice stays as it was. All have voted, and so read the other slot.
        if go and has_data and last >> 1 != number:
            self._own[_WITH_DATA] = number << 1 | (last & 1 ^ 1)
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
        """Advises the ranks not to vote, or to vote again."""
        self._own[_PAUSED] = int(is_paused)
        fence()

    def _ring(self, bell: int) -> None:
        self._bells[bell][0] = (self._bells[bell][0] + 1) % 2**32
        wake(self._bell_addresses[bell])


_OF_VOTES, _OF_DECISION = 0, 1
