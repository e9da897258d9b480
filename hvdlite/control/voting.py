"""
Agrees on a call by a vote in shared memory, where all ranks are on one host: faster than messages through rank 0.

    submit ── may it be voted on? ── vote(digest of the call) ── rank 0's process decides ── go: carried out at once
                   └─ no ────────────── closed, or votes differ ──────────────────────────── asked for by a message

A vote is a short way to where an ask and a go lead in any case; every call that it does not settle is asked for by a
message, as if there were no vote, and all that is said of errors, joins, stalls and ends comes from there.

**When a rank votes.** If it has nothing else under way: no ask unanswered, nothing to be carried out, no join. From
the vote on until the round is decided it asks for nothing else: what its threads call meanwhile is held, and said after
the decision, in the order of their calls. So a rank's calls reach the others in their order, whichever way.

**Who decides.** Rank 0's process alone, under one lock, once for each round; the board says which round is open. Its
executor decides when all have voted: a go if all digests are equal and the negotiation has nothing unsettled (pending,
refused and not told to all, joined, ended), else the round is closed. Its coordinator closes the open round as soon as
there is something unsettled, or when a rank says that it has waited for long enough. A rank reads the outcome when the
round is decided, and never changes its vote, so that all see the same.

**Why the order of operations is the same on all ranks.** At a go every rank has voted, so none has anything under way,
and none does anything before it has carried that operation out: no other can be before it on one rank and after it on
another. What is told by messages later comes later in each executor's queue, where the vote itself stands.

**Why nothing waits for ever.** A rank that has voted waits for the decision. If that does not come within a moment it
asks the coordinator, which always answers, to close the round. If rank 0's process is stopped, the listening thread
tells of it as ever; if it has ended, what it had decided before stands, and otherwise the ask fails. A rank that does
not vote is waited for no longer than that moment, and who comes late finds the round closed.

**Why errors are the same.** A digest has all that ranks compare: kind, name, what is equal on all ranks, what each
brings, and the thread's name where no name of the user's says what is meant. Where these are equal the negotiation
would have answered go; where they are not it is asked, and finds the difference.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from ..shm.board import DIGEST_BYTES, Board
from .pending import Ask

MOST_BYTES = 1 << 16
"""What is said of a call that is voted on; longer ones are left to messages, which have a limit of their own."""

# How long the others are waited for by a vote, and after that how often one looks whether all is over.
PATIENCE_S = 0.01
_LOOK_S = 0.1


class Voter:
    """One rank's votes, and what it would say while one is under way."""

    def __init__(
        self,
        board: Board,
        lock: threading.Lock,
        *,
        close_round: Callable[[int], None],
        decide_round: Callable[[int, Ask], None] | None,
        is_over: Callable[[], bool],
    ) -> None:
        """``lock`` is the client's, under which it decides how a call is asked for.

        ``close_round`` lets rank 0 know that this rank waits no longer for a round; ``decide_round`` is rank 0's own,
        to be called when all have voted; ``is_over`` says whether nothing can be asked for any more.
        """
        self._board = board
        self._lock = lock
        self._close_round = close_round
        self._decide_round = decide_round
        self._is_over = is_over
        # What is to be said after the vote that is under way; None if none is.
        self._held: list[Callable[[], None]] | None = None

    # -- by the thread that calls, under the lock

    @property
    def is_voting(self) -> bool:
        """Whether a vote is under way, or what was held because of it is still to be said."""
        return self._held is not None

    def begin(self) -> bool:
        """A vote is under way from now on, if the others are ready for one; `vote` must follow."""
        if self._board.open_round == 0 or self._board.is_paused:
            return False
        self._held = []
        return True

    def hold(self, say: Callable[[], None]) -> bool:
        """Have it called after the vote that is under way, under the lock; False if there is none."""
        if self._held is None:
            return False
        self._held.append(say)
        return True

    # -- by the executor

    def vote(self, call: bytes, ask: Ask) -> bool:
        """Vote for a call in the open round; whether all ranks make it now. ``ask`` is what rank 0 notes of it."""
        board = self._board
        number = board.open_round
        if board.is_paused or self._is_over():
            return False
        board.vote(number, hashlib.blake2b(call, digest_size=DIGEST_BYTES).digest())
        if not self._is_decided_within(number, ask, PATIENCE_S):
            self._close_round(number)
            while not (self._is_over() or self._is_decided_within(number, ask, _LOOK_S)):
                pass
        # Read after rank 0 was heard to end, if it was: what it has decided before stands.
        return bool(board.outcome(number))

    def say_held(self) -> bool:
        """The vote is over: say what was to come after it; whether there was anything."""
        # Under the lock: nothing is said before what was held, and no thread that goes on calling keeps this one.
        with self._lock:
            held, self._held = self._held, None
            for say in held or ():
                say()
        return bool(held)

    def _is_decided_within(self, number: int, ask: Ask, timeout_s: float) -> bool:
        board = self._board
        if self._decide_round is None:
            return board.wait(lambda: board.outcome(number) is not None, timeout_s)
        board.wait(lambda: board.have_all_voted(number) or board.outcome(number) is not None, timeout_s)
        if board.outcome(number) is None and board.have_all_voted(number):
            self._decide_round(number, ask)
        return board.outcome(number) is not None
