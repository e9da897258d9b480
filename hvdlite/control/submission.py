"""
Submits operations: by a vote if all ranks share memory and this one has nothing else in progress, else by a message.

    submit ── may it be voted on? ── the executor votes ── go: run there, at once
                   └─ no ──────────────── no go ────────── requested by a message, which rank 0 answers

`control_client` calls it. `voting` explains how a vote is decided, and why both ways lead to one order of operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from ..calls.handle import Handle
from ..calls.messages import CloseRound, OperationRequest, ToRank0
from ..calls.operation import Execution, Operation
from ..calls.thread_labels import ThreadLabels
from ..comm.group import Group
from ..comm.recorder import Recorder
from ..comm.step_clock import StepClock
from ..coordinator.pending import RankRequest
from ..errors import CommunicationError
from ..shm.board import Board
from .callers import Callers
from .executor import Agreed, Executor
from .joins import Joins
from .rank0_connection import Rank0Connection
from .requests import Requests
from .voting import MOST_BYTES, Voter


class Submitter:
    """Requests operations in the order in which the threads of this rank call them."""

    def __init__(
        self,
        connection: Rank0Connection,
        requests: Requests,
        joins: Joins,
        callers: Callers,
        executor: Executor,
        operation_groups: Mapping[int, Group],
        recorder: Recorder,
        clock: StepClock,
        lock: threading.Lock,
    ) -> None:
        """``operation_groups`` is the live table of the groups that run operations, by process set.

        ``lock`` guards the choice of how a call is requested.
        """
        self._connection = connection
        self._requests = requests
        self._joins = joins
        self._callers = callers
        self._executor = executor
        self._operation_groups = operation_groups
        self._recorder = recorder
        self._clock = clock
        self._lock = lock
        self._labels = ThreadLabels()
        # None unless all ranks share memory.
        self._voter: Voter | None = None

    def open_board(self, board: Board, decide_round: Callable[[int, RankRequest], None] | None) -> None:
        """Begins to use votes on this board, for calls that all ranks make at the same time.

        ``decide_round`` exists on rank 0 only.
        """
        self._voter = Voter(
            board,
            self._lock,
            close_round=lambda number: self._connection.say(CloseRound(number)),
            decide_round=decide_round,
            is_over=lambda: self._connection.end_reason is not None,
        )

    # -- on the calling thread

    def submit(self, group: Group, operation: Operation) -> Handle:
        what = operation.describe()
        handle = Handle(what)
        if group.size == 1:
            Agreed(handle, operation.run, Execution(group, what, [operation.own], 1)).carry_out(self._recorder)
            return handle
        kind, name = operation.kind.name, operation.name
        caller = None
        if name is None or not operation.has_users_name:
            caller = self._labels.of_call((group.set_id, kind, name))
        members = None if group.set_id == 0 else tuple(group.ranks)
        same = operation.same
        ask = OperationRequest(int(handle), group.set_id, kind, name, what, members, same, operation.own, caller)
        with self._lock:
            self._requests.add(handle, group, operation)
            handle.while_waiting = partial(self._callers.blocked_in, int(handle))
            handle.timed = self._clock.waiting
            handle.waits_for = partial(self._requests.waits_for, int(handle))
            self._callers.called()
            call = self._begin_vote(ask)
            if call is not None:
                self._requests.voted_ticket = int(handle)
                self._executor.put_call(partial(self._vote, handle, operation, group, ask, call))
            is_taken_care_of = call is not None or self._is_held(partial(self._ask_held, handle, ask))
        if not is_taken_care_of:
            self._ask(handle, ask)
        return handle

    def say_in_order(self, message: ToRank0) -> None:
        """Sends a message that requests no operation, after everything that was submitted before."""
        with self._lock:
            is_held = self._is_held(partial(self._connection.send, message))
        if not is_held:
            self._connection.say(message)

    def _is_held(self, say: Callable[[], None]) -> bool:
        return self._voter is not None and self._voter.hold(say)

    def _begin_vote(self, ask: OperationRequest) -> bytes | None:
        """Begins a vote, and returns what is voted on; None if more than the call just noted is in progress."""
        voter = self._voter
        if not (
            voter is not None
            and ask.set_id == 0
            and not voter.is_voting
            and len(self._requests) == 1
            and not self._joins.is_joining
            and self._executor.is_idle
            and self._connection.is_open
        ):
            return None
        # All values are of JSON's types, which `repr` distinguishes as JSON does, in half the time.
        thread = ask.caller and ask.caller.name
        call = repr((ask.set_id, ask.kind, ask.name, ask.what, ask.same, ask.own, thread)).encode()
        return call if len(call) <= MOST_BYTES and voter.begin() else None

    def _ask(self, handle: Handle, ask: OperationRequest) -> None:
        try:
            self._connection.say(ask)
        except ValueError as error:
            with self._lock:
                self._fail(handle, error)

    def _ask_held(self, handle: Handle, ask: OperationRequest) -> None:
        """Sends a request that was held during a vote, under the lock; `_vote` fails it if the connection has ended."""
        try:
            self._connection.send(ask)
        except ValueError as error:
            self._fail(handle, error)

    def _fail(self, handle: Handle, error: ValueError) -> None:
        if int(handle) in self._requests:
            self._requests.take(int(handle))
        handle.fail(CommunicationError(f"{handle.what} cannot be sent to rank 0: {error}"))

    # -- on the executor's thread

    def _vote(self, handle: Handle, operation: Operation, group: Group, ask: OperationRequest, call: bytes) -> None:
        """Votes; runs the operation if all ranks vote for it now, else requests it by a message."""
        assert self._voter is not None, "a vote has begun"
        ticket, set_id = int(handle), group.set_id
        noted = RankRequest(ticket, set_id, operation.kind, operation.name, handle.what, group.ranks, {}, None)
        is_go = self._voter.vote(call, noted)
        with self._lock:
            self._requests.voted_ticket = None
            request = self._requests.take(ticket) if is_go else None
            self._executor.begun += is_go
        if not is_go:
            self._ask(handle, ask)
        if self._voter.say_held() or request is None:
            # Rank 0 ignored reports of threads blocked in requests that it receives only now.
            self._callers.report_again()
            self._connection.fail_if_ended()
        if request is not None:
            execution = Execution(self._operation_groups[set_id], handle.what, [operation.own] * group.size, group.size)
            self._executor.carry_out(Agreed(handle, request.run, execution, request.since_ns))
