"""
Rendezvous of an engine: each rank publishes in a store where its control block is, and maps the others'.

    control block and slots ── "pid, fds, token" in the store ── the others' ── all there? ── EngineContext

Control block and slots have a file of their own, that all ranks have mapped when they part: so a rank may close its
engine when it has what it wants, and others still find what it has left for them.

A rank that has no shared memory says so, and so all of them know it, at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

from ..comm.gloo import InitTimeout
from ..errors import CommunicationError
from ..signing import TAG_BYTES, Signer
from .control_block import CONTROL_BLOCK_BYTES, ControlBlock
from .futex import is_available
from .peers import Peers
from .segment import Address, NoMemoryError, Piece, Segment
from .shm_operation import SLOTS_BYTES, EngineContext

_OWN_BYTES = CONTROL_BLOCK_BYTES + SLOTS_BYTES
_PARTING = timedelta(seconds=5)
_MOST_TOLD_BYTES = 65536


def open_segment() -> Segment:
    """This rank's shared memory; a NoMemoryError where this machine has none."""
    if not is_available():
        raise NoMemoryError("it takes Linux on x86-64 or 64-bit ARM, with /proc")
    return Segment()


def meet(
    store: Store, rank: int, size: int, segment: Segment | NoMemoryError, init_timeout: InitTimeout, signer: Signer
) -> EngineContext:
    """What an engine needs; every rank must call it, with a part of the store that is used for nothing else.

    ``signer`` has a key of these ranks, for this engine alone: others may be able to write to the store.

    A NoMemoryError on every rank if one has no shared memory, or cannot see another's: it says which, and why.
    """
    own = _make_own(segment)
    with contextlib.ExitStack() as undo:
        if isinstance(own, _Own):
            undo.callback(own.close)
        told_by = _exchange(
            store,
            "control block",
            rank,
            size,
            {"error": str(own)} if isinstance(own, Exception) else own.told,
            init_timeout,
            signer,
        )
        _require_all("has no shared memory", told_by, partial(_part, store, "control block", rank, size))
        assert isinstance(own, _Own), "those who have none have raised"
        context, seen = None, {}
        try:
            context = _make_context(own, rank, told_by, init_timeout.timeout)
            undo.callback(context.peers.close)
        except (NoMemoryError, OSError, ValueError) as error:
            seen = {"error": str(error)}
        seen_by = _exchange(store, "seen", rank, size, seen, init_timeout, signer)
        _require_all("cannot use what the others share", seen_by, partial(_part, store, "seen", rank, size))
        assert context is not None, "no rank has an error"
        undo.pop_all()
    # All have mapped it.
    own.close()
    return context


def _make_context(own: _Own, rank: int, told_by: list[dict[str, Any]], timeout: timedelta) -> EngineContext:
    pieces = [own.piece if group_rank == rank else own.look_at(each) for group_rank, each in enumerate(told_by)]
    peers = Peers(
        rank, [ControlBlock(piece) for piece in pieces], [each["pid"] for each in told_by], timeout.total_seconds()
    )
    addresses = [Address(each["pid"], each["fd"]) for each in told_by]
    return EngineContext(peers, own.segment, addresses, [piece.tensor[CONTROL_BLOCK_BYTES:] for piece in pieces])


class _Own:
    """This rank's control block and slots, in a file that is open until all ranks have mapped it."""

    def __init__(self, segment: Segment) -> None:
        """A NoMemoryError if there is no memory for them."""
        self.segment = segment
        self._file = Segment()
        self.piece = self._file.allocate(_OWN_BYTES, is_permanent=True)
        token = ControlBlock(self.piece).token = secrets.randbits(63)
        self.told: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "fd": segment.address.fd,
            "file": self._file.address.fd,
            "token": token,
        }

    def close(self) -> None:
        """Let the file go; what is mapped of it stays."""
        self._file.close()

    def look_at(self, told: dict[str, Any]) -> Piece:
        """Another rank's."""
        elsewhere = f"process {told['pid']} of {told['host']} is not on this host, or in a container of its own"
        try:
            piece = self._file.see(Address(told["pid"], told["file"]), 0, _OWN_BYTES)
        except (NoMemoryError, OSError) as error:
            raise NoMemoryError(f"{elsewhere} ({error})") from error
        # Another machine, or another container, may have a process of this number with such a file too.
        if ControlBlock(piece).token != told["token"]:
            raise NoMemoryError(elsewhere)
        return piece


def _make_own(segment: Segment | NoMemoryError) -> _Own | NoMemoryError:
    if isinstance(segment, NoMemoryError):
        return segment
    try:
        return _Own(segment)
    except NoMemoryError as error:
        return error


def _exchange(
    store: Store, what: str, rank: int, size: int, value: dict[str, Any], init_timeout: InitTimeout, signer: Signer
) -> list[dict[str, Any]]:
    text = json.dumps(value)
    store.set(f"{what}{rank}", signer.sign(what, rank, text).hex() + text)
    keys = [f"{what}{group_rank}" for group_rank in range(size)]
    try:
        store.wait(keys, init_timeout.left())
    except RuntimeError as error:
        raise CommunicationError(
            f"sharing memory failed on rank {rank} of these {size}: {_words_of_absence(store, keys)}; what ended or "
            f"holds up that rank is the cause, look for its own error ({error})"
        ) from error
    return [_read(store.get(key), what, group_rank, rank, signer) for group_rank, key in enumerate(keys)]


def _read(value: bytes, what: str, group_rank: int, rank: int, signer: Signer) -> dict[str, Any]:
    """What rank ``group_rank`` has told, once it is known to be from there."""
    tag, text = value[: 2 * TAG_BYTES].decode(errors="replace"), value[2 * TAG_BYTES :].decode(errors="replace")
    if len(value) <= _MOST_TOLD_BYTES and signer.is_signed_hex(tag, what, group_rank, text):
        told: dict[str, Any] = json.loads(text)
        return told
    raise CommunicationError(
        f"sharing memory failed on rank {rank}: what is said in the name of rank {group_rank} is not signed with the "
        "key of these ranks: somebody else can write to the store in which they meet"
    )


def _words_of_absence(store: Store, keys: Sequence[str]) -> str:
    """Who has not come, or, where the store does not answer any more, that somebody has not."""
    try:
        absent = [group_rank for group_rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "the store that the ranks meet in is gone, with the rank that has it"
    return f"rank {', '.join(map(str, absent))} did not come in time"


def _part(store: Store, what: str, rank: int, size: int) -> None:
    """Let the others read what went wrong before this rank goes, and perhaps the store with it."""
    with contextlib.suppress(RuntimeError):
        store.set(f"{what}{rank}.read", "")
        store.wait([f"{what}{group_rank}.read" for group_rank in range(size)], _PARTING)


def _require_all(complaint: str, told_by: list[dict[str, Any]], part: Callable[[], None]) -> None:
    for group_rank, each in enumerate(told_by):
        if "error" in each:
            part()
            raise NoMemoryError(f"rank {group_rank} of {len(told_by)} {complaint}: {each['error']}")
