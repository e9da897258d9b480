"""
All-reduce and reduce-scatter in shared memory.

    small     every rank reads all payloads, and sums them itself
    resident  every rank sums its share where the data lie, and writes it to all
    any       in chunks: every rank sums its share of the staged chunk, and takes the others' from them

In chunks a rank writes as many bytes to its slots as its tensor has, once: what other ranks sum before, and its own
share of the result after. What it sums itself it reads from its own tensor.

An element is summed by one rank, or by all in the same order, so that all have the same bits. Each is a generator that
yields what it waits for; who waits, and how, is for `queue` and `peers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import BLOCK_BYTES, Arithmetic
from .control_block import DONE, PAYLOAD_BYTES, POSTED, REDUCED, RESIDENT, DataLocation
from .shm_operation import CHUNK_BYTES, EngineContext, ShmOperation, Steps, share_of

_REMEMBERED = 512


class Blocks:
    """The views of all ranks' memory that a share consists of, made once for data that travel often."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._made: dict[tuple[object, ...], list[list[Tensor]]] = {}

    def of(
        self, places: Sequence[DataLocation], dtype: torch.dtype, numel: int, share: tuple[int, int]
    ) -> list[list[Tensor]]:
        """Block by block of elements ``share``, each rank's."""
        key = (tuple(places), dtype, numel, share)
        blocks = self._made.get(key)
        if blocks is None:
            if len(self._made) >= _REMEMBERED:
                self._made.clear()
            nbytes = numel * dtype.itemsize
            wholes = [
                self._context.bytes_of(group_rank, where)[where.within : where.within + nbytes].view(dtype)
                for group_rank, where in enumerate(places)
            ]
            blocks = self._made[key] = list(_blocks(wholes, *share))
        return blocks


def _blocks(wholes: Sequence[Tensor], start: int, stop: int) -> list[list[Tensor]]:
    step = BLOCK_BYTES // wholes[0].element_size()
    return [[whole[at : min(at + step, stop)] for whole in wholes] for at in range(start, stop, step)]


class AllReduce:
    """Combines a contiguous tensor over all ranks, in place or into another one."""

    def __init__(
        self,
        operation: ShmOperation,
        tensor: Tensor,
        flat: Tensor,
        arithmetic: Arithmetic,
        blocks: Blocks,
        source: Tensor | None = None,
    ) -> None:
        """``flat`` is the memory of the tensor as bytes; ``source`` what it is read from, if that is other memory."""
        self._operation = operation
        self._tensor = tensor
        self._flat = flat
        self._source = flat if source is None else source
        self._arithmetic = arithmetic
        self._blocks = blocks

    def begin(self) -> bool:
        """Show this rank's data, if they can all be shown at once."""
        if self._flat.numel() <= PAYLOAD_BYTES:
            self._operation.show_payload(self._source)
            return True
        # What lies in the segment is overwritten with the result, by all ranks.
        return self._source is self._flat and self._operation.show_resident(self._flat)

    def run(self, has_begun: bool) -> Steps:
        operation = self._operation
        nbytes = self._flat.numel()
        chunks = -(-nbytes // CHUNK_BYTES)
        if not has_begun:
            yield from self._stage(0, chunks)
        yield POSTED, operation.after(1)
        operation.check()
        if nbytes <= PAYLOAD_BYTES:
            dtype, numel = self._tensor.dtype, self._tensor.numel()
            terms = [payload[:nbytes].view(dtype) for payload in operation.payloads()]
            if numel:
                self._arithmetic.into(terms, self._flat.view(dtype))
        elif all(place.how == RESIDENT for place in operation.places):
            self._sum_where_they_lie()
            operation.peers.advance(REDUCED, operation.end)
            yield REDUCED, operation.end
        else:
            yield from self._in_chunks(chunks, not has_begun)
        operation.finish()

    def _sum_where_they_lie(self) -> None:
        operation, into = self._operation, self._arithmetic.into
        peers, tensor = operation.peers, self._tensor
        share = share_of(peers.rank, peers.size, tensor.numel(), tensor.element_size())
        for terms in self._blocks.of(operation.places, tensor.dtype, tensor.numel(), share):
            # No other rank reads or writes this share of any rank's memory.
            total = terms[0]
            into(terms, total)
            for other in terms[1:]:
                other.copy_(total)

    def _in_chunks(self, chunks: int, is_staged: bool) -> Steps:
        operation, peers = self._operation, self._operation.peers
        for chunk in range(chunks + 1):
            if chunk < chunks:
                if is_staged and chunk + 1 < chunks:
                    yield from self._stage(chunk + 1, chunks)
                yield POSTED, operation.after(chunk + 1)
                self._sum_share(chunk, is_staged)
                peers.advance(REDUCED, operation.done_with(chunk, chunks))
            if chunk > 0:
                # One behind, so that the others' shares are likely to be there.
                yield REDUCED, operation.after(chunk)
                self._take_shares(chunk - 1)
                peers.advance(DONE, operation.done_with(chunk - 1, chunks))
        # Others may still read what lies here.
        if not is_staged:
            yield DONE, operation.end

    def _sum_share(self, chunk: int, is_staged: bool) -> None:
        rank, arithmetic = self._operation.peers.rank, self._arithmetic
        here, shares = self._chunk_of(self._flat, chunk)
        source, _ = self._chunk_of(self._source, chunk)
        terms = [
            source if place == rank else self._terms_of(place, chunk, here.numel()) for place in range(len(shares))
        ]
        if not is_staged:
            for *block, result in _blocks([*terms, here], *shares[rank]):
                arithmetic.into(block, result)
            return
        # Where nothing has been staged, since this rank sums it: so its result is there for the others.
        shown = self._terms_of(rank, chunk, here.numel())
        for *block, result, copied in _blocks([*terms, shown, here], *shares[rank]):
            arithmetic.into(block, result, is_apart=True)
            copied.copy_(result)

    def _take_shares(self, chunk: int) -> None:
        here, shares = self._chunk_of(self._flat, chunk)
        for place, (start, stop) in enumerate(shares):
            if place != self._operation.peers.rank:
                here[start:stop].copy_(self._terms_of(place, chunk, here.numel())[start:stop])

    def _chunk_of(self, flat: Tensor, chunk: int) -> tuple[Tensor, list[tuple[int, int]]]:
        """A chunk of flat memory, and which of its elements each rank sums."""
        here = flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES].view(self._tensor.dtype)
        size = self._operation.peers.size
        return here, [share_of(place, size, here.numel(), here.element_size()) for place in range(size)]

    def _terms_of(self, place: int, chunk: int, numel: int) -> Tensor:
        where, dtype = self._operation.places[place], self._tensor.dtype
        if where.how != RESIDENT:
            return self._operation.chunk_of(place, chunk)[: numel * dtype.itemsize].view(dtype)
        start = where.within + chunk * CHUNK_BYTES
        return self._operation.context.bytes_of(place, where)[start : start + numel * dtype.itemsize].view(dtype)

    def _stage(self, chunk: int, chunks: int) -> Steps:
        """Show what others sum of a chunk."""
        here, shares = self._chunk_of(self._source, chunk)
        start, stop = (bound * here.element_size() for bound in shares[self._operation.peers.rank])
        data = here.view(torch.uint8)
        return self._operation.stage(chunk, chunks, [(0, data[:start]), (stop, data[stop:])])


class ReduceScatter:
    """Leaves in each rank's output the combination of all ranks' parts for it."""

    def __init__(
        self,
        operation: ShmOperation,
        output: Tensor,
        parts: Sequence[Tensor],
        arithmetic: Arithmetic,
        whole: Tensor | None,
    ) -> None:
        """``parts`` are flat tensors of bytes, one for each rank; ``output`` is one as large as this rank's.

        ``whole`` is what the parts are of, if they lie there one after the other.
        """
        self._operation = operation
        self._output = output
        self._parts = parts
        self._whole = whole
        self._arithmetic = arithmetic
        self._cell_bytes = cell_bytes(operation.peers.size)
        # Where this rank's part begins in the whole, and the largest part, by which all ranks count chunks.
        self._start = sum(part.numel() for part in parts[: operation.peers.rank])
        self._most_bytes = max(part.numel() for part in parts)

    def begin(self) -> bool:
        """Show this rank's parts, if they can all be shown at once."""
        return self._whole is not None and self._operation.show_resident(self._whole)

    def run(self, is_resident: bool) -> Steps:
        operation, peers, cell = self._operation, self._operation.peers, self._cell_bytes
        chunks = max(1, -(-self._most_bytes // cell))
        if not is_resident:
            yield from self._stage(0, chunks)
        for chunk in range(chunks):
            if chunk + 1 < chunks and not is_resident:
                yield from self._stage(chunk + 1, chunks)
            yield POSTED, operation.after(chunk + 1)
            if chunk == 0:
                operation.check()
            here = self._output[chunk * cell : (chunk + 1) * cell]
            if here.numel():
                terms = [self._term_of(group_rank, chunk, here.numel()) for group_rank in range(peers.size)]
                self._arithmetic.into(terms, here.view(self._arithmetic.dtype))
            peers.advance(DONE, operation.done_with(chunk, chunks))
        # Others may still read what lies here.
        if is_resident:
            yield DONE, operation.end

    def _term_of(self, group_rank: int, chunk: int, nbytes: int) -> Tensor:
        """What a rank has of this chunk of this rank's part."""
        operation, rank, cell = self._operation, self._operation.peers.rank, self._cell_bytes
        where = operation.places[group_rank]
        if where.how == RESIDENT:
            memory = operation.context.bytes_of(group_rank, where)
            start = where.within + self._start + chunk * cell
        else:
            memory, start = operation.chunk_of(group_rank, chunk), rank * cell
        return memory[start : start + nbytes].view(self._arithmetic.dtype)

    def _stage(self, chunk: int, chunks: int) -> Steps:
        cell = self._cell_bytes
        pieces = [
            (group_rank * cell, part[chunk * cell : (chunk + 1) * cell]) for group_rank, part in enumerate(self._parts)
        ]
        return self._operation.stage(chunk, chunks, pieces)


def cell_bytes(size: int) -> int:
    """How much of a staged chunk each of the ranks has, where they get different things."""
    return CHUNK_BYTES // size // 64 * 64
