"""
Gathers rows of tensors: each rank has some rows, of the same shape and dtype, and every rank gets all of them.

    tensors of one device ── one buffer of bytes ── all-gather ── each tensor's rows, joined in rank order

`allreduce` (for sparse tensors), `allgather_reducescatter`, `alltoall`, `adasum` and `exchanges` use it. The callers
know how many rows each rank has. Any dtype works, since the rows are sent as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..comm.flat_bytes import as_bytes, pieces_of, plain
from ..comm.group import Group


def gather_rows(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], group: Group, what: str) -> list[Tensor]:
    """Joins each tensor along the first dimension over all ranks; ``rows`` are the counts by tensor and rank.

    All tensors on one device are sent together. Blocks until all ranks' rows have arrived.
    """
    outputs = list(tensors)
    devices = [tensor.device for tensor in tensors]
    members = [[number for number, own in enumerate(devices) if own == device] for device in dict.fromkeys(devices)]
    gathers = [RowGather([tensors[n] for n in each], [rows[n] for n in each], group, what) for each in members]
    for numbers, gather in zip(members, gathers, strict=True):
        for number, joined in zip(numbers, gather.finish(), strict=True):
            outputs[number] = joined
    return outputs


class RowGather:
    """An all-gather of rows of tensors on one device, sent together: begun on construction, ended by `finish`."""

    def __init__(self, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], group: Group, what: str) -> None:
        """``rows`` are the counts by tensor and rank, equal on all ranks."""
        self._tensors, self._rows = tensors, rows
        sizes = [[count * row_bytes(tensor) for count in counts] for tensor, counts in zip(tensors, rows, strict=True)]
        # By rank: the bytes of each tensor.
        self._sizes = list(zip(*sizes, strict=True))
        mine = torch.cat([as_bytes(plain(tensor)) for tensor in tensors])
        self._parts, self._work = group.begin_all_gather(mine, what, [sum(column) for column in self._sizes])

    def finish(self) -> list[Tensor]:
        """Waits for all ranks' rows; returns each tensor's, joined in rank order."""
        self._work.wait()
        pieces = [pieces_of(part, column) for part, column in zip(self._parts, self._sizes, strict=True)]
        return [
            join_rows([row[place] for row in pieces], tensor, rows)
            for place, (tensor, rows) in enumerate(zip(self._tensors, self._rows, strict=True))
        ]


def spread(count: int, size: int) -> list[int]:
    """The number of rows, or elements, of each rank: if they do not divide evenly, the first ranks get one more."""
    return [count // size + (rank < count % size) for rank in range(size)]


def row_count(tensor: Tensor) -> int:
    """The length of the first dimension; a scalar is one row."""
    return len(tensor) if tensor.dim() else 1


def row_bytes(tensor: Tensor) -> int:
    """The number of bytes of one row."""
    return prod(tensor.shape[1:]) * tensor.element_size()


def join_rows(parts: Sequence[Tensor], like: Tensor, rows: Sequence[int]) -> Tensor:
    """Joins parts, given as bytes, into one tensor of rows with the shape and dtype of ``like``."""
    output = torch.empty((sum(rows), *like.shape[1:]), dtype=like.dtype, device=like.device)
    for place, part in zip(pieces_of(output, rows), parts, strict=True):
        as_bytes(place).copy_(part)
    return output
