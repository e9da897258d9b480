"""
Agrees on a call by a vote in shared memory, if all ranks are on one host: faster than messages through rank 0.

    submit ── may it be voted on? ── vote(digest of the call) ── rank 0's process decides ── go: run at once
                   └─ no ────────────── closed, or votes differ ──────────────────────────── requested by a message

A vote is a shortcut to the result of a request and its go. A call that it does not settle is requested by a message, as
if there were no vote. All errors, joins, stalls and ends are handled by messages.

**When a rank votes.** A rank votes if it has nothing else in progress: no unanswered request, no operation to run, no
join. Its threads' calls until the decision are held, and sent after it in the order of the calls. So a rank's calls
reach the other ranks in their order, by either path.

**Who decides.** Only rank 0's process decides, under one lock, once per round. The thread that votes there decides when
all ranks have voted: a go if all digests are equal and the negotiation has nothing unsettled (an operation pending or
refused, a rank joined or ended). Its coordinator closes the open round as soon as something is unsettled, or when a
rank reports that it has waited long enough. A rank never changes its vote, so all ranks see the same outcome.

**Why the order of operations is the same on all ranks.** A rank starts nothing else until it has run the voted call,
and at a go every rank has voted. So no operation can be before it on one rank and after it on another. Operations that
messages start later are queued later in each executor.

**Why no rank waits for ever.** If there is no decision within `PATIENCE_S`, a rank asks the coordinator to close the
round, which always answers. If rank 0's process has ended, its earlier decision is valid; without one, the request
fails. Ranks wait at most `PATIENCE_S` for a rank that does not vote, and a late rank finds the round closed.

**Why errors are the same.** A digest covers everything that ranks compare: kind, name, the values that must be equal,
each rank's own values, and the thread's name if the user gave no name for the call. If these differ, the negotiation
gets the requests, and finds the difference.

**Direct calls.** The thread of a call that waits for at most `PAYLOAD_BYTES` votes itself, and writes its data before
its vote. At a go all data are there, so nothing else can fail or wait. The rank counts as voting until it has read
them. The thread has the vote to itself for at most `PATIENCE_S`. If that is over, if another call is held behind the
vote, or if the thread is interrupted, the executor goes on with it: nothing depends on when, or whether, the thread
comes back. So a signal handler may call hvdlite in the middle of a vote, but for the few microseconds in which the
thread has a lock.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..calls.handle import Handle
from ..calls.messages import CallingThread, CloseRound, OperationRequest
from ..calls.operation import DirectCall, Operation
from ..comm.group import Group
from ..shm.board import DIGEST_BYTES, Board, VoteData
from .executor import Name
from .rank0_connection import Rank0Connection

MOST_BYTES = 1 << 16
"""Most bytes of a call that is voted on; longer calls are sent as messages, which have their own limit."""

# How long a vote waits for the other ranks, and then how often it checks whether the connection has ended.
PATIENCE_S = 0.01
_LOOK_S = 0.1

# A vote with data never equals one without: after a go all ranks use the data, or all use the engine.
_WITH_DATA = b"with data"


@dataclass(slots=True, eq=False)
class DirectVote:
    """A direct call in its vote, on ``agreed``, with this rank's data.

    ``number`` is the round in which it is cast. ``may_wait``: it is cast, and has not waited for `PATIENCE_S`.
    ``operation`` and ``handle`` are there once the executor goes on with it.
    """

    group: Group
    call: DirectCall
    caller: CallingThread | None
    agreed: bytes
    number: int = 0
    data: VoteData | None = None
    may_wait: bool = False
    since_ns: int = field(default_factory=time.monotonic_ns)
    operation: Operation | None = None
    handle: Handle | None = None
    is_handed_over: bool = False
    has_name: bool = False

    @property
    def name(self) -> Name | None:
        return None if self.call.name is None else (self.group.set_id, self.call.kind.name, self.call.name)


class Voter:
    """Casts one rank's votes, and holds the messages that it would send during a vote."""

    def __init__(
        self,
        board: Board,
        connection: Rank0Connection,
        decide_round: Callable[[int, OperationRequest | None], None] | None,
    ) -> None:
        """``decide_round`` exists on rank 0 only, and is called when all have voted."""
        self._board = board
        self._connection = connection
        self._decide_round = decide_round
        # Functions that send the held messages; None if no vote is in progress.
        self._held: list[Callable[[], None]] | None = None

    # -- on the calling thread, under the lock

    @property
    def is_voting(self) -> bool:
        """Whether a vote is in progress, or its held messages are not sent yet."""
        return self._held is not None

    def begin(self) -> bool:
        """Begins a vote, which `vote` must follow; returns False if rank 0 has opened no round, or has paused votes."""
        if self._board.open_round == 0 or self._board.is_paused:
            return False
        self._held = []
        return True

    def hold(self, say: Callable[[], None]) -> bool:
        """Has ``say`` called, under the lock, when the current vote has ended; returns False if there is none."""
        if self._held is None:
            return False
        self._held.append(say)
        return True

    # -- on the executor's thread, or that of a direct call

    def vote(self, call: bytes, ask: OperationRequest) -> bool:
        """Votes for a call, which rank 0 records as ``ask``; returns whether all ranks make it now. Blocks."""
        number = self._open_round()
        if number == 0:
            return False
        self._board.vote(number, hashlib.blake2b(call, digest_size=DIGEST_BYTES).digest())
        return self._is_go(number, ask, PATIENCE_S)

    def cast(self, vote: DirectVote) -> None:
        """Votes for a call in the open round, together with this rank's data. It does not block."""
        vote.number = self._open_round()
        if vote.number:
            vote.data = self._board.data
            if (tensor := vote.call.tensor) is not None:
                vote.data.write(tensor.data_ptr(), tensor.nbytes)
            digest = hashlib.blake2b(vote.agreed, digest_size=DIGEST_BYTES, person=_WITH_DATA).digest()
            self._board.vote(vote.number, digest)
            vote.may_wait = True

    def data_soon(self, vote: DirectVote) -> VoteData | None:
        """Returns the data of all ranks, valid until the vote ends, if there is a go within `PATIENCE_S`; else None."""
        if vote.number == 0:
            return None
        vote.may_wait = self._is_decided_within(vote.number, None, PATIENCE_S)
        return vote.data if self._board.outcome(vote.number) else None

    def data_of_go(self, vote: DirectVote) -> VoteData | None:
        """Like `data_soon`, but blocks until the round is decided: rank 0 is asked to close it if that takes long."""
        patience_s = PATIENCE_S if vote.may_wait else 0.0
        return vote.data if vote.number and self._is_go(vote.number, None, patience_s) else None

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def end(self) -> None:
        """Ends the vote, behind which nothing is held. Under the lock."""
        self._held = None

    def say_held(self) -> bool:
        """Ends the vote, and sends the held messages; returns whether there were any."""
        # Under the lock, so that no message overtakes the held ones, and no calling thread can add more of them.
        with self._connection.lock:
            held, self._held = self._held, None
            for say in held or ():
                say()
        return bool(held)

    def _open_round(self) -> int:
        """The number of the open round; 0 if this rank must not vote."""
        number = self._board.open_round
        return 0 if self._board.is_paused or self._is_over else number

    @property
    def _is_over(self) -> bool:
        """Whether no request is possible any more."""
        return self._connection.end_reason is not None

    def _is_go(self, number: int, ask: OperationRequest | None, patience_s: float) -> bool:
        if not self._is_decided_within(number, ask, patience_s):
            self._connection.say(CloseRound(number))
            while not (self._is_over or self._is_decided_within(number, ask, _LOOK_S)):
                pass
        # Read after the check for rank 0's end: its earlier decision is valid.
        return bool(self._board.outcome(number))

    def _is_decided_within(self, number: int, ask: OperationRequest | None, timeout_s: float) -> bool:
        board = self._board
        if self._decide_round is None:
            return board.wait(lambda: board.outcome(number) is not None, timeout_s)
        board.wait(lambda: board.have_all_voted(number) or board.outcome(number) is not None, timeout_s)
        if board.outcome(number) is None and board.have_all_voted(number):
            self._decide_round(number, ask)
        return board.outcome(number) is not None
