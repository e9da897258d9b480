"""
Validates the messages of ranks to rank 0, and passes them to the negotiation.

`coordinator` calls it, and lists the messages. The connection authenticates the sender. The messages are checked
nevertheless, so that a rank with another version or with broken memory loses only its own connection.
"""

from __future__ import annotations

import math
from typing import Any

from ..comm.step_clock import Phase, Reading
from .call_sites import LONGEST
from .negotiation import Negotiation
from .operation import kind_named
from .pending import Ask
from .stall import Blocked
from .thread_labels import CallingThread

_MOST_BLOCKED = 64


class MessageError(ValueError):
    """A message from a rank is malformed."""


def handle_message(  # noqa: PLR0912  # a case for each message
    negotiation: Negotiation, rank: int, message: list[Any], everybody: tuple[int, ...], now_s: float
) -> None:
    """Passes a message of ``rank`` to the negotiation; raises a MessageError, before any effect, if it is malformed."""
    match message:
        case [
            "ask",
            int(ticket),
            int(set_id),
            str(kind),
            None | str(),
            str(what),
            None | list(),
            dict(same),
            own,
            caller,
        ]:
            if negotiation.has_asked(rank, ticket):
                raise MessageError(f"it requests number {ticket} twice")
            members = _members(message[6], rank, set_id, everybody)
            negotiation.ask(
                rank,
                Ask(ticket, set_id, kind_named(kind), message[4], what, members, same, own, _caller(caller)),
                now_s,
            )
        case ["wait", int(ticket), dict(begun)]:
            negotiation.wait(rank, ticket, _begun(begun))
        case ["join", bool(average_of_active), list(living)]:
            negotiation.join(rank, average_of_active, now_s, [_living(each, rank, everybody) for each in living])
        case ["pinned", int(join), int(set_id), list(numbers)]:
            negotiation.pinned(rank, join, set_id, _numbers(numbers))
        case ["busy", list(blocked), bool(is_stuck), dict(begun)] if len(blocked) <= _MOST_BLOCKED:
            read = [_blocked(each, now_s, everybody) for each in blocked]
            negotiation.busy(rank, read, is_stuck=is_stuck, begun=_begun(begun))
        case ["alive", int(count)]:
            negotiation.over(rank, count)
        case ["here", int(pid)]:
            negotiation.introduce(rank, pid)
        case ["at", str(line)] if len(line) <= LONGEST:
            negotiation.program_line(rank, line, now_s)
        case ["failed", str(label), int(number), str(words)]:
            negotiation.failed(rank, label, number, words)
        case ["lost"]:
            negotiation.lost(rank)
        case ["bye"]:
            negotiation.end(rank, ended_normally=True, now_s=now_s)
        case _:
            raise MessageError(f"{str(message)[:200]} is not a message that a rank sends")


def reading_of(said: list[Any]) -> Reading:
    """Reads a rank's "pace"; raises a MessageError if it is malformed."""
    match said:
        case [int(set_id), int(steps), int(sat_out), [*seconds], int(in_forward), int(elsewhere)] if (
            len(seconds) == len(Phase)
            and all(type(each) in (int, float) and math.isfinite(each) for each in seconds)
            and min(set_id, steps, sat_out, in_forward, elsewhere) >= 0
        ):
            return Reading(set_id, steps, sat_out, tuple(seconds), in_forward, elsewhere)
        case _:
            raise MessageError(f"{str(said)[:200]} is not a reading of a step clock")


def _members(ranks: list[Any] | None, rank: int, set_id: int, everybody: tuple[int, ...]) -> tuple[int, ...]:
    if (ranks is None) != (set_id == 0):
        raise MessageError(f"process set {set_id} has invalid members, {str(ranks)[:200]}")
    if ranks is None:
        return everybody
    if not all(type(each) is int and 0 <= each < len(everybody) for each in ranks) or rank not in ranks:
        raise MessageError(f"{str(ranks)[:200]} are not ranks of this job with rank {rank} among them")
    return tuple(ranks)


def _caller(said: object) -> CallingThread | None:
    match said:
        case None:
            return None
        case [str(label), str(name)]:
            return CallingThread(label, name)
        case [str(label), str(name), bool(has_rivals), bool(has_twins), list(others)]:
            return CallingThread(label, name, has_rivals, has_twins, tuple(map(str, others)))
        case _:
            raise MessageError(f"{str(said)[:200]} does not describe a thread")


def _living(said: object, rank: int, everybody: tuple[int, ...]) -> tuple[int, tuple[int, ...], list[int]]:
    match said:
        case [int(set_id), None | list() as ranks, list(numbers)]:
            return set_id, _members(ranks, rank, set_id, everybody), _numbers(numbers)
        case _:
            raise MessageError(f"{str(said)[:200]} does not describe the optimizers of a process set")


def _numbers(said: list[Any]) -> list[int]:
    if not all(type(each) is int for each in said):
        raise MessageError(f"{str(said)[:200]} are not numbers of optimizers")
    return said


def _begun(said: dict[Any, Any]) -> dict[str, int]:
    if not all(type(label) is str and type(count) is int for label, count in said.items()):
        raise MessageError(f"{str(said)[:200]} are not counts of collectives")
    return said


def _blocked(said: object, now_s: float, everybody: tuple[int, ...]) -> Blocked:
    match said:
        case [str(what), int() | float() as waited_s, bool(is_operation), None]:
            return Blocked(what, now_s - waited_s, is_operation)
        case [str(what), int() | float() as waited_s, False, [str(label), int(number), None | list() as ranks]]:
            members = everybody if ranks is None else tuple(ranks)
            if not all(type(each) is int and 0 <= each < len(everybody) for each in members):
                raise MessageError(f"{str(ranks)[:200]} are not ranks of this job")
            return Blocked(what, now_s - waited_s, False, (label, number, members))
        case _:
            raise MessageError(f"{str(said)[:200]} does not describe a wait")
