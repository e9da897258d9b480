"""
All-reduce and reduce-scatter with a user's own compression: tensors are compressed one by one, and sent fused.

    tensors ── pack ── wires ── failures on any rank raised on all ── flat by dtype ── reduced ── unpack ── tensors

In Horovod's order: what is scaled, summed, divided and scaled again is the wire, by its own dtype.
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
from .failures import raise_together
from .reduction import Reduction

# A further check of a wire, beside those of `compression.custom`: of the tensor, its wire, and words for them.
Check = Callable[[Tensor, Tensor, str], None]


class PackedTensors:
    """Some tensors and their compressed wires; keeps the first error of the compression, to be raised on all ranks."""

    def __init__(
        self, compression: CustomCompression, tensors: Sequence[Tensor], words: Sequence[str], check: Check
    ) -> None:
        """Pack the tensors, which are contiguous in some order of dimensions, and have ``words`` in messages."""
        self._compression = compression
        # What is empty no compression need see.
        self._named = [(tensor, of) for tensor, of in zip(tensors, words, strict=True) if tensor.numel()]
        self.packed: list[Packed] = []
        self.failure: Exception | None = None
        try:
            for tensor, of in self._named:
                packed = compression.pack(tensor, of)
                check(tensor, packed.wire, f"compression={compression!r}: what it made of {of}")
                self.packed.append(packed)
        except Exception as error:  # noqa: BLE001 - raised when all ranks know of it
            self.failure = error

    @property
    def layout(self) -> str:
        """What travels, in words that are alike on all ranks."""
        return ", ".join([f"{packed.wire.numel()} of {packed.wire.dtype}" for packed in self.packed])

    def clear(self) -> None:
        """Have nothing to give: the wires are zeros."""
        for packed in self.packed:
            packed.wire.zero_()

    def flats(self) -> Iterator[tuple[Tensor, list[int], list[Packed]]]:
        """The wires of each dtype as one flat tensor, their elements, and whose they are; a lone one's own memory."""
        wires = [packed.wire for packed in self.packed]
        for members in fused(wires):
            yield (
                flat_of([wires[number] for number in members], may_share=True),
                [wires[number].numel() for number in members],
                [self.packed[number] for number in members],
            )

    def unpack(self) -> None:
        """Leave in each tensor what has come of its wire."""
        try:
            for (tensor, of), packed in zip(self._named, self.packed, strict=True):
                self._compression.unpack(packed, tensor, of)
        except Exception as error:  # noqa: BLE001 - raised when all ranks know of it
            self.failure = self.failure or error


def put_back(flat: Tensor, counts: Sequence[int], packed: Sequence[Packed]) -> None:
    """Give each wire its part of a flat tensor, unless that is its memory."""
    for each, piece in zip(packed, pieces_of(flat, counts), strict=True):
        if piece.data_ptr() != each.wire.data_ptr():
            each.wire.copy_(piece.view(each.wire.shape))


def of_wires(reduction: Reduction) -> Reduction:
    """What is done to the wires, where a compression of a user's own has made them."""
    return replace(reduction, compression=Compression.none)


def all_reduce_packed(group: Group, reduction: Reduction, tensors: Sequence[Tensor], divisor: int, what: str) -> None:
    """Replace contiguous tensors, in place, by what comes of all ranks', each packed alone, in its shape."""
    assert isinstance(reduction.compression, CustomCompression), "others need no packing"
    wires = of_wires(reduction)
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
    """This rank's rows of what comes of all ranks' contiguous tensors, each packed as a whole; they are overwritten.

    As in Horovod the wire's rows are scattered, which must be as many as the tensor's.
    """
    assert isinstance(reduction.compression, CustomCompression), "others need no packing"
    compression, wires, words = reduction.compression, of_wires(reduction), _words_of(tensors, what)

    def check(tensor: Tensor, wire: Tensor, of: str) -> None:
        wires.check_wire(tensor, wire, of)
        if wire.dim() == 0 or len(wire) != len(tensor):
            raise ValueError(
                f"{of} has shape {tuple(wire.shape)}, of which a reducescatter spreads the rows, and the tensor "
                f"{tuple(tensor.shape)}: use one that keeps the first dimension"
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
            # Then it may count on that.
            part.given = part.wire
            results[-1] = out = torch.view_as_complex(part.wire) if tensor.is_complex() else part.wire
        try:
            if out.numel():
                compression.unpack(part, out, of)
        except Exception as error:  # noqa: BLE001 - raised when all ranks know of it
            failure = failure or error
    raise_together(group, failure, f"the end of {what}")
    return [result.clone() for result in results]


def _words_of(tensors: Sequence[Tensor], what: str) -> list[str]:
    """What messages call each of the tensors of an operation."""
    return [what] if len(tensors) == 1 else [f"tensor {number} of {what}" for number in range(len(tensors))]
