"""
All-reduce and reduce-scatter in shared memory. `shm_engine` makes an object of one of these classes for each call,
and `queue` runs it. The size of a chunk is in `shm_operation`.

- Small: every rank reads all payloads, and reduces them itself.
- Resident (all ranks' tensors are in their segments): every rank reduces its share in place, and writes it to all.
- Any other: in chunks. Every rank reduces its share of each staged chunk, and copies the other ranks' shares.

In chunks a rank writes each byte to its slots once: first its terms of the shares that others reduce, then the result
of its own share. It reads its own terms of that share from its own tensor.

Either one rank reduces an element, or all ranks do so in the same order, so the bits are equal on all ranks. Each
collective is a generator that yields the counter values it waits for; `queue` and `peers` do the waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import BLOCK_BYTES, Arithmetic
from .control_block import DONE, POSTED, REDUCED, RESIDENT, DataLocation
from .segment import populate
from .shm_operation import CHUNK_BYTES, EngineContext, ShmOperation, Steps, share_of

_REMEMBERED = 512


def _blocks_of(
    context: EngineContext, places: Sequence[DataLocation], dtype: torch.dtype, numel: int, share: tuple[int, int]
) -> list[list[Tensor]]:
    """Returns the elements of ``share`` block by block, as one view of each rank's memory; the context keeps them."""
    key = (tuple(places), dtype, numel, share)
    made = context.share_views
    blocks = made.get(key)
    if blocks is None:
        if len(made) >= _REMEMBERED:
            made.clear()
        nbytes = numel * dtype.itemsize
        wholes = [
            context.bytes_of(group_rank, where)[where.within : where.within + nbytes].view(dtype)
            for group_rank, where in enumerate(places)
        ]
        start, stop = share
        for whole in wholes:
            populate(whole[start:stop])
        step = BLOCK_BYTES // dtype.itemsize
        blocks = [[whole[at : min(at + step, stop)] for whole in wholes] for at in range(start, stop, step)]
        made[key] = blocks
    return blocks


class SmallAllReduce:
    """Reduces a contiguous tensor of at most `PAYLOAD_BYTES` over all ranks, in place or into another one."""

    def __init__(self, operation: ShmOperation, tensor: Tensor, source: Tensor, arithmetic: Arithmetic) -> None:
        """``source`` is the memory that this rank's term is read from: the tensor's own, or other memory."""
        self._operation = operation
        self._tensor = tensor
        self._source = source
        self._arithmetic = arithmetic

    def begin(self) -> bool:
        self._operation.show_payload(self._source)
        return True

    def run(self, has_begun: bool) -> Steps:
        operation, tensor = self._operation, self._tensor
        yield POSTED, operation.after(1)
        operation.check()
        numel = tensor.numel()
        if numel:
            # Elements in memory order. `data` has a version counter of its own, see `shm_engine`.
            flat = tensor.data if tensor.dim() == 1 else tensor.data.as_strided((numel,), (1,))
            self._arithmetic.into(operation.payloads.elements(tensor.dtype, numel), flat, is_apart=True)
        operation.finish()


class SharedAllReduce:
    """Reduces a larger contiguous tensor over all ranks, in place or into another one."""

    def __init__(
        self,
        operation: ShmOperation,
        tensor: Tensor,
        flat: Tensor,
        arithmetic: Arithmetic,
        source: Tensor | None = None,
    ) -> None:
        """``flat`` is the tensor's memory as bytes.

        ``source`` is the memory that this rank's term is read from, if that is not ``flat``.
        """
        self._operation = operation
        self._flat = flat
        self._source = flat if source is None else source
        # The elements of both, in memory order.
        self._elements, self._terms = flat.view(tensor.dtype), self._source.view(tensor.dtype)
        # How many elements a chunk has.
        self._step = CHUNK_BYTES // tensor.element_size()
        self._arithmetic = arithmetic

    def begin(self) -> bool:
        """Show this rank's data, if all can be shown at once."""
        # Resident data are overwritten with the result by all ranks, so the source must be the tensor itself.
        return self._source is self._flat and self._operation.show_resident(self._flat)

    def run(self, has_begun: bool) -> Steps:
        operation = self._operation
        nbytes = self._flat.numel()
        chunks = -(-nbytes // CHUNK_BYTES)
        if not has_begun:
            yield from self._stage(0, chunks)
        yield POSTED, operation.after(1)
        operation.check()
        if all(place.how == RESIDENT for place in operation.places):
            self._sum_where_they_lie()
            operation.peers.advance(REDUCED, operation.end)
            yield REDUCED, operation.end
        else:
            yield from self._in_chunks(chunks, not has_begun)
        operation.finish()

    def _sum_where_they_lie(self) -> None:
        operation, into = self._operation, self._arithmetic.into
        peers, elements = operation.peers, self._elements
        share = share_of(peers.rank, peers.size, elements.numel(), elements.element_size())
        for terms in _blocks_of(operation.context, operation.places, elements.dtype, elements.numel(), share):
            # No other rank reads or writes this share in any rank's memory.
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
                # One chunk behind, so that the others have probably reduced their shares.
                yield REDUCED, operation.after(chunk)
                self._take_shares(chunk - 1)
                peers.advance(DONE, operation.done_with(chunk - 1, chunks))
        # Other ranks may still read this rank's tensor.
        if not is_staged:
            yield DONE, operation.end

    def _sum_share(self, chunk: int, is_staged: bool) -> None:
        peers = self._operation.peers
        rank, here = peers.rank, self._part(self._elements, chunk, peers.rank)
        terms = [
            self._part(self._terms, chunk, rank) if place == rank else self._shown(place, chunk, rank)
            for place in range(peers.size)
        ]
        if not is_staged:
            self._arithmetic.into(terms, here)
            return
        # The own share of the slot is empty, since this rank reduces it: put the result there for the others.
        result = self._shown(rank, chunk, rank)
        self._arithmetic.into(terms, result, is_apart=True)
        here.copy_(result)

    def _take_shares(self, chunk: int) -> None:
        for place in range(self._operation.peers.size):
            if place != self._operation.peers.rank:
                self._part(self._elements, chunk, place).copy_(self._shown(place, chunk, place))

    def _stage(self, chunk: int, chunks: int) -> Steps:
        """Stage the parts of a chunk that the other ranks reduce."""
        here = self._source[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        itemsize = self._terms.element_size()
        start, stop = (bound * itemsize for bound in self._share(chunk, self._operation.peers.rank))
        return self._operation.stage(chunk, chunks, [(0, here[:start]), (stop, here[stop:])])

    def _share(self, chunk: int, place: int) -> tuple[int, int]:
        """Returns which elements of a chunk a rank reduces."""
        numel = min(self._step, self._elements.numel() - chunk * self._step)
        return share_of(place, self._operation.peers.size, numel, self._elements.element_size())

    def _part(self, elements: Tensor, chunk: int, place: int) -> Tensor:
        """Returns the share of a rank in a chunk of this rank's memory."""
        start, stop = self._share(chunk, place)
        return elements[chunk * self._step + start : chunk * self._step + stop]

    def _shown(self, group_rank: int, chunk: int, place: int) -> Tensor:
        """Returns the share of the rank ``place`` in a chunk, as ``group_rank`` shows it."""
        start, stop = self._share(chunk, place)
        where, operation = self._operation.places[group_rank], self._operation
        if where.how != RESIDENT:
            return operation.chunk_of(group_rank, chunk).view(self._elements.dtype)[start:stop]
        memory = operation.context.bytes_of(group_rank, where)
        whole = memory[where.within : where.within + self._elements.nbytes]
        return self._part(whole.view(self._elements.dtype), chunk, place)


class ReduceScatter:
    """Reduces all ranks' parts for each rank into that rank's output."""

    def __init__(
        self,
        operation: ShmOperation,
        output: Tensor,
        parts: Sequence[Tensor],
        arithmetic: Arithmetic,
        whole: Tensor | None,
    ) -> None:
        """``parts`` are flat byte tensors, one for each rank; ``output`` is one as large as this rank's part.

        ``whole`` is the memory in which the parts are contiguous, if there is one.
        """
        self._operation = operation
        self._output = output
        self._parts = parts
        self._whole = whole
        self._arithmetic = arithmetic
        self._cell_bytes = cell_bytes(operation.peers.size)
        # The start of this rank's part in the whole, and the size of the largest part, which sets the number of chunks.
        self._start = sum(part.numel() for part in parts[: operation.peers.rank])
        self._most_bytes = max(part.numel() for part in parts)

    def begin(self) -> bool:
        """Show this rank's parts, if all can be shown at once."""
        return self._whole is not None and self._operation.show_resident(self._whole)

    def run(self, is_resident: bool) -> Steps:
        chunks = max(1, -(-self._most_bytes // self._cell_bytes))
        yield from self._operation.in_chunks(chunks, self._stage, self._reduce, is_resident=is_resident)

    def _reduce(self, chunk: int) -> None:
        here = self._output[chunk * self._cell_bytes : (chunk + 1) * self._cell_bytes]
        if here.numel():
            ranks = range(self._operation.peers.size)
            terms = [self._term_of(group_rank, chunk, here.numel()) for group_rank in ranks]
            self._arithmetic.into(terms, here.view(self._arithmetic.dtype))

    def _term_of(self, group_rank: int, chunk: int, nbytes: int) -> Tensor:
        """Returns the term of ``group_rank`` for this chunk of this rank's part."""
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
    """Returns how many bytes of a staged chunk each rank gets, in collectives that send each rank different data."""
    return CHUNK_BYTES // size // 64 * 64
