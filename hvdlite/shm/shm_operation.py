"""
`ShmOperation`: one collective call in shared memory; and `EngineContext`, which all operations of an engine share.

A rank shows its data in one of three ways: small data in its control block's payload; data in its segment in place; any
other data in chunks, through a few staging slots in turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..errors import MismatchError
from .arithmetic import DTYPES, OPS
from .control_block import DONE, FREED, INLINE, NOWHERE, POSTED, RESIDENT, SIGNATURE, STAGED, WINDOW, DataLocation
from .peers import Peers
from .segment import Address, Piece, Segment

CHUNK_BYTES = 2**20
_SLOTS = 4
SLOTS_BYTES = _SLOTS * CHUNK_BYTES
ALIGNMENT_BYTES = 64

KINDS = ("all-reduce", "reduce-scatter", "broadcast", "all-gather", "all-to-all", "barrier", "all-gather of parts")
_CHUNK_BITS = 24
_ALL_CHUNKS = 2**_CHUNK_BITS - 1

# A counter of the control block, and the value that it must reach on all ranks.
Condition = tuple[int, int]
Steps = Iterator[Condition | None]
"""The steps of one collective: what they yield must hold before they continue.

None comes first where not all of this rank's data could be shown at once: the rest waits for the operations before.
"""


class EngineContext:
    """The peers, memory and staging slots that all operations of one engine share."""

    def __init__(self, peers: Peers, segment: Segment, addresses: Sequence[Address], slots: Sequence[Tensor]) -> None:
        """By rank, ``addresses`` are those of the segments, and ``slots`` the bytes of the staging slots."""
        self.peers = peers
        self.segment = segment
        self._addresses = addresses
        self._seen: dict[tuple[int, int], Piece] = {}
        # By rank, how many pieces it had freed when `_seen` was last cleared of its pieces.
        self._freed = [0] * peers.size
        # What `collectives` has made of `_seen`: each view keeps a piece mapped.
        self.share_views: dict[tuple[object, ...], list[list[Tensor]]] = {}
        # By rank, the bytes of each slot.
        self.slots = [torch.split(each, CHUNK_BYTES) for each in slots]
        # How many chunks this rank has staged, and for each slot the value of DONE once all ranks have read its last
        # chunk. All ranks count alike.
        self.staged = 0
        self.read_at = [0] * _SLOTS

    def bytes_of(self, group_rank: int, where: DataLocation) -> Tensor:
        """Returns the whole piece of memory that has a rank's data."""
        key = (group_rank, where.offset)
        piece = self._seen.get(key)
        if piece is None:
            self._forget_freed(group_rank)
            # Not all pages: a rank uses its share of them, and unmapping the others would delay the end of its process.
            address = self._addresses[group_rank]
            piece = self._seen[key] = self.segment.see(address, where.offset, where.nbytes, populates=False)
        return piece.tensor

    def _forget_freed(self, group_rank: int) -> None:
        """Unmap all pieces of a rank if it has freed any since the last time; those still used are mapped again then.

        So mappings do not pile up. A rank shows no piece that it has freed, and a segment never uses an offset again.
        """
        freed = self.peers.control_blocks[group_rank].words[FREED]
        if freed != self._freed[group_rank]:
            self._freed[group_rank] = freed
            for key in [key for key in self._seen if key[0] == group_rank]:
                self.segment.unsee(self._addresses[group_rank], self._seen.pop(key))
            self.share_views.clear()


class ShmOperation:
    """One collective call; it has the same number on all ranks."""

    def __init__(
        self, context: EngineContext, number: int, kind: int, op: int, dtype: int, root: int, numel: int
    ) -> None:
        """Everything from ``number`` on must be equal on all ranks.

        ``kind``, ``op`` and ``dtype`` are indices into `KINDS`, `OPS` and `DTYPES`.
        """
        self.context = context
        self.peers = context.peers
        self.number = number
        self.payloads = context.peers.payloads[number % WINDOW]
        self._signature = SIGNATURE.pack(number, kind, op, dtype, root, numel)
        self.end = self.after(_ALL_CHUNKS)

    def after(self, chunks: int) -> int:
        """Returns a counter's value once this many chunks are done."""
        return self.number << _CHUNK_BITS | chunks

    def has_room(self) -> Condition:
        """Returns the condition under which the control block has room for this operation."""
        return DONE, (self.number - WINDOW) << _CHUNK_BITS | _ALL_CHUNKS if self.number > WINDOW else 0

    # -- showing

    def show_nothing(self) -> None:
        self._show(DataLocation(NOWHERE))

    def show_payload(self, data: Tensor) -> None:
        """Posts the bytes of a contiguous tensor, at most `PAYLOAD_BYTES`."""
        ctypes.memmove(self.peers.own.payload_addresses[self.number % WINDOW], data.data_ptr(), data.nbytes)
        self._show(DataLocation(INLINE))

    def show_resident(self, data: Tensor) -> bool:
        """Posts data for the others to read in place; returns False if they are not in this rank's segment."""
        segment = self.context.segment
        # Before `POSTED`, so that the others know it when they read where the data are.
        self.peers.own.words[FREED] = segment.freed
        found = segment.find(data)
        if found is None:
            return False
        self._show(DataLocation(RESIDENT, *found))
        return True

    def _show(self, place: DataLocation) -> None:
        self.peers.own.write_header(self.number, self._signature, place)
        self.peers.advance(POSTED, self.end)

    def stage(self, chunk: int, chunks: int, pieces: Sequence[tuple[int, Tensor]]) -> Steps:
        """Copies one chunk into a slot; ``pieces`` are bytes, each with its position in the slot."""
        context = self.context
        number = context.staged % _SLOTS
        yield DONE, context.read_at[number]
        if chunk == 0:
            # The next chunks are in the next slots.
            self.peers.own.write_header(self.number, self._signature, DataLocation(STAGED, within=number))
        slot = context.slots[self.peers.rank][number]
        for start, data in pieces:
            if data.numel():
                slot[start : start + data.numel()].copy_(data)
        context.staged += 1
        context.read_at[number] = self.done_with(chunk, chunks)
        self.peers.advance(POSTED, context.read_at[number])

    def in_chunks(
        self,
        chunks: int,
        pieces_of: Callable[[int], Sequence[tuple[int, Tensor]]],
        take: Callable[[int], None],
        *,
        is_resident: bool = False,
    ) -> Steps:
        """Takes all ranks' data chunk by chunk; those of this rank are resident, or staged one chunk ahead.

        ``pieces_of`` returns what `stage` puts into a chunk; ``take`` reads what this rank needs of all ranks' chunk.
        """
        if not is_resident:
            yield None
            yield from self.stage(0, chunks, pieces_of(0))
        for chunk in range(chunks):
            if chunk + 1 < chunks and not is_resident:
                yield from self.stage(chunk + 1, chunks, pieces_of(chunk + 1))
            yield POSTED, self.after(chunk + 1)
            if chunk == 0:
                self.check()
            take(chunk)
            self.peers.advance(DONE, self.done_with(chunk, chunks))
        # Other ranks may still read this rank's data in place.
        if is_resident:
            yield DONE, self.end

    def done_with(self, chunk: int, chunks: int) -> int:
        """Returns a counter's value after this chunk; the last chunk's value is the operation's end."""
        return self.after(chunk + 1) if chunk + 1 < chunks else self.end

    # -- seeing

    def check(self) -> None:
        """Raise a MismatchError, on all ranks, unless all call the same. Valid once all have posted."""
        signatures = [control_block.signature(self.number) for control_block in self.peers.control_blocks]
        for group_rank, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise MismatchError(
                    f"the ranks of one group call different collectives: {self.peers.describe(0)} "
                    f"{_words(signatures[0])} and {self.peers.describe(group_rank)} {_words(signature)}; every rank "
                    "must call the same collectives in the same order"
                )

    @cached_property
    def places(self) -> list[DataLocation]:
        """Where each rank's data are. Valid once all have posted."""
        return [control_block.place(self.number) for control_block in self.peers.control_blocks]

    def chunk_of(self, group_rank: int, chunk: int) -> Tensor:
        return self.context.slots[group_rank][(self.places[group_rank].within + chunk) % _SLOTS]

    def progress(self) -> str:
        """Describes what this rank calls, and which ranks have not begun or not finished it."""
        peers = self.peers
        words = f"{peers.describe(peers.rank)} {_words(memoryview(self._signature))}"
        absent, slow = peers.late(POSTED, self.after(1)), peers.late(DONE, self.end)
        if absent:
            return f"{words}, not begun by {', '.join(map(peers.describe, absent))}"
        return f"{words}, not finished by {', '.join(map(peers.describe, slow)) or 'no rank'}"

    def not_begun(self) -> list[int]:
        """Returns the other ranks that have not begun it, or an earlier operation unfinished on this rank."""
        peers = self.peers
        # Operations end in order, so this is the first that is not finished here.
        first = max(1, (peers.own.words[DONE] + 1) >> _CHUNK_BITS)
        late = peers.late(POSTED, min(self.number, first) << _CHUNK_BITS | 1)
        return [group_rank for group_rank in late if group_rank != peers.rank]

    def finish(self) -> None:
        """Notes that this rank has read all that it needs."""
        self.peers.advance(DONE, self.end)


def _words(signature: memoryview) -> str:
    _, kind, op, dtype, root, numel = SIGNATURE.unpack(signature)
    name = KINDS[kind]
    if name == "barrier":
        return "waits at a barrier"
    # An all-to-all's sizes may differ by rank.
    count = "" if name == "all-to-all" else f"{numel} elements of "
    words = f"begins {'an' if name[0] == 'a' else 'a'} {name} of {count}{DTYPES[dtype]}"
    if name in ("all-reduce", "reduce-scatter"):
        words += f" by {str(OPS[op]).rpartition('.')[2]}"
    return f"{words} from rank {root}" if name == "broadcast" else words


@lru_cache(maxsize=1024)
def share_of(group_rank: int, size: int, numel: int, itemsize: int) -> tuple[int, int]:
    """Returns the elements (start, stop) that a rank reduces; each share starts on a cache line of its own."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    lines = -(-numel // step)
    return min(lines * group_rank // size * step, numel), min(lines * (group_rank + 1) // size * step, numel)
