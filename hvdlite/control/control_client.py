"""
The controller of one rank among several: an operation runs once all its ranks have submitted it, in rank 0's order.

    submit, join ── Submitter, Joins ── Rank0Connection ──► coordinator ──► go: the executor runs it ── the handle
                                                                        └─► no: the handle's error

Rank 0 sends its go messages to all ranks in the same order, so the collectives on one engine pair up. `connect` makes
the client. This module connects its parts, and dispatches rank 0's messages, which are listed in `coordinator`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from .. import forks
from ..calls.call_sites import places_of_threads
from ..calls.controller import SitOut, StandIn
from ..calls.frames import FrameError
from ..calls.generation import Generation
from ..calls.handle import Handle
from ..calls.mailbox import Mailbox
from ..calls.messages import (
    AllJoined,
    AskLine,
    EndProcess,
    FromRank0,
    Go,
    GoAsStandIn,
    HasJoined,
    JoinFailed,
    No,
    Paces,
    Pin,
    Pinned,
    ProgramLine,
    SitOutSteps,
    StillHere,
    ToRank0,
    Unpin,
    WaitsIn,
    Welcome,
)
from ..calls.operation import OPTIMIZER, Execution, Operation, kind_named
from ..calls.stragglers import RankPace
from ..comm.group import Group
from ..coordinator.coordinator import Coordinator
from ..errors import CommunicationError, HvdliteError, MismatchError, PeerLostError
from ..shm.board import HasBoard
from .callers import Callers
from .executor import Agreed, Executor
from .heartbeat import WaitReports
from .joins import Joins
from .pace_reports import PaceReports
from .rank0_connection import Rank0Connection
from .requests import Requests
from .submission import Submitter

_ERRORS: dict[str, type[HvdliteError]] = {
    error.__name__: error for error in (MismatchError, CommunicationError, PeerLostError)
}


class ControlClient:
    """Submits operations to rank 0, and runs those that all ranks have submitted on a thread of its own."""

    def __init__(
        self,
        mailbox: Mailbox[ToRank0, FromRank0],
        group: Group,
        generation: Generation,
        coordinator: Coordinator | None,
        welcome: Welcome,
        *,
        measures_steps: bool = True,
    ) -> None:
        """``mailbox`` leads to the coordinator, whose ``welcome`` has been read; ``group`` has all ranks.

        ``coordinator`` is the one in this process, on rank 0 only; `close` closes it too. ``measures_steps`` is whether
        the clock of this rank's steps runs.
        """
        self._coordinator = coordinator
        watch, recorder = generation.watch, generation.recorder
        self._reducers = generation.reducers
        # Guards the requests, the way in which each is sent, the join, and the end of the connection.
        self._lock = lock = threading.Lock()
        # By process set: its group, and a duplicate of it on a separate engine that only operations use.
        self._groups: dict[int, Group] = {}
        self._operation_groups: dict[int, Group] = {}
        # The thread that called hvd.init() has begun collectives, but need not be one that trains.
        watch.beginners.clear()
        self._callers = Callers(
            lambda ticket: self._connection.say(WaitsIn(ticket, watch.begun.copy())), watch.beginners
        )
        self._executor = Executor(recorder)
        self._requests = Requests(lock, group.describe_rank)
        self._joins = Joins(generation.reducers, self._groups, self._executor, lock)
        self._reports = WaitReports(
            mailbox, group, watch, self._executor, self._callers, self._requests, self._joins, welcome
        )
        self._connection = Rank0Connection(
            mailbox, group, watch, self._executor, self._reports, lock, take=self._take, fail_all=self._fail_all
        )
        self._submitter = Submitter(
            self._connection,
            self._requests,
            self._joins,
            self._callers,
            self._executor,
            self._operation_groups,
            recorder,
            watch.clock,
            lock,
        )
        self._paces = PaceReports(watch.clock, group.size, self._connection.send)
        self._measures_steps = measures_steps

    def start(self, early: Iterable[FromRank0] = ()) -> None:
        """Starts the threads; ``early`` are the messages that rank 0 sent right after its welcome."""
        self._connection.start(early)
        if self._measures_steps:
            self._paces.start()

    def open_group(self, group: Group) -> None:
        operation_group = group.duplicate()
        self._groups[group.set_id], self._operation_groups[group.set_id] = group, operation_group
        if group.set_id == 0 and isinstance(operation_group.engine, HasBoard):
            coordinator, board = self._coordinator, operation_group.engine.board
            self._submitter.open_board(board, None if coordinator is None else coordinator.decide_round)
            if coordinator is not None:
                coordinator.open_board(board)

    def close_group(self, group: Group) -> None:
        del self._groups[group.set_id]
        self._operation_groups.pop(group.set_id).close()

    def submit(self, group: Group, operation: Operation) -> Handle:
        if forks.parent is not None:
            raise forks.refusal(operation.describe())
        if operation.kind != OPTIMIZER:
            # A joining rank waits until these optimizers are open, and this operation may wait for that rank.
            self._reducers.open_all()
        return self._submitter.submit(group, operation)

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        forks.require_rank("hvd.join()")
        # The other ranks rely on it that a rank that has joined has opened all its optimizers.
        for opening in self._reducers.open_all():
            opening.wait()
        handle = Handle("join")
        living = self._joins.begin(handle, stand_in, sit_out)
        self._submitter.say_in_order(HasJoined(average_of_active, living))
        return handle

    def waits(self) -> list[tuple[str, float]]:
        return self._reports.waits()

    def revoke(self, reason: str) -> None:
        self._connection.revoke(reason)

    def stragglers(self) -> tuple[RankPace, ...]:
        return self._paces.paces

    def close(self) -> None:
        self._paces.close()
        self._connection.close()
        if self._coordinator is not None:
            self._coordinator.close(has_lost_rank=self._connection.has_lost_rank)

    # -- on the listening thread

    def _take(self, message: FromRank0) -> None:
        match message:
            case StillHere(missing):
                self._requests.note_missing(missing)
            case Go(ticket, owns, divisor):
                self._begin(ticket, owns, divisor)
            case GoAsStandIn(set_id, owns, divisor, kind, what, same):
                self._joins.stand_in(
                    Execution(self._operation_groups[set_id], what, owns, divisor), kind_named(kind), same
                )
            case No(ticket, error, words):
                self._requests.fail(ticket, _ERRORS[error](words))
            case AskLine():
                self._connection.send(ProgramLine(places_of_threads(self._callers.threads())))
            case Paces(paces):
                self._paces.paces = paces
            case EndProcess(words):
                self._reports.end_process(words)
            case _:
                self._take_of_join(message)

    def _take_of_join(self, message: FromRank0) -> None:
        match message:
            case Pin(join, set_id):
                self._connection.send(Pinned(join, set_id, self._joins.pin(set_id)))
            case Unpin():
                self._joins.unpin()
            case SitOutSteps(set_id, numbers):
                self._joins.sit_out(set_id, numbers)
            case AllJoined(last_rank):
                self._end_join(lambda handle: handle.succeed(last_rank))
            case JoinFailed(error, words):
                self._end_join(lambda handle: handle.fail(_ERRORS[error](words)))
            case _:
                raise FrameError(f"{str(message)[:200]} is not a message that rank 0 sends now")

    def _begin(self, ticket: int, owns: list[bool], divisor: int) -> None:
        # Under one lock, so that no thread sees the operation neither in the requests nor in the queue.
        with self._lock:
            request = self._requests.take_answered(ticket)
            if request is not None:
                execution = Execution(self._operation_groups[request.group.set_id], request.handle.what, owns, divisor)
                self._executor.put(Agreed(request.handle, request.run, execution, request.since_ns))

    def _end_join(self, finish: Callable[[Handle], None]) -> None:
        handle = self._joins.end()
        if handle is not None:
            # On the executor, so after the operations in which this rank is a stand-in.
            self._executor.put_call(partial(finish, handle))

    # -- on any thread

    def _fail_all(self) -> None:
        """Fails all requests and the join with the error of the connection's end."""
        self._joins.fail(self._connection.error_of_end)
        self._requests.fail_all(self._connection.error_of_end)
