"""
Tensors that a compression of a user's own packs, and that travel together: each alone, and wires of a dtype as one.

    tensors ── pack ── wires ── all ranks know that it worked ── flat by dtype ── combined ── wires ── unpack ── tensors

In Horovod's order: what is scaled, summed, divided and scaled again is the wire, by its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm.flat_bytes import pieces_of
from ..comm.group import Group
from ..compression.casts import Compression
from ..compression.custom import OwnCompression, Packed
from .fusion import flat_of, fused
from .outcome import share_outcome
from .reduction import Reduction

# What may be asked of a wire, beside what `own` asks: the tensor, its wire, and words for them.
Check = Callable[[Tensor, Tensor, str], None]


class Load:
    """Some tensors from before they travel until after; what went wrong is kept, for all ranks to be told."""

    def __init__(
        self, compression: OwnCompression, tensors: Sequence[Tensor], words: Sequence[str], check: Check
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


def all_reduce_packed(
    group: Group, reduction: Reduction, tensors: Sequence[Tensor], words: Sequence[str], divisor: int, what: str
) -> None:
    """Replace contiguous tensors, in place, by what comes of all ranks', each packed alone, in its shape."""
    assert isinstance(reduction.compression, OwnCompression), "others need no packing"
    wires = of_wires(reduction)
    load = Load(reduction.compression, tensors, words, wires.check_wire)
    share_outcome(group, load.failure, what, layout=load.layout)
    for flat, counts, packed in load.flats():
        wires.all_reduce(group, flat, counts, divisor, what)
        put_back(flat, counts, packed)
    load.unpack()
    share_outcome(group, load.failure, f"the end of {what}")


def reduce_scatter_packed(
    group: Group,
    reduction: Reduction,
    tensors: Sequence[Tensor],
    words: Sequence[str],
    rows: Sequence[Sequence[int]],
    divisor: int,
    what: str,
) -> list[Tensor]:
    """This rank's rows of what comes of all ranks' contiguous tensors, each packed as a whole; they are overwritten.

    As in Horovod the wire's rows are scattered, which must be as many as the tensor's.
    """
    assert isinstance(reduction.compression, OwnCompression), "others need no packing"
    compression, wires = reduction.compression, of_wires(reduction)

    def check(tensor: Tensor, wire: Tensor, of: str) -> None:
        wires.check_wire(tensor, wire, of)
        if wire.dim() == 0 or len(wire) != len(tensor):
            raise ValueError(
                f"{of} has shape {tuple(wire.shape)}, of which a reducescatter spreads the rows, and the tensor "
                f"{tuple(tensor.shape)}: use one that keeps the first dimension"
            )

    load = Load(compression, tensors, words, check)
    share_outcome(group, load.failure, what, layout=load.layout)
    packed = iter(load.packed)
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
    share_outcome(group, failure, f"the end of {what}")
    return [result.clone() for result in results]
