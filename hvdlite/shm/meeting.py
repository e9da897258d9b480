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
    mine, told = _prepare(segment)
    told_by = _exchange(store, "board", rank, size, told, timeout)
    _require_all("has no shared memory", told_by)
    try:
        assert isinstance(segment, Segment), "those who have none have raised"
        boards, addresses = _look_at(segment, told_by)
        crew = Crew(rank, boards, [int(each["pid"]) for each in told_by], timeout.total_seconds())
        station = Station(crew, segment, addresses)
        seen: dict[str, object] = {}
    except (NoMemoryError, OSError, ValueError) as error:
        station, seen = None, {"error": str(error)}
    _require_all("cannot use what the others share", _exchange(store, "seen", rank, size, seen, timeout))
    assert station is not None and mine is not None, "no rank has an error"
    return station


def _prepare(segment: Segment | NoMemoryError) -> tuple[Board | None, dict[str, object]]:
    if isinstance(segment, NoMemoryError):
        return None, {"error": str(segment)}
    try:
        board = Board(segment.allocate(BOARD_BYTES))
    except NoMemoryError as error:
        return None, {"error": str(error)}
    board.token = secrets.randbits(63)
    where = {"pid": os.getpid(), "fd": segment.address.fd, "offset": board.offset, "token": board.token}
    return board, dict(where)


def _look_at(segment: Segment, told_by: list[dict[str, object]]) -> tuple[list[Board], list[Address]]:
    boards, addresses = [], []
    for each in told_by:
        address = Address(int(str(each["pid"])), int(str(each["fd"])))
        board = Board(segment.of_peer(address, int(str(each["offset"])), BOARD_BYTES))
        # Another machine, or another container, may have a process of this number with such a file too.
        if board.token != each["token"]:
            raise NoMemoryError(f"process {address.pid} is not of this machine, or in a container of its own")
        boards.append(board)
        addresses.append(address)
    return boards, addresses


def _exchange(
    store: Store, what: str, rank: int, size: int, value: dict[str, object], timeout: timedelta
) -> list[dict[str, object]]:
    store.set(f"{what}{rank}", json.dumps(value))
    keys = [f"{what}{place}" for place in range(size)]
    store.wait(keys, timeout)
    return [json.loads(store.get(key)) for key in keys]


def _require_all(complaint: str, told_by: list[dict[str, object]]) -> None:
    for place, each in enumerate(told_by):
        if "error" in each:
            raise NoMemoryError(f"rank {place} of {len(told_by)} {complaint}: {each['error']}")
