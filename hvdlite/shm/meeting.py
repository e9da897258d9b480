"""
How the ranks of a host come to an engine: each tells the others, by a store, where its board is.

    board ── "pid, fd, offset, token" in the store ── the others' boards ── all there? ── Station

A rank that has no shared memory says so, and so all of them know it, at the same time.
"""

from __future__ import annotations

import json
import os
import secrets
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from .board import BOARD_BYTES, Board
from .crew import Crew
from .futex import is_available
from .segment import Address, NoMemoryError, Segment
from .turn import Station


def open_segment() -> Segment:
    """This rank's shared memory; a NoMemoryError where this machine has none."""
    if not is_available():
        raise NoMemoryError("it takes Linux on x86-64 or 64-bit ARM, with /proc")
    return Segment()


def meet(store: Store, rank: int, size: int, segment: Segment | NoMemoryError, timeout: timedelta) -> Station:
    """What an engine needs; every rank must call it, with a part of the store that is used for nothing else.

    A NoMemoryError on every rank if one has no shared memory, or cannot see another's: it says which, and why.
    """
    own = _make_board(segment)
    told_by = _exchange(store, "board", rank, size, _describe(own, segment), timeout)
    _require_all("has no shared memory", told_by)
    station, seen = None, {}
    try:
        assert isinstance(own, Board), "those who have none have raised"
        assert isinstance(segment, Segment), "who has a board has memory"
        addresses = [Address(each["pid"], each["fd"]) for each in told_by]
        boards = [
            own if place == rank else _look_at(segment, addresses[place], each) for place, each in enumerate(told_by)
        ]
        crew = Crew(rank, boards, [each["pid"] for each in told_by], timeout.total_seconds())
        station = Station(crew, segment, addresses)
    except (NoMemoryError, OSError, ValueError) as error:
        seen = {"error": str(error)}
    _require_all("cannot use what the others share", _exchange(store, "seen", rank, size, seen, timeout))
    assert station is not None, "no rank has an error"
    return station


def _make_board(segment: Segment | NoMemoryError) -> Board | NoMemoryError:
    if isinstance(segment, NoMemoryError):
        return segment
    try:
        board = Board(segment.allocate(BOARD_BYTES, stays=True))
    except NoMemoryError as error:
        return error
    board.token = secrets.randbits(63)
    return board


def _describe(board: Board | NoMemoryError, segment: Segment | NoMemoryError) -> dict[str, Any]:
    if isinstance(board, NoMemoryError) or isinstance(segment, NoMemoryError):
        return {"error": str(board)}
    return {"pid": os.getpid(), "fd": segment.address.fd, "offset": board.offset, "token": board.token}


def _look_at(segment: Segment, address: Address, told: dict[str, Any]) -> Board:
    board = Board(segment.see(address, told["offset"], BOARD_BYTES))
    # Another machine, or another container, may have a process of this number with such a file too.
    if board.token != told["token"]:
        raise NoMemoryError(f"process {address.pid} is not of this machine, or in a container of its own")
    return board


def _exchange(
    store: Store, what: str, rank: int, size: int, value: dict[str, Any], timeout: timedelta
) -> list[dict[str, Any]]:
    store.set(f"{what}{rank}", json.dumps(value))
    keys = [f"{what}{place}" for place in range(size)]
    store.wait(keys, timeout)
    return [json.loads(store.get(key)) for key in keys]


def _require_all(complaint: str, told_by: list[dict[str, Any]]) -> None:
    for place, each in enumerate(told_by):
        if "error" in each:
            raise NoMemoryError(f"rank {place} of {len(told_by)} {complaint}: {each['error']}")
