"""
Passes the messages of ranks to the negotiation, after checks that the types of their fields cannot make.

`coordinator` calls it. The connection authenticates the sender. The messages are checked nevertheless, so that a rank
with another version or with broken memory loses only its own connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdlite_wire.errors import MessageError

from ..calls.messages import (
    Busy,
    HasFailed,
    HasJoined,
    HasLostRank,
    Here,
    Leaving,
    OperationRequest,
    Pinned,
    ProgramLine,
    StillWaiting,
    ToRank0,
    WaitingThread,
    WaitsIn,
)
from ..calls.operation import kind_named
from .negotiation import Negotiation
from .pending import RankRequest
from .stall import BlockedThread


def handle_message(  # noqa: PLR0912  # a case for each message
    negotiation: Negotiation, rank: int, message: ToRank0, everybody: tuple[int, ...], now_s: float
) -> None:
    """Passes a message of ``rank`` to the negotiation; raises a MessageError, before any effect, if it is wrong."""
    match message:
        case OperationRequest():
            if negotiation.has_asked(rank, message.ticket):
                raise MessageError(f"it requests number {message.ticket} twice")
            members = _members(message.members, rank, message.set_id, everybody)
            kind, name, what = kind_named(message.kind), message.name, message.what
            own, caller = message.own, message.caller
            ask = RankRequest(message.ticket, message.set_id, kind, name, what, members, message.same, own, caller)
            negotiation.ask(rank, ask, now_s)
        case WaitsIn(ticket, begun):
            negotiation.wait(rank, ticket, begun)
        case HasJoined(average_of_active, living):
            known = [replace(each, members=_members(each.members, rank, each.set_id, everybody)) for each in living]
            negotiation.join(rank, average_of_active, now_s, known)
        case Pinned(join, set_id, numbers):
            negotiation.pinned(rank, join, set_id, numbers)
        case Busy(threads, is_stuck, begun):
            blocked = [_blocked(each, now_s, everybody) for each in threads]
            negotiation.busy(rank, blocked, is_stuck=is_stuck, begun=begun)
        case StillWaiting(over_count):
            negotiation.over(rank, over_count)
        case Here(pid):
            negotiation.introduce(rank, pid)
        case ProgramLine(line):
            negotiation.program_line(rank, line, now_s)
        case HasFailed(label, number, words):
            negotiation.failed(rank, label, number, words)
        case HasLostRank():
            negotiation.lost(rank)
        case Leaving():
            negotiation.end(rank, ended_normally=True, now_s=now_s)
        case _:
            raise MessageError(f"{str(message)[:200]} is not for the negotiation")


def _members(ranks: tuple[int, ...] | None, rank: int, set_id: int, everybody: tuple[int, ...]) -> tuple[int, ...]:
    if (ranks is None) != (set_id == 0):
        raise MessageError(f"process set {set_id} has invalid members, {str(ranks)[:200]}")
    if ranks is None:
        return everybody
    if rank not in ranks:
        raise MessageError(f"{str(ranks)[:200]} does not have rank {rank} among them")
    return _ranks(ranks, everybody)


def _ranks(ranks: Sequence[int], everybody: tuple[int, ...]) -> tuple[int, ...]:
    if not all(0 <= each < len(everybody) for each in ranks):
        raise MessageError(f"{str(ranks)[:200]} are not ranks of this job")
    return tuple(ranks)


def _blocked(thread: WaitingThread, now_s: float, everybody: tuple[int, ...]) -> BlockedThread:
    since_s = now_s - thread.waited_s
    if thread.collective is None:
        return BlockedThread(thread.what, since_s, thread.is_operation)
    if thread.is_operation:
        raise MessageError("an operation is no collective of its own group")
    label, number, ranks = thread.collective
    members = everybody if ranks is None else _ranks(ranks, everybody)
    return BlockedThread(thread.what, since_s, False, (label, number, members))
