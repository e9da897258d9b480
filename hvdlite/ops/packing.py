"""
All-reduce and reduce-scatter with a user's own compression: tensors are compressed one by one, and sent fused.

    tensors ── pack ── wires ── failures on any rank raised on all ── flat by dtype ── reduced ── unpack ── tensors

`allreduce`, `rows` and `exchanges` call it. As in Horovod, prescaling, the sum, the division and
postscaling apply to the wire, in the wire's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm.flat_bytes import flat_of, fused, pieces_of
from ..comm.group import Group
from ..compression.casts import Compression
from ..compression.custom import CustomCompression, Packed
from .base import raise_together
from .reduction import Reduction

# An additional check of a wire after those of `compression.custom`; takes the tensor, its wire, and words for them.
Check = Callable[[Tensor, Tensor, str], None]


class PackedTensors:
    """Tensors and their compressed wires; keeps the compression's first error, which the caller raises on all ranks."""

    def __init__(
        self, compression: CustomCompression, tensors: Sequence[Tensor], words: Sequence[str], check: Check
    ) -> None:
        """Packs the tensors, which are contiguous in some order of dimensions; ``words`` name them in messages."""
        self._compression = compression
        # Empty tensors are not passed to the compression.
        self._named = [(tensor, of) for tensor, of in zip(tensors, words, strict=True) if tensor.numel()]
        self.packed: list[Packed] = []
        self.failure: Exception | None = None
        try:
            for tensor, of in self._named:
                packed = compression.pack(tensor, of)
                check(tensor, packed.wire, f"compression={compression!r}: its result for {of}")
                self.packed.append(packed)
        except Exception as error:  # noqa: BLE001 - raised later, on all ranks
            self.failure = error

    @property
    def layout(self) -> str:
        """Describes what is sent; equal on ranks whose wires match."""
        return ", ".join([f"{packed.wire.numel()} of {packed.wire.dtype}" for packed in self.packed])

    def clear(self) -> None:
        """Fills the wires with zeros, for a rank that has nothing to give."""
        for packed in self.packed:
            packed.wire.zero_()

    def flats(self) -> Iterator[tuple[Tensor, list[int], list[Packed]]]:
        """Yields, for each dtype, the wires as one flat tensor, their element counts, and the packed tensors."""
        wires = [packed.wire for packed in self.packed]
        for members in fused(wires):
            yield (
                flat_of([wires[number] for number in members], may_share=True),
                [wires[number].numel() for number in members],
                [self.packed[number] for number in members],
            )

    def unpack(self) -> None:
        """Writes the decompressed wires into the tensors; keeps an error in `failure`."""
        try:
            for (tensor, of), packed in zip(self._named, self.packed, strict=True):
                self._compression.unpack(packed, tensor, of)
        except Exception as error:  # noqa: BLE001 - raised later, on all ranks
            self.failure = self.failure or error


def put_back(flat: Tensor, counts: Sequence[int], packed: Sequence[Packed]) -> None:
    """Copies the parts of a flat tensor into the wires, unless they are the same memory."""
    for each, piece in zip(packed, pieces_of(flat, counts), strict=True):
        if piece.data_ptr() != each.wire.data_ptr():
            each.wire.copy_(piece.view(each.wire.shape))


def all_reduce_packed(group: Group, reduction: Reduction, tensors: Sequence[Tensor], divisor: int, what: str) -> None:
    """Replaces contiguous tensors, in place, by their all-reduce. If the compression fails on one, all ranks raise."""
    assert isinstance(reduction.compression, CustomCompression), "others need no packing"
    # As it applies to the wires.
    wires = replace(reduction, compression=Compression.none)
    pack = PackedTensors(reduction.compression, tensors, _words_of(tensors, what), wires.check_wire)
    raise_together(group, pack.failure, what, layout=pack.layout)
    for flat, counts, packed in pack.flats():
        wires.all_reduce(group, flat, counts, divisor, what)
        put_back(flat, counts, packed)
    pack.unpack()
    raise_together(group, pack.failure, f"the end of {what}")


def reduce_scatter_packed(
    group: Group,
    reduction: Reduction,
    tensors: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    divisor: int,
    what: str,
) -> list[Tensor]:
    """Returns this rank's rows of the reduced tensors, which are contiguous and are overwritten.

    Each tensor is packed as a whole. As in Horovod the wire's rows are scattered, so a wire must have as many rows as
    its tensor. Every rank of the group must call it. If the compression fails on one rank, all ranks raise an error.
    """
    assert isinstance(reduction.compression, CustomCompression), "others need no packing"
    compression, words = reduction.compression, _words_of(tensors, what)
    wires = replace(reduction, compression=Compression.none)

    def check(tensor: Tensor, wire: Tensor, of: str) -> None:
        wires.check_wire(tensor, wire, of)
        if wire.dim() == 0 or len(wire) != len(tensor):
            raise ValueError(
                f"{of} has shape {tuple(wire.shape)}, and the tensor has shape {tuple(tensor.shape)}: a reducescatter "
                "needs a compression that keeps the first dimension, whose rows it scatters"
            )

    pack = PackedTensors(compression, tensors, words, check)
    raise_together(group, pack.failure, what, layout=pack.layout)
    packed = iter(pack.packed)
    results, failure = [], None
    for tensor, of, counts in zip(tensors, words, rows, strict=True):
        out = pieces_of(tensor, counts)[group.rank].clone()
        results.append(out)
        if tensor.numel() == 0:
            continue
        whole = next(packed)
        parts = pieces_of(whole.wire, counts)
        mine = wires.reduce_scatter(group, [part.view(-1) for part in parts], divisor, what)
        part = Packed(mine.view(parts[group.rank].shape), whole.context, is_as_it_was=whole.is_as_it_was)
        if whole.wire is whole.given:
            # The compression may rely on the wire being the given tensor.
            part.given = part.wire
            results[-1] = out = torch.view_as_complex(part.wire) if tensor.is_complex() else part.wire
        try:
            if out.numel():
                compression.unpack(part, out, of)
        except Exception as error:  # noqa: BLE001 - raised later, on all ranks
            failure = failure or error
    raise_together(group, failure, f"the end of {what}")
    return [result.clone() for result in results]


def _words_of(tensors: Sequence[Tensor], what: str) -> list[str]:
    """The description of each tensor of an operation in messages."""
    return [what] if len(tensors) == 1 else [f"tensor {number} of {what}" for number in range(len(tensors))]
