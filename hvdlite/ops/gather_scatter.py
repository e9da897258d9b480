"""
Collectives that bring rows of tensors to ranks: all-gather, reduce-scatter and all-to-all.

    all-gather      every rank's rows ── joined in rank order, on every rank
    reduce-scatter  tensors of one shape ── summed ── to each rank its rows
    all-to-all      a rank's rows, so many for each rank ── what came from each, joined in rank order

Ranks tell each other how many rows they have when they ask for the operation. All-gather and all-to-all move bytes, of
any dtype; how tensors are summed is in `reduction`. The gradient of an all-gather is a reduce-scatter, and conversely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..comm.flat_bytes import as_bytes, flat_of, fused, own_memory, pieces_of, plain
from ..comm.group import Group
from ..comm.reduce_op import Average, Sum
from ..compression.casts import CastCompression
from ..compression.custom import CustomCompression
from ..control.operation import (
    ALLGATHER,
    ALLTOALL,
    GROUPED_ALLGATHER,
    GROUPED_REDUCESCATTER,
    REDUCESCATTER,
    Execution,
    Kind,
)
from ..errors import UnsupportedError
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import group_of
from ..values import shown
from .base import Collective
from .packing import reduce_scatter_packed
from .reduction import Reduction
from .sendable import check_sendable

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Allgather(Collective):
    """The tensors of all ranks, joined along the first dimension; a scalar counts as one row."""

    def __init__(self, kind: Kind, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> None:
        super().__init__(kind, tensors, name, process_set)
        self._shapes = [tensor.shape for tensor in self.sources]
        # By tensor and rank, once it is done.
        self._rows: list[list[int]] = []

    def same(self) -> Mapping[str, Any]:
        return self.signature(any_rows=True)

    def own(self) -> list[int]:
        return [_row_count(tensor) for tensor in self.sources]

    def run(self, execution: Execution) -> Any:
        self._rows = [[own[number] for own in execution.owns] for number in range(len(self.sources))]
        return self.result(gather_rows(self.sources, self._rows, execution.group, execution.what))

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        kind = GROUPED_REDUCESCATTER if self.kind.is_grouped else REDUCESCATTER
        mine, rows = list(grads.values()), [self._rows[number] for number in grads]
        backward = Reducescatter(kind, mine, Reduction(Average), self.gradient_name(), self.process_set, rows)
        parts = backward.differentiable()
        return [part.reshape(self._shapes[number]) for number, part in zip(grads, parts, strict=True)]


class Reducescatter(Collective):
    """This rank's rows of what a `Reduction`, a sum or an average, makes of all ranks' tensors."""

    def __init__(
        self,
        kind: Kind,
        tensors: Sequence[Tensor],
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """``rows``: by tensor and rank, how many it gets, where they are not to be spread evenly."""
        super().__init__(kind, tensors, name, process_set)
        self._reduction = reduction
        self._rows = rows
        if reduction.op not in (Average, Sum):
            # Horovod's words.
            raise UnsupportedError(
                f"Reducescatter currently only supports AVERAGE and SUM. ({self.what}: hvd.{reduction.op.name})"
            )
        for source in self.sources:
            reduction.check_dtype(source, self.what)
            if source.dim() == 0:
                raise ValueError(
                    f"{self.what}: a scalar has no rows to scatter: pass a tensor of at least one dimension"
                )

    def same(self) -> Mapping[str, Any]:
        rows = {} if self._rows is None else {"rows": [list(counts) for counts in self._rows]}
        return {**self.signature(), **self._reduction.same(), **rows}

    def run(self, execution: Execution) -> Any:
        reduction, sources, group = self._reduction, self.sources, execution.group
        reduction.warn_of_averaged_integers(sources, execution.divisor, group, execution.what)
        rows = self._rows if self._rows is not None else [_spread(len(source), group.size) for source in sources]
        if isinstance(reduction.compression, CustomCompression):
            copies = [flat_of([source]).view(source.shape) for source in sources]
            return self.result(reduce_scatter_packed(group, reduction, copies, rows, execution.divisor, execution.what))
        outputs = list(sources)
        for members in fused(sources):
            slices = [pieces_of(sources[number], rows[number]) for number in members]
            parts = [flat_of([pieces[group_rank] for pieces in slices]) for group_rank in range(group.size)]
            flat = reduction.reduce_scatter(group, parts, execution.divisor, execution.what)
            mine = [pieces[group.rank] for pieces in slices]
            for number, piece, like in zip(members, pieces_of(flat, [m.numel() for m in mine]), mine, strict=True):
                outputs[number] = own_memory(piece, flat).view(like.shape)
        return self.result(outputs)

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        kind = GROUPED_ALLGATHER if self.kind.is_grouped else ALLGATHER
        reduction = self._reduction
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op is Sum:
            factor *= group_of(self.process_set).size
        wires = [_compressed(grad, reduction) * factor for grad in grads.values()]
        gathered = Allgather(kind, wires, self.gradient_name(), self.process_set).differentiable()
        return [result.to(grad.dtype) for result, grad in zip(gathered, grads.values(), strict=True)]


class Alltoall(Collective):
    """A rank's rows, so many for each rank; a pair: what came from each, joined, and how many rows these were."""

    def __init__(
        self,
        tensor: Tensor,
        splits: Sequence[int],
        name: str | None,
        process_set: ProcessSet,
        answer_on: torch.device | str = "cpu",
    ) -> None:
        """``splits`` are the rows for each rank; the numbers of those that came are told on ``answer_on``."""
        super().__init__(ALLTOALL, [tensor], name, process_set)
        self._answer_on = answer_on
        self._splits = list(splits)
        self._kept_rows = len(tensor) - sum(splits)
        # By rank, once it is done.
        self._received: list[int] = []

    def same(self) -> Mapping[str, Any]:
        return self.signature(any_rows=True)

    def own(self) -> list[int]:
        return self._splits

    def run(self, execution: Execution) -> tuple[Tensor, Tensor]:
        (tensor,) = self.sources
        self._received = [own[execution.group.rank] for own in execution.owns]
        nbytes = row_bytes(tensor)
        sent = [count * nbytes for count in self._splits]
        received = [count * nbytes for count in self._received]
        rows = as_bytes(plain(tensor[: sum(self._splits)]))
        output = _joined(execution.group.all_to_all(rows, sent, received, execution.what), tensor, self._received)
        return output, torch.tensor(self._received, dtype=torch.int32, device=self._answer_on)

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        backward = Alltoall(grads[0], self._received, self.gradient_name(), self.process_set)
        result, _ = backward.differentiable()
        if self._kept_rows:
            result = torch.cat([result, result.new_zeros(self._kept_rows, *result.shape[1:])])
        return [result]


def check_splits(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet, what: str
) -> list[int]:
    """How many rows each rank of the set gets; a ValueError, in Horovod's words, where that does not come out."""
    size = group_of(process_set, what).size
    if tensor.dim() == 0:
        raise UnsupportedError(f"{what}: a scalar has no rows to distribute: pass a tensor of at least one dimension")
    if splits is None:
        if len(tensor) % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of "
                f"workers. ({what}: {len(tensor)} rows for {size} ranks)"
            )
        return [len(tensor) // size] * size
    if isinstance(splits, Tensor):
        check_sendable(splits, f"{what}: splits")
    given = splits if isinstance(splits, Tensor) else _splits_of_list(splits, what)
    if given.dim() != 1:
        raise ValueError(f"alltoall expects a 1D splits tensor ({what}: it has {given.dim()} dimensions)")
    if isinstance(splits, Tensor) and splits.dtype is not torch.int32:
        raise ValueError(
            f"alltoall expects splits to contain 32-bit integer elements. ({what}: {splits.dtype}; a plain list of "
            "ints will do)"
        )
    counts: list[int] = given.tolist()
    if len(counts) != size:
        raise ValueError(
            f"Number of entries in splits does not equal number of workers. ({what}: {len(counts)} for {size} ranks)"
        )
    if any(count < 0 for count in counts):
        raise ValueError(f"{what}: splits={counts} has a number of rows below 0")
    if sum(counts) > len(tensor):
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor. ({what}: {sum(counts)} of "
            f"{len(tensor)} rows)"
        )
    return counts


def _splits_of_list(splits: Sequence[int], what: str) -> Tensor:
    try:
        given = torch.tensor(splits, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        given = None
    if given is not None and given.is_floating_point() and torch.equal(given, given.trunc()):
        # So is an empty list.
        given = given.long()
    if given is None or given.dtype not in _WHOLE:
        raise ValueError(f"{what}: splits={shown(splits)} are not whole numbers of rows: pass a list of ints")
    return given


def gather_rows(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], group: Group, what: str) -> list[Tensor]:
    """Each of some tensors joined along the first dimension over all ranks; ``rows`` are by tensor and rank.

    All those that are on one device travel as one.
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
    """An all-gather of the rows of some tensors, of one device, which travel as one: begun here, ended by `finish`."""

    def __init__(self, tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], group: Group, what: str) -> None:
        """``rows`` are by tensor and rank, and equal on all ranks."""
        self._tensors, self._rows = tensors, rows
        sizes = [[count * row_bytes(tensor) for count in counts] for tensor, counts in zip(tensors, rows, strict=True)]
        # By rank, the bytes of each tensor.
        self._sizes = list(zip(*sizes, strict=True))
        mine = torch.cat([as_bytes(plain(tensor)) for tensor in tensors])
        self._parts, self._work = group.begin_all_gather(mine, what, [sum(column) for column in self._sizes])

    def finish(self) -> list[Tensor]:
        """Wait for the rows of all ranks; each tensor's, joined in rank order."""
        self._work.wait()
        pieces = [pieces_of(part, column) for part, column in zip(self._parts, self._sizes, strict=True)]
        return [
            _joined([row[place] for row in pieces], tensor, rows)
            for place, (tensor, rows) in enumerate(zip(self._tensors, self._rows, strict=True))
        ]


def _row_count(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 1


def row_bytes(tensor: Tensor) -> int:
    """The bytes of each row."""
    return prod(tensor.shape[1:]) * tensor.element_size()


def _joined(parts: Sequence[Tensor], like: Tensor, rows: Sequence[int]) -> Tensor:
    """Parts as bytes, made to rows of the other's shape and dtype, one after the other."""
    output = torch.empty((sum(rows), *like.shape[1:]), dtype=like.dtype, device=like.device)
    for place, part in zip(pieces_of(output, rows), parts, strict=True):
        as_bytes(place).copy_(part)
    return output


def _spread(count: int, size: int) -> list[int]:
    """How many of the rows each rank gets: the first ones get one more where they do not come out even."""
    return [count // size + (rank < count % size) for rank in range(size)]


def _compressed(grad: Tensor, reduction: Reduction) -> Tensor:
    """A gradient as it travels; it cannot where a compression of the user's own makes something to be summed of it."""
    compression = reduction.compression
    if isinstance(compression, CastCompression) and grad.is_floating_point() and compression.casts(grad.dtype):
        return grad.to(compression.dtype)
    return grad
