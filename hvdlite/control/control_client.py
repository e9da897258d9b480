"""
The controller of one rank among several: an operation runs once all its ranks have submitted it, in rank 0's order.

    submit, join ── Requests, Joins ── Rank0Connection ──► coordinator ──► go: the executor runs it ── the handle
                                                                       └─► no: the handle's error

Rank 0 sends its go messages to all ranks in the same order, so the collectives on one engine pair up. `connect` makes
the client. This module makes its parts, each of which knows only those made before it, and passes rank 0's messages,
which `calls.messages` lists, to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import forks
from ..calls.call_sites import places_of_threads
from ..calls.controller import SitOut, StandIn
from ..calls.generation import Generation
from ..calls.handle import Handle
from ..calls.mailbox import FrameError, Mailbox
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
    Welcome,
)
from ..calls.operation import OPTIMIZER, DirectCall, Operation
from ..comm.group import Group
from ..comm.step_clock import RankPace
from ..errors import CommunicationError, HvdliteError, MismatchError, PeerLostError
from ..shm.board import HasBoard
from .callers import Callers
from .executor import Executor
from .heartbeat import WaitReports
from .joins import Joins
from .pace_reports import PaceReports
from .rank0_connection import LOOK_S, Rank0Connection
from .requests import Requests

if TYPE_CHECKING:
    from ..coordinator.coordinator import Coordinator

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
        self._measures_steps = measures_steps
        self._reducers = generation.reducers
        # By process set: its group, and a duplicate of it on a separate engine that only operations use.
        self._groups: dict[int, Group] = {}
        self._operation_groups: dict[int, Group] = {}
        self._connection = connection = Rank0Connection(mailbox, group, generation.watch)
        self._executor = executor = Executor(generation.recorder)
        self._callers = callers = Callers(connection)
        self._joins = joins = Joins(self._reducers, self._groups, executor, connection.lock)
        self._requests = requests = Requests(connection, executor, callers, joins, self._operation_groups)
        self._reports = WaitReports(connection, executor, callers, requests, joins, welcome)
        self._paces = PaceReports(connection)

    def start(self, early: Iterable[FromRank0] = ()) -> None:
        """Starts the threads; ``early`` are the messages that rank 0 sent right after its welcome."""
        self._executor.start()
        self._connection.start(early, self)
        if self._measures_steps:
            self._paces.start()

    def open_group(self, group: Group) -> None:
        operation_group = group.duplicate()
        self._groups[group.set_id], self._operation_groups[group.set_id] = group, operation_group
        if group.set_id == 0 and isinstance(operation_group.engine, HasBoard):
            coordinator, board = self._coordinator, operation_group.engine.board
            self._requests.open_board(board, None if coordinator is None else coordinator.decide_round)
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
        return self._requests.submit(group, operation)

    @property
    def calls_directly(self) -> bool:
        return self._requests.can_vote

    def call_directly(self, group: Group, call: DirectCall) -> Any:
        if forks.parent is not None:
            raise forks.refusal(call.describe())
        self._reducers.open_all()
        return self._requests.call_directly(group, call)

    def join(self, *, average_of_active: bool, stand_in: StandIn, sit_out: SitOut) -> Handle:
        forks.require_rank("hvd.join()")
        # The other ranks rely on it that a rank that has joined has opened all its optimizers.
        for opening in self._reducers.open_all():
            opening.wait()
        handle = Handle("join")
        living = self._joins.begin(handle, stand_in, sit_out)
        self._requests.say_in_order(HasJoined(average_of_active, living))
        return handle

    def waits(self) -> list[tuple[str, float]]:
        return self._reports.waits()

    def revoke(self, reason: str) -> None:
        self._connection.revoke(reason)
        self._requests.fail_all()

    def stragglers(self) -> tuple[RankPace, ...]:
        return self._paces.paces

    def close(self) -> None:
        self._paces.close()
        self._connection.close()
        # Not for long: it may be in an operation that another rank has abandoned.
        self._executor.wait_for_end(LOOK_S)
        if self._coordinator is not None:
            self._coordinator.close(has_lost_rank=self._connection.has_lost_rank)

    # -- on the listening thread, as its `Listener`

    def heard(self) -> None:
        self._reports.heard()

    def look(self, now_s: float) -> None:
        self._reports.look(now_s)

    def take(self, message: FromRank0) -> None:  # noqa: PLR0912  # a case for each message
        match message:
            case Go(ticket, owns, divisor):
                self._requests.begin(ticket, owns, divisor)
            case No(ticket, error, words):
                self._requests.refuse(ticket, _ERRORS[error](words))
            case StillHere(missing):
                self._requests.note_missing(missing)
            case AskLine():
                self._connection.send(ProgramLine(places_of_threads(self._callers.threads())))
            case Paces(paces):
                self._paces.paces = paces
            case EndProcess(words):
                self._reports.end_process(words)
            case GoAsStandIn():
                self._joins.stand_in(message, self._operation_groups[message.set_id])
            case Pin(join, set_id):
                self._connection.send(Pinned(join, set_id, self._joins.pin(set_id)))
            case Unpin():
                self._joins.unpin()
            case SitOutSteps(set_id, numbers):
                self._joins.sit_out(set_id, numbers)
            case AllJoined(last_rank):
                self._joins.end(lambda handle: handle.succeed(last_rank))
            case JoinFailed(error, words):
                self._joins.end(lambda handle: handle.fail(_ERRORS[error](words)))
            case _:
                raise FrameError(f"{str(message)[:200]} is not a message that rank 0 sends now")

    def ended(self, *, is_closing: bool) -> None:
        self._requests.fail_all()
        if is_closing:
            self._executor.give_up(self._connection.error_of_end)
        else:
            # The other ranks also run what has been agreed on.
            self._executor.finish()
