"""
The collectives in shared memory: `shm_engine` makes the steps of one for each call, and `queue` runs them.

- Small data: every rank reads all payloads, and reduces them itself.
- Resident data (in their ranks' segments): every rank reads them in place; an all-reduce is written to all in place.
- Any other data: in chunks, through staging slots.

In a staged all-reduce a rank writes each byte to its slots once: first its terms of the shares that others reduce, then
the result of its own share. It reads its own terms of that share from its own tensor. Either one rank reduces an
element, or all ranks do so in the same order, so the bits are equal on all ranks. See `Steps` for what they yield.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.flat_bytes import as_bytes
from ..errors import MismatchError
from .arithmetic import BLOCK_BYTES, Arithmetic
from .control_block import DONE, PAYLOAD_BYTES, POSTED, REDUCED, RESIDENT, DataLocation
from .segment import populate
from .shm_operation import CHUNK_BYTES, EngineContext, ShmOperation, Steps, share_of

_REMEMBERED = 512


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory as bytes, whose changes autograd does not take for the program's."""
    return as_bytes(tensor.data)


def all_reduce(operation: ShmOperation, tensor: Tensor, source: Tensor, arithmetic: Arithmetic) -> Steps:
    """Reduces a contiguous tensor over all ranks; this rank's term is read from ``source``, which may be the same."""
    if tensor.nbytes <= PAYLOAD_BYTES:
        return _small_all_reduce(operation, tensor, source, arithmetic)
    flat = bytes_of(tensor)
    flat_source = flat if source is tensor else bytes_of(source)
    return SharedAllReduce(operation, flat, tensor.dtype, arithmetic, flat_source).steps()


def _small_all_reduce(operation: ShmOperation, tensor: Tensor, source: Tensor, arithmetic: Arithmetic) -> Steps:
    operation.show_payload(source)
    yield POSTED, operation.after(1)
    operation.check()
    numel = tensor.numel()
    if numel:
        # Elements in memory order. `data` has a version counter of its own, see `bytes_of`.
        flat = tensor.data if tensor.dim() == 1 else tensor.data.as_strided((numel,), (1,))
        arithmetic.into(operation.payloads.elements(tensor.dtype, numel), flat, is_apart=True)
    operation.finish()


class SharedAllReduce:
    """Reduces a larger contiguous tensor over all ranks, in place or into another one."""

    def __init__(
        self, operation: ShmOperation, flat: Tensor, dtype: torch.dtype, arithmetic: Arithmetic, source: Tensor
    ) -> None:
        """``flat`` is the tensor's memory as bytes; this rank's term is read from ``source``, which may be the same."""
        self._operation = operation
        self._flat = flat
        self._source = source
        # The elements of both, in memory order.
        self._elements, self._terms = flat.view(dtype), source.view(dtype)
        # How many elements a chunk has.
        self._step = CHUNK_BYTES // dtype.itemsize
        self._arithmetic = arithmetic

    def steps(self) -> Steps:
        operation = self._operation
        chunks = -(-self._flat.numel() // CHUNK_BYTES)
        # Resident data are overwritten with the result by all ranks, so the source must be the tensor itself.
        is_staged = self._source is not self._flat or not operation.show_resident(self._flat)
        if is_staged:
            yield None
            yield from self._stage(0, chunks)
        yield POSTED, operation.after(1)
        operation.check()
        if all(place.how == RESIDENT for place in operation.places):
            self._sum_where_they_lie()
            operation.peers.advance(REDUCED, operation.end)
            yield REDUCED, operation.end
        else:
            yield from self._in_chunks(chunks, is_staged)
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
        """Stages the parts of a chunk that the other ranks reduce."""
        here, itemsize = _chunk_of(self._source, chunk), self._terms.element_size()
        start, stop = (bound * itemsize for bound in self._share(chunk, self._operation.peers.rank))
        return self._operation.stage(chunk, chunks, [(0, here[:start]), (stop, here[stop:])])

    def _share(self, chunk: int, place: int) -> tuple[int, int]:
        """Returns which elements of a chunk a rank reduces."""
        numel = min(self._step, self._elements.numel() - chunk * self._step)
        return share_of(place, self._operation.peers.size, numel, self._elements.element_size())

    def _part(self, elements: Tensor, chunk: int, place: int) -> Tensor:
        """Returns the share of a rank in a chunk of a rank's memory."""
        start, stop = self._share(chunk, place)
        return elements[chunk * self._step + start : chunk * self._step + stop]

    def _shown(self, group_rank: int, chunk: int, place: int) -> Tensor:
        """Returns the share of the rank ``place`` in a chunk, as ``group_rank`` shows it."""
        where, operation = self._operation.places[group_rank], self._operation
        if where.how != RESIDENT:
            start, stop = self._share(chunk, place)
            return operation.chunk_of(group_rank, chunk).view(self._elements.dtype)[start:stop]
        memory = operation.context.bytes_of(group_rank, where)
        whole = memory[where.within : where.within + self._elements.nbytes]
        return self._part(whole.view(self._elements.dtype), chunk, place)


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


def reduce_scatter(
    operation: ShmOperation, output: Tensor, parts: Sequence[Tensor], arithmetic: Arithmetic, whole: Tensor | None
) -> Steps:
    """Reduces all ranks' parts for each rank into that rank's output.

    ``parts`` are flat byte tensors, one for each rank; ``output`` is one as large as this rank's part. ``whole`` is the
    memory in which the parts are contiguous, if there is one.
    """
    rank, size, cell = operation.peers.rank, operation.peers.size, _cell_bytes(operation.peers.size)
    own_start = sum(part.numel() for part in parts[:rank])

    def term_of(group_rank: int, chunk: int, nbytes: int) -> Tensor:
        where = operation.places[group_rank]
        if where.how == RESIDENT:
            memory, start = operation.context.bytes_of(group_rank, where), where.within + own_start + chunk * cell
        else:
            memory, start = operation.chunk_of(group_rank, chunk), rank * cell
        return memory[start : start + nbytes].view(arithmetic.dtype)

    def reduce(chunk: int) -> None:
        here = output[chunk * cell : (chunk + 1) * cell]
        if here.numel():
            terms = [term_of(group_rank, chunk, here.numel()) for group_rank in range(size)]
            arithmetic.into(terms, here.view(arithmetic.dtype))

    is_resident = whole is not None and operation.show_resident(whole)
    chunks = max(1, -(-max(part.numel() for part in parts) // cell))
    yield from operation.in_chunks(chunks, lambda chunk: _cells(parts, chunk, cell), reduce, is_resident=is_resident)


def broadcast(operation: ShmOperation, flat: Tensor, root: int) -> Steps:
    """Overwrites every rank's bytes with the bytes of rank ``root``."""
    nbytes, is_root = flat.numel(), operation.peers.rank == root
    is_small = nbytes <= PAYLOAD_BYTES
    if not is_root:
        operation.show_nothing()
    elif is_small:
        operation.show_payload(flat)
    else:
        yield None
    if is_small:
        yield POSTED, operation.after(1)
        operation.check()
        if not is_root:
            flat.copy_(operation.payloads.pieces[root][:nbytes])
        operation.finish()
        return
    chunks = -(-nbytes // CHUNK_BYTES)
    for chunk in range(chunks):
        here = _chunk_of(flat, chunk)
        if is_root:
            yield from operation.stage(chunk, chunks, [(0, here)])
        through = operation.done_with(chunk, chunks)
        yield POSTED, operation.after(chunk + 1)
        if chunk == 0:
            operation.check()
        if not is_root:
            here.copy_(operation.chunk_of(root, chunk)[: here.numel()])
        operation.peers.advance(DONE, through)


def all_gather(operation: ShmOperation, outputs: Sequence[Tensor], flat: Tensor) -> Steps:
    """Copies every rank's bytes, of equal size, to each rank's outputs."""
    nbytes = flat.numel()
    if nbytes <= PAYLOAD_BYTES:
        operation.show_payload(flat)
        yield POSTED, operation.after(1)
        operation.check()
        for output, payload in zip(outputs, operation.payloads.pieces, strict=True):
            output.copy_(payload[:nbytes])
        operation.finish()
        return

    def take(chunk: int) -> None:
        for group_rank, output in enumerate(outputs):
            here = _chunk_of(output, chunk)
            here.copy_(operation.chunk_of(group_rank, chunk)[: here.numel()])

    yield from operation.in_chunks(-(-nbytes // CHUNK_BYTES), lambda chunk: [(0, _chunk_of(flat, chunk))], take)


def all_gather_of_parts(
    operation: ShmOperation, flat: Tensor, bounds: Sequence[int], into: Sequence[tuple[int, Tensor]]
) -> Steps:
    """Copies every rank's part of some memory, of which each rank has as much, to where the other ranks want it.

    ``flat`` is the memory, and rank r's part of it is ``flat[bounds[r] : bounds[r + 1]]``. ``into`` are positions in
    other ranks' parts, each with the memory for what is there. All is in bytes.
    """
    spans, rank = list(itertools.pairwise(bounds)), operation.peers.rank

    def take_of(group_rank: int, chunk: int, first: int, last: int) -> None:
        """Copies what is wanted of a rank's bytes from ``first`` to ``last``, which are its chunk."""
        source = None
        for start, memory in into:
            begin, end = max(start, first), min(start + memory.numel(), last)
            if begin >= end:
                continue
            if source is None:
                where = operation.places[group_rank]
                source, offset = operation.chunk_of(group_rank, chunk), first
                if where.how == RESIDENT:
                    source, offset = operation.context.bytes_of(group_rank, where), -where.within
            memory[begin - start : end - start].copy_(source[begin - offset : end - offset])

    def take(chunk: int) -> None:
        for group_rank, (start, stop) in enumerate(spans):
            take_of(group_rank, chunk, start + chunk * CHUNK_BYTES, min(stop, start + (chunk + 1) * CHUNK_BYTES))

    own = flat[bounds[rank] : bounds[rank + 1]]
    chunks = max(1, -(-max(stop - start for start, stop in spans) // CHUNK_BYTES))
    yield from operation.in_chunks(
        chunks, lambda chunk: [(0, _chunk_of(own, chunk))], take, is_resident=operation.show_resident(flat)
    )


def all_to_all(operation: ShmOperation, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """Sends each rank its part of this rank's bytes; the parts may have any sizes.

    ``outputs`` and ``parts`` are flat byte tensors, one for each rank.
    """
    peers, cell = operation.peers, _cell_bytes(operation.peers.size)
    # The first chunk has the sizes in bytes of the parts, then of the outputs: from all, every rank computes the number
    # of chunks.
    sizes = torch.tensor([side.numel() for side in (*parts, *outputs)], dtype=torch.int64, device="cpu")
    yield None
    yield from operation.stage(0, 2, [(0, sizes.view(torch.uint8))])
    yield POSTED, operation.after(1)
    operation.check()
    table = [
        operation.chunk_of(group_rank, 0)[: sizes.nbytes].view(torch.int64).tolist() for group_rank in range(peers.size)
    ]
    peers.advance(DONE, operation.after(1))
    _require_expected(operation, table)
    chunks = 2 + (max(max(row) for row in table) - 1) // cell
    for chunk in range(1, chunks):
        yield from operation.stage(chunk, chunks, _cells(parts, chunk - 1, cell))
        through = operation.done_with(chunk, chunks)
        yield POSTED, operation.after(chunk + 1)
        start = peers.rank * cell
        for group_rank, output in enumerate(outputs):
            here = output[(chunk - 1) * cell : chunk * cell]
            here.copy_(operation.chunk_of(group_rank, chunk)[start : start + here.numel()])
        peers.advance(DONE, through)
    operation.finish()


def _require_expected(operation: ShmOperation, table: Sequence[Sequence[int]]) -> None:
    """Raises a MismatchError, on all ranks, unless every part has the size that its receiver expects."""
    peers = operation.peers
    for sender, receiver in itertools.product(range(peers.size), repeat=2):
        sent, expected = table[sender][receiver], table[receiver][peers.size + sender]
        if sent != expected:
            raise MismatchError(
                f"all-to-all: {peers.describe(sender)} sends {sent} bytes to {peers.describe(receiver)}, which "
                f"expects {expected}"
            )


def _chunk_of(flat: Tensor, chunk: int) -> Tensor:
    return flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]


def _cell_bytes(size: int) -> int:
    """Returns how many bytes of a staged chunk each rank gets, in collectives that send each rank different data."""
    return CHUNK_BYTES // size // 64 * 64


def _cells(parts: Sequence[Tensor], number: int, cell: int) -> list[tuple[int, Tensor]]:
    """Returns what a chunk has of each rank's part, with its position there."""
    return [(group_rank * cell, part[number * cell : (number + 1) * cell]) for group_rank, part in enumerate(parts)]
