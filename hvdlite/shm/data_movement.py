"""
The shared-memory engine's broadcast, all-gather and all-to-all, which move data without reducing them.

`shm_engine` makes one for each call, and `queue` runs it. Each is a generator (like those in `reductions`) that yields
the counter values it waits for. Data larger than a payload use staging slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import MismatchError
from .control_block import DONE, PAYLOAD_BYTES, POSTED, RESIDENT
from .reductions import cell_bytes
from .shm_operation import CHUNK_BYTES, ShmOperation, Steps


class SharedBroadcast:
    """Overwrites every rank's bytes with the bytes of rank ``root``."""

    def __init__(self, operation: ShmOperation, flat: Tensor, root: int) -> None:
        self._operation = operation
        self._flat = flat
        self._root = root
        self._is_root = operation.peers.rank == root

    def begin(self) -> bool:
        if self._flat.numel() <= PAYLOAD_BYTES and self._is_root:
            self._operation.show_payload(self._flat)
        elif not self._is_root:
            self._operation.show_nothing()
        else:
            return False
        return True

    def run(self, has_begun: bool) -> Steps:
        operation, nbytes = self._operation, self._flat.numel()
        if nbytes <= PAYLOAD_BYTES:
            yield POSTED, operation.after(1)
            operation.check()
            if not self._is_root:
                self._flat.copy_(operation.payloads.pieces[self._root][:nbytes])
            operation.finish()
            return
        chunks = -(-nbytes // CHUNK_BYTES)
        for chunk in range(chunks):
            here = self._flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            if self._is_root:
                yield from operation.stage(chunk, chunks, [(0, here)])
            through = operation.done_with(chunk, chunks)
            yield POSTED, operation.after(chunk + 1)
            if chunk == 0:
                operation.check()
            if not self._is_root:
                here.copy_(operation.chunk_of(self._root, chunk)[: here.numel()])
            operation.peers.advance(DONE, through)


class AllGather:
    """Copies every rank's bytes, of equal size, to each rank's outputs."""

    def __init__(self, operation: ShmOperation, outputs: Sequence[Tensor], flat: Tensor) -> None:
        self._operation = operation
        self._outputs = outputs
        self._flat = flat

    def begin(self) -> bool:
        if self._flat.numel() > PAYLOAD_BYTES:
            return False
        self._operation.show_payload(self._flat)
        return True

    def run(self, has_begun: bool) -> Steps:
        operation, nbytes = self._operation, self._flat.numel()
        if has_begun:
            yield POSTED, operation.after(1)
            operation.check()
            for output, payload in zip(self._outputs, operation.payloads.pieces, strict=True):
                output.copy_(payload[:nbytes])
            operation.finish()
            return
        yield from operation.in_chunks(-(-nbytes // CHUNK_BYTES), self._stage, self._take, is_resident=False)

    def _take(self, chunk: int) -> None:
        for group_rank, output in enumerate(self._outputs):
            here = output[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            here.copy_(self._operation.chunk_of(group_rank, chunk)[: here.numel()])

    def _stage(self, chunk: int, chunks: int) -> Steps:
        return self._operation.stage(chunk, chunks, [(0, self._flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])])


class AllGatherOfParts:
    """Copies every rank's part of some memory, of which each rank has as much, to where the other ranks want it."""

    def __init__(
        self, operation: ShmOperation, flat: Tensor, bounds: Sequence[int], into: Sequence[tuple[int, Tensor]]
    ) -> None:
        """``flat`` is the memory, and rank r's part of it is ``flat[bounds[r] : bounds[r + 1]]``.

        ``into`` are positions in other ranks' parts, each with the memory for what is there. All is in bytes.
        """
        self._operation = operation
        self._flat = flat
        self._bounds = bounds
        self._into = into

    def begin(self) -> bool:
        """Shows this rank's part, if the others can read it in place."""
        return self._operation.show_resident(self._flat)

    def run(self, is_resident: bool) -> Steps:
        longest = max(stop - start for start, stop in itertools.pairwise(self._bounds))
        chunks = max(1, -(-longest // CHUNK_BYTES))
        yield from self._operation.in_chunks(chunks, self._stage, self._take, is_resident=is_resident)

    def _take(self, chunk: int) -> None:
        for place, (start, stop) in enumerate(itertools.pairwise(self._bounds)):
            self._take_of(place, chunk, start + chunk * CHUNK_BYTES, min(stop, start + (chunk + 1) * CHUNK_BYTES))

    def _take_of(self, place: int, chunk: int, first: int, last: int) -> None:
        """Copies what is wanted of a rank's bytes from ``first`` to ``last``, which are its chunk."""
        operation, source = self._operation, None
        for start, memory in self._into:
            begin, end = max(start, first), min(start + memory.numel(), last)
            if begin >= end:
                continue
            if source is None:
                where = operation.places[place]
                source = operation.chunk_of(place, chunk)
                offset = first
                if where.how == RESIDENT:
                    source, offset = operation.context.bytes_of(place, where), -where.within
            memory[begin - start : end - start].copy_(source[begin - offset : end - offset])

    def _stage(self, chunk: int, chunks: int) -> Steps:
        rank = self._operation.peers.rank
        part = self._flat[self._bounds[rank] : self._bounds[rank + 1]]
        return self._operation.stage(chunk, chunks, [(0, part[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])])


class AllToAll:
    """Sends each rank its part of this rank's bytes; the parts may have any sizes."""

    def __init__(self, operation: ShmOperation, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """``outputs`` and ``parts`` are flat byte tensors, one for each rank."""
        self._operation = operation
        self._outputs = outputs
        self._parts = parts
        self._cell_bytes = cell_bytes(operation.peers.size)
        # The sizes in bytes of the parts, then of the outputs.
        self._sizes = torch.tensor([side.numel() for side in (*parts, *outputs)], dtype=torch.int64, device="cpu")

    def begin(self) -> bool:
        return False

    def run(self, has_begun: bool) -> Steps:
        operation, peers, cell = self._operation, self._operation.peers, self._cell_bytes
        # The first chunk has the sizes, from which every rank computes the number of chunks.
        table_bytes = self._sizes.numel() * 8
        yield from operation.stage(0, 2, [(0, self._sizes.view(torch.uint8))])
        yield POSTED, operation.after(1)
        operation.check()
        table = [
            operation.chunk_of(group_rank, 0)[:table_bytes].view(torch.int64).tolist()
            for group_rank in range(peers.size)
        ]
        peers.advance(DONE, operation.after(1))
        self._require_expected(table)
        chunks = 2 + (max(max(row) for row in table) - 1) // cell
        for chunk in range(1, chunks):
            at = (chunk - 1) * cell
            pieces = [(group_rank * cell, part[at : at + cell]) for group_rank, part in enumerate(self._parts)]
            yield from operation.stage(chunk, chunks, pieces)
            through = operation.done_with(chunk, chunks)
            yield POSTED, operation.after(chunk + 1)
            start = peers.rank * cell
            for group_rank, output in enumerate(self._outputs):
                here = output[at : at + cell]
                here.copy_(operation.chunk_of(group_rank, chunk)[start : start + here.numel()])
            peers.advance(DONE, through)
        operation.finish()

    def _require_expected(self, table: Sequence[Sequence[int]]) -> None:
        """Raise a MismatchError, on all ranks, unless every part has the size that its receiver expects."""
        peers = self._operation.peers
        for sender, receiver in itertools.product(range(peers.size), repeat=2):
            sent, expected = table[sender][receiver], table[receiver][peers.size + sender]
            if sent != expected:
                raise MismatchError(
                    f"all-to-all: {peers.describe(sender)} sends {sent} bytes to {peers.describe(receiver)}, which "
                    f"expects {expected}"
                )
