"""
`Requests`: the operations that this rank has requested and rank 0 has not answered, and how each is requested.

    submit ── may it be voted on? ── the executor votes ── go: run there, at once
                   └─ no ──────────────── no go ────────── a message ── begin, refuse: rank 0 has answered
                                                                     └─ fail_all: the connection to rank 0 has ended
    call_directly ── the calling thread votes, with its data ── go: the result
                                                             └─ not at once: the executor goes on, as above

`voting` explains how a vote is decided, and why both ways lead to one order of operations. A ticket is the number of
the operation's handle; rank 0's answers carry it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ..calls.handle import Handle
from ..calls.messages import CallingThread, MissingRanks, OperationRequest, ToRank0
from ..calls.operation import DirectCall, Operation
from ..comm.group import Group
from ..comm.recorder import OPERATIONS
from ..errors import CommunicationError, describe_interrupt, list_names
from ..shm.board import Board, VoteData
from .callers import Callers, ThreadLabels
from .executor import Executor, Name, Request
from .joins import Joins
from .rank0_connection import Rank0Connection
from .voting import MOST_BYTES, DirectVote, Voter


class Requests:
    """Requests operations in the order in which the threads of this rank call them."""

    def __init__(
        self,
        connection: Rank0Connection,
        executor: Executor,
        callers: Callers,
        joins: Joins,
        operation_groups: Mapping[int, Group],
    ) -> None:
        self._connection = connection
        self._executor = executor
        self._callers = callers
        self._joins = joins
        self._operation_groups = operation_groups
        self._lock = connection.lock  # guards the tables, and the choice of how a call is requested
        self._labels = ThreadLabels()
        self._voter: Voter | None = None  # None unless all ranks share memory
        self._by_ticket: dict[int, Request] = {}
        self._names: set[Name | None] = set()
        self._failed: set[int] = set()  # the tickets of those that failed with no answer
        # By ticket: the ranks that had not requested it, as of rank 0's last report.
        self._missing: dict[int, str] = {}
        # Its go may be on the board although the connection to rank 0 has ended.
        self._voted_ticket: int | None = None
        # The call that a thread of the program votes on, until it ends.
        self._direct: DirectVote | None = None

    def __len__(self) -> int:
        return len(self._by_ticket)

    def open_board(self, board: Board, decide_round: Callable[[int, OperationRequest | None], None] | None) -> None:
        """Begins to use votes on this board, for calls that all ranks make at the same time."""
        self._voter = Voter(board, self._connection, decide_round)

    # -- on the calling thread

    def submit(self, group: Group, operation: Operation) -> Handle:
        if group.size == 1:
            handle = Handle(operation.describe())
            Request(handle, operation.run, group).carry_out([operation.own], 1, self._executor.recorder)
            return handle
        return self._submit(group, operation, self._caller(group.set_id, operation))

    def call_directly(self, group: Group, call: DirectCall) -> Any:
        """Votes for the call on this thread, with its data; without a go it becomes the operation that it is."""
        caller = self._labels.of_call((group.set_id, call.kind.name, None)) if call.name is None else None
        agreed = call.agreed + repr((call.name, caller and caller.name)).encode()
        direct, voter = DirectVote(group, call, caller, agreed), self._voter
        assert voter is not None, "the caller has asked `can_vote`"
        try:
            if self._begin_direct(direct) and (data := self._vote_directly(direct)) is not None:
                try:
                    result = self._result(direct, data)
                finally:
                    with self._lock:
                        is_own = direct.handle is None and not voter.holds
                        if is_own:
                            self._end_direct(direct)
                if is_own:
                    return result
            with self._lock:
                self._hand_over(direct)
        except BaseException as error:
            with self._lock:
                self._hand_over(direct)
            if isinstance(error, KeyboardInterrupt):
                describe_interrupt(error, call.describe(), "")
            raise
        handle = direct.handle
        return (self._submit(group, call.operation(), caller) if handle is None else handle).wait()

    def _begin_direct(self, direct: DirectVote) -> bool:
        voter, name = self._voter, direct.name
        assert voter is not None, "the caller has asked `can_vote`"
        with self._lock:
            self._callers.called()
            if len(direct.agreed) > MOST_BYTES or not self._may_vote(0):
                return False
            # First: a thread that is interrupted leaves this behind.
            self._direct = direct
            if not voter.begin():
                self._direct = None
                return False
            if name is not None:
                direct.has_name = True
                self._names.add(name)
            # Under the lock: whoever goes on with the vote finds it cast, and this thread never casts it later.
            voter.cast(direct)
            return True

    def _vote_directly(self, direct: DirectVote) -> VoteData | None:
        voter, clock = self._voter, self._connection.watch.clock
        assert voter is not None, "a vote has begun"
        is_timed = clock.begin_wait()
        try:
            return voter.data_soon(direct)
        finally:
            if is_timed:
                clock.end_wait()

    def _result(self, direct: DirectVote, data: VoteData) -> Any:
        call, recorder = direct.call, self._executor.recorder
        if not recorder.is_on:
            return call.result(data)
        recorder.note_waiting(call.describe(), direct.since_ns, time.monotonic_ns())
        with recorder.span(OPERATIONS, call.describe()):
            return call.result(data)

    def _hand_over(self, direct: DirectVote) -> None:
        """Has the executor go on with a direct call, as a request, unless it has ended. Under the lock."""
        voter = self._voter
        if self._direct is not direct or voter is None or direct.is_handed_over:
            return
        if not voter.is_voting:
            # Interrupted as it began, or as it ended.
            self._end_direct(direct)
        elif self._connection.end_reason is not None:
            # The executor may have ended.
            direct.handle = Handle(direct.call.describe())
            direct.handle.fail(self._connection.error_of_end(direct.call.describe()))
            self._end_direct(direct)
        else:
            # In this order: the thread may have been interrupted here before.
            if direct.operation is None:
                direct.operation = direct.call.operation()
            handle = direct.handle
            if handle is None:
                handle = direct.handle = Handle(direct.call.describe())
            if int(handle) not in self._by_ticket:
                self._names.discard(direct.name)
                self._add(handle, direct.group.set_id, direct.operation, direct.since_ns)
            self._voted_ticket = int(handle)
            self._executor.put_call(partial(self._finish_direct, direct))
            direct.is_handed_over = True

    def _end_direct(self, direct: DirectVote) -> None:
        """Ends a direct vote behind which nothing is held. Under the lock."""
        # In this order: a thread that is interrupted here leaves a vote that has ended, which `_may_vote` removes.
        if direct.has_name:
            self._names.discard(direct.name)
        if self._voter is not None:
            self._voter.end()
        self._direct = None

    def say_in_order(self, message: ToRank0) -> None:
        """Sends a message that requests no operation, after everything that was submitted before."""
        with self._lock:
            is_held = self._is_held(partial(self._connection.send, message))
        if not is_held and not self._connection.say(message):
            self.fail_all()

    @property
    def can_vote(self) -> bool:
        return self._voter is not None

    def _caller(self, set_id: int, operation: Operation) -> CallingThread | None:
        """The calling thread, for an operation without a user's name."""
        name = operation.name
        if name is not None and operation.has_users_name:
            return None
        return self._labels.of_call((set_id, operation.kind.name, name))

    def _submit(self, group: Group, operation: Operation, caller: CallingThread | None) -> Handle:
        handle = Handle(operation.describe())
        ask = _ask_for(handle, group, operation, caller)
        with self._lock:
            self._add(handle, group.set_id, operation)
            self._callers.called()
            call = self._begin_vote(ask)
            if call is not None:
                self._voted_ticket = ask.ticket
                self._executor.put_call(partial(self._vote, operation, group, ask, call))
            is_taken_care_of = call is not None or self._is_held(partial(self._ask_held, ask))
        if not is_taken_care_of:
            self._ask(ask)
        return handle

    def _add(self, handle: Handle, set_id: int, operation: Operation, since_ns: int | None = None) -> None:
        """Adds a request, under the lock; raises a ValueError if its name is in use."""
        name = None if operation.name is None else (set_id, operation.kind.name, operation.name)
        if name in self._names:
            # Horovod's words.
            raise ValueError(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                "that is currently being processed.  If you want to request another tensor, use a different "
                f"tensor name. ({handle.what})"
            )
        since_ns = time.monotonic_ns() if since_ns is None else since_ns
        request = Request(handle, operation.run, self._operation_groups[set_id], name, since_ns)
        ticket = int(handle)
        handle.while_waiting = partial(self._callers.blocked_in, ticket)
        handle.timed = self._connection.watch.clock.waiting
        handle.waits_for = partial(self._waits_for, ticket)
        if name is not None:
            self._names.add(name)
        self._by_ticket[ticket] = request

    def _is_held(self, say: Callable[[], None]) -> bool:
        """Has ``say`` called when the vote in progress has ended, if there is one. Under the lock."""
        # After the connection's end nothing ends the vote.
        is_held = self._voter is not None and self._connection.end_reason is None and self._voter.hold(say)
        if is_held and self._direct is not None:
            # Its thread may be the one that calls, from a signal handler, or wait for it there.
            self._hand_over(self._direct)
        return is_held

    def _may_vote(self, in_progress: int) -> bool:
        """Whether no more requests than these are in progress, nothing that runs, and no join. Under the lock."""
        if self._direct is not None and self._voter is not None and not self._voter.is_voting:
            # Its thread was interrupted as it began, or as it ended, and has not the lock yet.
            self._end_direct(self._direct)
        return (
            self._voter is not None
            and not self._voter.is_voting
            and len(self._by_ticket) == in_progress
            and not self._joins.is_joining
            and self._executor.is_idle
            and self._connection.end_reason is None
        )

    def _begin_vote(self, ask: OperationRequest) -> bytes | None:
        """Begins a vote, and returns what is voted on; None if more than the call just noted is in progress."""
        voter = self._voter
        if voter is None or ask.set_id != 0 or not self._may_vote(1):
            return None
        # All values are of JSON's types, which `repr` distinguishes as JSON does, in half the time.
        thread = ask.caller and ask.caller.name
        call = repr((ask.set_id, ask.kind, ask.name, ask.what, ask.same, ask.own, thread)).encode()
        return call if len(call) <= MOST_BYTES and voter.begin() else None

    def _ask(self, ask: OperationRequest) -> None:
        """Requests an operation by a message; fails it if it was added after the connection's end."""
        try:
            is_open = self._connection.say(ask)
        except ValueError as error:
            with self._lock:
                self._fail_unsent(ask, error)
        else:
            if not is_open:
                self.fail_all()

    def _ask_held(self, ask: OperationRequest) -> None:
        """Sends a request that was held during a vote, under the lock; `_vote` fails it if the connection has ended."""
        try:
            self._connection.send(ask)
        except ValueError as error:
            self._fail_unsent(ask, error)

    def _fail_unsent(self, ask: OperationRequest, error: ValueError) -> None:
        if ask.ticket in self._by_ticket:
            words = f"{ask.what} cannot be sent to rank 0: {error}"
            self._take(ask.ticket).handle.fail(CommunicationError(words))

    # -- on the executor's thread

    def _vote(self, operation: Operation, group: Group, ask: OperationRequest, call: bytes) -> None:
        """Votes; runs the operation if all ranks vote for it now, else requests it by a message."""
        assert self._voter is not None, "a vote has begun"
        request = self._end_vote(ask, is_go=self._voter.vote(call, ask))
        if request is not None:
            self._executor.carry_out(request, [operation.own] * group.size, group.size)

    def _finish_direct(self, direct: DirectVote) -> None:
        """Waits for the decision on a direct call that was handed over, and ends it as `_vote` does."""
        voter, handle, operation = self._voter, direct.handle, direct.operation
        if self._direct is not direct or voter is None or handle is None or operation is None:
            return
        ask = _ask_for(handle, direct.group, operation, direct.caller)
        data = voter.data_of_go(direct)
        request = self._end_vote(ask, is_go=data is not None, direct=direct)
        if request is not None and data is not None:
            make, executor = partial(direct.call.result_elsewhere, data), self._executor
            request.end_with(make, executor.recorder, executor.note_result)

    def _end_vote(self, ask: OperationRequest, *, is_go: bool, direct: DirectVote | None = None) -> Request | None:
        """Ends the vote for ``ask``: returns the request if it is a go, else sends it, before those held behind it."""
        assert self._voter is not None, "a vote has begun"
        with self._lock:
            self._voted_ticket = None
            if direct is not None:
                self._direct = None
            request = self._take(ask.ticket) if is_go else None
            if is_go and direct is None:
                self._executor.begun += 1
            elif is_go:
                self._executor.is_making_result = True
        if not is_go:
            self._ask(ask)
        if self._voter.say_held() or request is None:
            # Rank 0 ignored reports of threads blocked in requests that it receives only now.
            self._callers.report_again()
            if self._connection.end_reason is not None:
                self.fail_all()
        return request

    # -- on the listening thread

    def begin(self, ticket: int, owns: list[Any], divisor: int) -> None:
        # Under one lock, so that no thread sees the operation neither in the requests nor in the queue.
        with self._lock:
            request = self._take_answered(ticket)
            if request is not None:
                self._executor.put(request, owns, divisor)

    def refuse(self, ticket: int, error: BaseException) -> None:
        with self._lock:
            request = self._take_answered(ticket)
        if request is not None:
            request.handle.fail(error)

    def note_missing(self, missing: Iterable[MissingRanks]) -> None:
        """Replaces what is known of ranks that have not requested an operation."""
        describe_rank = self._connection.group.describe_rank
        self._missing = {
            each.ticket: list_names([describe_rank(rank) for rank in each.ranks], each.count) for each in missing
        }

    def _take_answered(self, ticket: int) -> Request | None:
        """`_take`; None if the request has failed before: rank 0 may still answer a rank that has been revoked."""
        return None if ticket in self._failed else self._take(ticket)

    def _take(self, ticket: int) -> Request:
        """Removes and returns a request, under the lock; its name may be used again."""
        request = self._by_ticket.pop(ticket)
        if request.name is not None:
            self._names.discard(request.name)
        return request

    # -- on any thread

    def fail_all(self) -> None:
        """Fails the join and all requests, since no answer will arrive; the executor fails the one that is voted on."""
        error_of = self._connection.error_of_end
        self._joins.fail(error_of)
        with self._lock:
            tickets = [ticket for ticket in self._by_ticket if ticket != self._voted_ticket]
            failed = [self._take(ticket) for ticket in tickets]
            self._failed.update(tickets)
        for request in failed:
            request.handle.fail(error_of(request.handle.what))

    def _waits_for(self, ticket: int) -> str:
        """The ranks that have not requested it, in words; empty if unknown, or if all have. Takes no lock."""
        return self._missing.get(ticket, "") if ticket in self._by_ticket else ""

    def whats(self) -> dict[int, str]:
        with self._lock:
            return {ticket: request.handle.what for ticket, request in self._by_ticket.items()}


def _ask_for(handle: Handle, group: Group, operation: Operation, caller: CallingThread | None) -> OperationRequest:
    members, kind = group.ranks if group.set_id else (), operation.kind.name
    said = (operation.name, handle.what, members, operation.same, operation.own)
    return OperationRequest(int(handle), group.set_id, kind, *said, caller)
