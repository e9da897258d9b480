"""
Opens engines between the ranks of one host: shared memory for CPU tensors, torch's own engines for GPU tensors.

    ShmEngineFactory.open ─┬─ exchange_control_blocks ── ShmEngine     which `backend` does, too
                           └─ with GPUs: another engine beside it, in a DeviceEngine

Each rank publishes its process id, file descriptors and a token in a store, maps the other ranks' control blocks and
slots, and waits until all ranks have done so. A rank that has no shared memory publishes its error, so that all ranks
raise it. Control block and slots are in a file apart from the rank's segment, which all ranks keep mapped. So a rank
may close its engine when it is done, and the others can still read what it has written. Slots that outlive the engine
(`KeptSegment`) are in the segment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from ..comm.engine import DelegatingEngine, Engine, EngineFactory, SingleRankFactory
from ..comm.gloo import ConnectingRanks, InitTimeout
from ..errors import CommunicationError
from ..log import log
from ..signing import TAG_BYTES, Signer
from .board import Board
from .control_block import CONTROL_BLOCK_BYTES, FAILED, TOKEN, ControlBlock, is_available
from .peers import Peers
from .segment import Address, KeptMemory, NoMemoryError, Piece, Segment
from .shm_engine import ShmEngine
from .shm_operation import SLOTS_BYTES, EngineContext

WaitUntilSet = Callable[[Store, Sequence[str]], None]
"""Blocks until other ranks have set these keys in the store."""

_READING = timedelta(seconds=5)
_MOST_INFO_BYTES = 65536


def open_segment() -> Segment:
    """Returns new shared memory of this rank; a NoMemoryError if this machine has none."""
    if not is_available():
        raise NoMemoryError("hvdshm needs Linux on x86-64 or 64-bit ARM, with /proc")
    return Segment()


def exchange_control_blocks(
    store: Store,
    rank: int,
    size: int,
    make_segment: Callable[[], Segment],
    init_timeout: InitTimeout,
    signer: Signer,
    wait_until_set: WaitUntilSet | None = None,
) -> EngineContext:
    """Returns an engine's context. Every rank must call it, with a store whose keys nothing else uses.

    ``signer`` has a key that only these ranks share, for this engine alone, because others may be able to write to the
    store. ``wait_until_set`` waits for keys of the other ranks; by default the store does, up to the timeout, also for
    ranks that have ended. If ``make_segment`` raises a NoMemoryError on one rank, or it cannot map another's memory,
    every rank raises a NoMemoryError that names it and says why.
    """
    own = _make_own(make_segment)
    wait = wait_until_set or (lambda store, keys: store.wait(list(keys), init_timeout.left()))
    exchange = partial(_exchange, store, rank, size, wait, signer)
    with contextlib.ExitStack() as undo:
        if isinstance(own, _Own):
            undo.callback(own.close)
        infos = exchange("control block", own.info if isinstance(own, _Own) else own, "has no shared memory")
        assert isinstance(own, _Own), "those who have none have raised"
        made: EngineContext | Exception
        try:
            made = _make_context(own, rank, infos, init_timeout.timeout)
            undo.callback(made.peers.close)
            # If only this rank fails in what follows, the others begin to use the engine, and wait for this rank there.
            undo.callback(made.peers.leave, FAILED)
        except (NoMemoryError, OSError, ValueError) as error:
            made = error
        exchange("result", made if isinstance(made, Exception) else {}, "cannot map the other ranks' memory")
        assert isinstance(made, EngineContext), "no rank has an error"
        undo.pop_all()
    # All ranks have mapped the file.
    own.close()
    return made


def _make_context(own: _Own, rank: int, infos: list[dict[str, Any]], timeout: timedelta) -> EngineContext:
    pieces = [(own.block, own.slots) if at == rank else own.map_other(each) for at, each in enumerate(infos)]
    peers = Peers(
        rank, [ControlBlock(block) for block, _ in pieces], [each["pid"] for each in infos], timeout.total_seconds()
    )
    segments, slots = [_segment_of(each) for each in infos], [slots.tensor for _, slots in pieces]
    return EngineContext(peers, own.segment, segments, slots)


def _segment_of(info: dict[str, Any]) -> Address:
    return Address(info["pid"], info["fd"], info["segment"])


class _Own:
    """This rank's control block and slots, in a file that stays open until all ranks have mapped it."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._file = Segment()
        self.block = self._file.allocate(CONTROL_BLOCK_BYTES, is_permanent=True)
        # No page of any slots is mapped before its first use: many engines use none, and maps of all ranks' pages in
        # each rank would take most of the time of opening an engine.
        kept = segment.take_slots(SLOTS_BYTES)
        self.slots = kept or self._file.allocate(SLOTS_BYTES, is_permanent=True, populates=False)
        token = ControlBlock(self.block).words[TOKEN] = secrets.randbits(63)
        self.info: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "fd": segment.address.fd,
            "segment": segment.address.token,
            "file": self._file.address.fd,
            "token": token,
            "slots": self.slots.offset,
            "are_slots_kept": kept is not None,
        }

    def close(self) -> None:
        self._file.close()

    def map_other(self, info: dict[str, Any]) -> tuple[Piece, Piece]:
        """Maps another rank's control block and slots."""
        elsewhere = f"process {info['pid']} of {info['host']} is on another host, or in another container"
        file = Address(info["pid"], info["file"], info["token"])
        try:
            block = self._file.see(file, 0, CONTROL_BLOCK_BYTES)
        except (NoMemoryError, OSError) as error:
            raise NoMemoryError(f"{elsewhere} ({error})") from error
        # A process of another machine or container may have this process id and such a file, too.
        if ControlBlock(block).words[TOKEN] != info["token"]:
            raise NoMemoryError(elsewhere)
        if info["are_slots_kept"]:
            return block, self.segment.see(_segment_of(info), info["slots"], SLOTS_BYTES, populates=False)
        return block, self._file.see(file, info["slots"], SLOTS_BYTES, populates=False)


def _make_own(make_segment: Callable[[], Segment]) -> _Own | NoMemoryError:
    try:
        return _Own(make_segment())
    except NoMemoryError as error:
        return error


def _exchange(
    store: Store,
    rank: int,
    size: int,
    wait: WaitUntilSet,
    signer: Signer,
    what: str,
    value: dict[str, Any] | Exception,
    fault: str,
) -> list[dict[str, Any]]:
    """Publishes this rank's value under keys that begin with ``what``, and returns those of all ranks.

    If one is an error, all ranks raise a NoMemoryError, in which that rank ``fault``, such as "has no memory".
    """
    text = json.dumps({"error": str(value)} if isinstance(value, Exception) else value)
    keys = [f"{what}{group_rank}" for group_rank in range(size)]
    try:
        # In an elastic job each of them fails once one of the ranks is lost, the last one, too.
        store.set(keys[rank], signer.sign(what, rank, text).hex() + text)
        wait(store, keys)
        # Stores on files have no multi_get.
        is_extended: bool = store.has_extended_api()  # type: ignore[attr-defined]  # missing in torch's stubs
        values = store.multi_get(keys) if is_extended else [store.get(key) for key in keys]
    except CommunicationError as error:
        raise type(error)(f"setting up shared memory failed on rank {rank} of {size}: {error}") from error
    except RuntimeError as error:
        raise CommunicationError(
            f"setting up shared memory failed on rank {rank} of {size}: {_words_of_absence(store, keys)}: look for "
            f"that rank's own error ({error})"
        ) from error
    infos = [_read(value, what, group_rank, rank, signer) for group_rank, value in enumerate(values)]
    for group_rank, each in enumerate(infos):
        if "error" in each:
            # The store may end with this rank: wait a few seconds for the others to read the errors.
            with contextlib.suppress(RuntimeError):
                store.set(f"{keys[rank]}.read", "")
                store.wait([f"{key}.read" for key in keys], _READING)
            raise NoMemoryError(f"rank {group_rank} of {size} {fault}: {each['error']}")
    return infos


def _read(value: bytes, what: str, group_rank: int, rank: int, signer: Signer) -> dict[str, Any]:
    """Returns the value that rank ``group_rank`` has published, after checking its signature."""
    tag, text = value[: 2 * TAG_BYTES].decode(errors="replace"), value[2 * TAG_BYTES :].decode(errors="replace")
    if len(value) <= _MOST_INFO_BYTES and signer.is_signed_hex(tag, what, group_rank, text):
        info: dict[str, Any] = json.loads(text)
        return info
    raise CommunicationError(
        f"setting up shared memory failed on rank {rank}: the data received from rank {group_rank} are not signed with "
        "the key of these ranks: another program can write to their store"
    )


def _words_of_absence(store: Store, keys: Sequence[str]) -> str:
    """Describes the missing ranks, or the store's failure, if it no longer answers."""
    try:
        absent = [group_rank for group_rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "the ranks' store is gone, because the rank that serves it has ended"
    return f"rank {', '.join(map(str, absent))} did not join in time" if absent else "another rank has ended"


class DeviceEngine(DelegatingEngine):
    """Runs CPU tensors on one engine, and all others on another."""

    reduces_in_one_pass = True
    gathers_parts = True

    def __init__(self, cpu: ShmEngine, other: Engine) -> None:
        super().__init__(cpu, other)
        self._cpu = cpu
        self._other = other
        self.ways = {**other.ways, **cpu.ways}
        self.cannot_repeat = {**other.cannot_repeat, **cpu.cannot_repeat}

    def engine_for(self, tensor: Tensor) -> Engine:
        return self._cpu if tensor.is_cpu else self._other

    @property
    def board(self) -> Board:
        return self._cpu.board

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._cpu.zeros(numel, dtype)

    def holds(self, tensor: Tensor) -> bool:
        return self._cpu.holds(tensor)


class ShmEngineFactory:
    """Opens engines between ranks of one host; if one rank lacks shared memory, all ranks get torch's engines."""

    def __init__(
        self, ranks: ConnectingRanks, torchs: EngineFactory, *, for_gpus: bool, kept: KeptMemory | None = None
    ) -> None:
        """``torchs`` opens torch's engines between the same ranks, as a fallback.

        ``for_gpus``: each engine gets one of these beside it, for GPU tensors. ``kept`` is memory that outlives these
        engines; None where it ends with the last of them.
        """
        self._ranks = ranks
        self._torchs = torchs
        self._for_gpus = for_gpus
        self._kept = kept
        self._opened = itertools.count()
        # Exists only while there are engines, so that no file stays open longer.
        self._segment: Segment | None = None
        self._engines: set[ShmEngine] = set()
        self._has_warned = False

    def open(self) -> Engine:
        label, ranks = f"shm{next(self._opened)}", self._ranks
        try:
            store, signer = PrefixStore(label, ranks.store), ranks.signer.derive(label)
            context = exchange_control_blocks(
                store, ranks.rank, ranks.size, self._make_segment, ranks.init_timeout, signer, ranks.wait_until_set
            )
        except BaseException as error:
            self._close_unused()
            if not isinstance(error, NoMemoryError):
                raise
            self._warn(error)
            return self._torchs.open()
        engine = ShmEngine(context, "hvdlite shm", self._closed)
        self._engines.add(engine)
        if not self._for_gpus:
            return engine
        try:
            return DeviceEngine(engine, self._torchs.open())
        except BaseException:
            engine.close()
            raise

    def _make_segment(self) -> Segment:
        if self._segment is None:
            self._segment = open_segment() if self._kept is None else self._kept.segment()
        return self._segment

    def _closed(self, engine: ShmEngine) -> None:
        if self._kept is not None:
            self._kept.add_closed(engine.wait_until_quiet)
        self._engines.discard(engine)
        self._close_unused()

    def _close_unused(self) -> None:
        if not self._engines and self._segment is not None:
            if self._kept is None:
                self._segment.close()
            self._segment = None

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        ranks = self._ranks.among(group_ranks, group_rank, token)
        torchs = self._torchs.among(group_ranks, group_rank, token)
        return ShmEngineFactory(ranks, torchs, for_gpus=self._for_gpus, kept=self._kept)

    def _warn(self, error: NoMemoryError) -> None:
        if self._ranks.rank == 0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "CPU tensors use gloo instead of shared memory, which would be faster: %s (for a container, `docker "
                "run --shm-size` sets how much there is; HVDLITE_SHM=0 turns this warning off)",
                error,
            )
