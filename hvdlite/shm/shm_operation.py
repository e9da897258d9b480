"""
A collective call on an engine in shared memory: its number, what this rank shows of it, where the others' data lie.

    EngineContext (what an engine has: peers, memory, staging slots) ── ShmOperation ── reductions, data_movement

A rank's data are shown in one of three ways: in its control block's payload where they are small; where they lie, if
that is in its segment; else in chunks, through a few slots by turns.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from ..errors import MismatchError
from .arithmetic import DTYPES, OPS
from .control_block import DONE, INLINE, NOWHERE, POSTED, RESIDENT, SIGNATURE, STAGED, WINDOW, DataLocation
from .peers import Peers
from .segment import Address, Piece, Segment

CHUNK_BYTES = 2**20
_SLOTS = 4
SLOTS_BYTES = _SLOTS * CHUNK_BYTES
ALIGNMENT_BYTES = 64

KINDS = ("all-reduce", "reduce-scatter", "broadcast", "all-gather", "all-to-all", "barrier")
_CHUNK_BITS = 24
_ALL_CHUNKS = 2**_CHUNK_BITS - 1

# A counter of the control block, and what it must have come to on all ranks.
Condition = tuple[int, int]
Steps = Iterator[Condition]


class EngineContext:
    """What the operations of one engine have in common."""

    def __init__(self, peers: Peers, segment: Segment, addresses: Sequence[Address], slots: Sequence[Tensor]) -> None:
        """``addresses`` are of the segments, by rank, and ``slots`` the bytes of their staging slots."""
        self.peers = peers
        self.segment = segment
        self._addresses = addresses
        self._seen: dict[tuple[int, int], Piece] = {}
        self._slots = slots
        # How many chunks have gone through the slots, and when the last one of each slot was, as all ranks count.
        self._staged = 0
        self._used = [0] * _SLOTS

    def bytes_of(self, group_rank: int, where: DataLocation) -> Tensor:
        """The whole piece of memory that a rank's data lie in."""
        key = (group_rank, where.offset)
        piece = self._seen.get(key)
        if piece is None:
            piece = self._seen[key] = self.segment.see(self._addresses[group_rank], where.offset, where.nbytes)
        return piece.tensor

    def next_slot(self) -> int:
        """Which of them is to be used next."""
        return self._staged % _SLOTS

    def slot(self, group_rank: int, number: int) -> Tensor:
        """The bytes of a rank's slot."""
        return self._slots[group_rank][number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def free_after(self, number: int) -> Condition:
        """When all ranks have read what was in a slot."""
        return DONE, self._used[number]

    def use(self, value: int) -> None:
        """The next slot has been filled; ``value`` is what DONE will come to when it has been read."""
        self._used[self._staged % _SLOTS] = value
        self._staged += 1

    def staging_place(self) -> DataLocation:
        """For the header of an operation whose first chunk will be in the next slot."""
        return DataLocation(STAGED, within=self.next_slot())


class ShmOperation:
    """One collective call, number by number the same on all ranks."""

    def __init__(
        self, context: EngineContext, number: int, kind: int, op: int, dtype: int, root: int, numel: int, extra: int
    ) -> None:
        """What must be equal on all ranks: ``op``, ``dtype`` by places in `OPS`, `DTYPES`; in ``extra`` the rest."""
        self.context = context
        self.peers = context.peers
        self.number = number
        self._signature = SIGNATURE.pack(number, kind, op, dtype, root, numel, extra)
        self.end = self.after(_ALL_CHUNKS)

    def after(self, chunks: int) -> int:
        """What a counter comes to when so many chunks of this operation are through."""
        return self.number << _CHUNK_BITS | chunks

    def has_room(self) -> Condition:
        """When the control block has room for it."""
        return DONE, (self.number - WINDOW) << _CHUNK_BITS | _ALL_CHUNKS if self.number > WINDOW else 0

    # -- showing

    def show_nothing(self) -> None:
        """This rank has nothing to give."""
        self._show(DataLocation(NOWHERE))

    def show_payload(self, data: Tensor) -> None:
        """At most `PAYLOAD_BYTES`, copied."""
        self.peers.own.payloads[self.number % WINDOW][: data.numel()].copy_(data)
        self._show(DataLocation(INLINE))

    def show_resident(self, data: Tensor) -> bool:
        """Bytes that the others read where they lie; False if that is not in this rank's segment."""
        found = self.context.segment.find(data)
        if found is None:
            return False
        self._show(DataLocation(RESIDENT, *found))
        return True

    def _show(self, place: DataLocation) -> None:
        self.peers.own.write_header(self.number, self._signature, place)
        self.peers.advance(POSTED, self.end)

    def stage(self, chunk: int, chunks: int, pieces: Sequence[tuple[int, Tensor]]) -> Steps:
        """Copy one chunk into a slot: bytes, and where in it they are to be."""
        context = self.context
        number = context.next_slot()
        yield context.free_after(number)
        if chunk == 0:
            self.peers.own.write_header(self.number, self._signature, context.staging_place())
        slot = context.slot(self.peers.rank, number)
        for start, data in pieces:
            slot[start : start + data.numel()].copy_(data)
        context.use(self.done_with(chunk, chunks))
        self.peers.advance(POSTED, self.done_with(chunk, chunks))

    def done_with(self, chunk: int, chunks: int) -> int:
        """What a counter comes to after this chunk, the last of which stands for all."""
        return self.after(chunk + 1) if chunk + 1 < chunks else self.end

    # -- seeing

    def check(self) -> None:
        """Raise a MismatchError, on all ranks, unless all do the same. Once all have posted."""
        signatures = [control_block.signature(self.number) for control_block in self.peers.control_blocks]
        for group_rank, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise MismatchError(
                    f"ranks of one group do different things: {self.peers.describe(0)} {_words(signatures[0])} and "
                    f"{self.peers.describe(group_rank)} {_words(signature)}; every rank must call the same, in "
                    "the same order"
                )

    @cached_property
    def places(self) -> list[DataLocation]:
        """Where each rank's data lie. Once all have posted."""
        return [control_block.place(self.number) for control_block in self.peers.control_blocks]

    def payloads(self) -> list[Tensor]:
        """Each rank's payload."""
        return [control_block.payloads[self.number % WINDOW] for control_block in self.peers.control_blocks]

    def chunk_of(self, group_rank: int, chunk: int) -> Tensor:
        """A staged chunk of a rank's."""
        return self.context.slot(group_rank, (self.places[group_rank].within + chunk) % _SLOTS)

    def progress(self) -> str:
        """What this rank does here, and which ranks have not begun it, or not come to its end."""
        peers = self.peers
        words = f"{peers.describe(peers.rank)} {_words(memoryview(self._signature))}"
        absent, slow = peers.late(POSTED, self.after(1)), peers.late(DONE, self.end)
        if absent:
            return f"{words}, which {', '.join(map(peers.describe, absent))} did not begin"
        return f"{words}, which {', '.join(map(peers.describe, slow)) or 'no rank'} did not come to the end of"

    def finish(self) -> None:
        """This rank has read all that it needs."""
        self.peers.advance(DONE, self.end)


def _words(signature: memoryview) -> str:
    _, kind, op, dtype, root, numel, factor = SIGNATURE.unpack(signature)
    name = KINDS[kind]
    if name == "barrier":
        return "waits at a barrier"
    # What parts an all-to-all has may differ by rank.
    count = "" if name == "all-to-all" else f"{numel} elements of "
    words = f"begins {'an' if name[0] == 'a' else 'a'} {name} of {count}{DTYPES[dtype]}"
    if name in ("all-reduce", "reduce-scatter"):
        words += f" by {str(OPS[op]).rpartition('.')[2]}"
        if factor:
            words += f" with {struct.unpack('=d', factor.to_bytes(8, sys.byteorder))[0]}"
    return f"{words} from place {root}" if name == "broadcast" else words


def share_of(group_rank: int, size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """Which elements, from and to, are a rank's to sum; others' begin at other cache lines."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    lines = -(-numel // step)
    return min(lines * group_rank // size * step, numel), min(lines * (group_rank + 1) // size * step, numel)
