"""
All-gather, reduce-scatter and all-to-all: the collectives that send rows of tensors, along the first dimension.

    all-gather      every rank's rows ── joined in rank order, on every rank
    reduce-scatter  tensors of one shape ── summed by `reduction` ── to each rank its rows
    all-to-all      rows for each rank ── joined in rank order

`api` makes them; `allreduce` (for sparse tensors) and `exchanges` gather rows, too. Each rank sends its row counts with
its request for the operation. Any dtype works where nothing is summed, since rows are sent as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..calls.operation import (
    ALLGATHER,
    ALLTOALL,
    GROUPED_ALLGATHER,
    GROUPED_REDUCESCATTER,
    REDUCESCATTER,
    Execution,
)
from ..comm.flat_bytes import as_bytes, flat_of, fused, own_memory, pieces_of, plain, spread
from ..comm.group import Group
from ..comm.reduce_op import Average, Sum
from ..compression.custom import CustomCompression
from ..errors import UnsupportedError
from ..runtime.functions import group_of
from ..runtime.process_set import ProcessSet
from ..values import shown
from .base import Collective
from .packing import reduce_scatter_packed
from .reduction import Reduction
from .sendable import check_sendable


def gather_rows(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], group: Group, what: str) -> list[Tensor]:
    """Joins each tensor along the first dimension over all ranks; ``rows`` are the counts by tensor and rank."""
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


class Allgather(Collective):
    """The tensors of all ranks, joined along the first dimension; a scalar counts as one row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shapes = [tensor.shape for tensor in self.sources]
        # By tensor and rank; set by `run`.
        self._rows: list[list[int]] = []

    def same(self) -> Mapping[str, Any]:
        return self.signature(any_rows=True)

    def own(self) -> list[int]:
        return [row_count(tensor) for tensor in self.sources]

    def run(self, execution: Execution) -> Any:
        self._rows = [[own[number] for own in execution.owns] for number in range(len(self.sources))]
        return self.result(gather_rows(self.sources, self._rows, execution.group, execution.what))

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        kind = GROUPED_REDUCESCATTER if self.kind.is_grouped else REDUCESCATTER
        mine, rows = list(grads.values()), [self._rows[number] for number in grads]
        backward = Reducescatter(kind, mine, self.gradient_name(), self.process_set, Reduction(Average), rows)
        parts = backward.differentiable()
        return [part.reshape(self._shapes[number]) for number, part in zip(grads, parts, strict=True)]


@dataclass(eq=False)
class Reducescatter(Collective):
    """This rank's rows of the sum or average of all ranks' tensors; ``rows``, by tensor and rank, or even ones."""

    reduction: Reduction
    rows: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        reduction = self.reduction
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
        rows = {} if self.rows is None else {"rows": [list(counts) for counts in self.rows]}
        return {**self.signature(), **self.reduction.same(), **rows}

    def run(self, execution: Execution) -> Any:
        reduction, sources, group = self.reduction, self.sources, execution.group
        reduction.warn_of_averaged_integers(sources, execution.divisor, group, execution.what)
        rows = self.rows if self.rows is not None else [spread(len(source), group.size) for source in sources]
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
        reduction = self.reduction
        factor = reduction.prescale_factor * reduction.postscale_factor
        if reduction.op is Sum:
            factor *= group_of(self.process_set).size
        wires = [grad.to(reduction.wire_dtype(grad)) * factor for grad in grads.values()]
        gathered = Allgather(kind, wires, self.gradient_name(), self.process_set).differentiable()
        return [result.to(grad.dtype) for result, grad in zip(gathered, grads.values(), strict=True)]


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(eq=False)
class Alltoall(Collective):
    """Sends each rank the rows of a tensor that are for it: ``splits`` are their numbers.

    The result is the rows received, in rank order, and their number from each rank, as a tensor on ``answer_on``.
    """

    splits: list[int]
    answer_on: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept_rows = len(self.sources[0]) - sum(self.splits)
        # By rank; set by `run`.
        self._received: list[int] = []

    def same(self) -> Mapping[str, Any]:
        return self.signature(any_rows=True)

    def own(self) -> list[int]:
        return self.splits

    def run(self, execution: Execution) -> tuple[Tensor, Tensor]:
        (tensor,) = self.sources
        self._received = [own[execution.group.rank] for own in execution.owns]
        nbytes = row_bytes(tensor)
        sent = [count * nbytes for count in self.splits]
        received = [count * nbytes for count in self._received]
        rows = as_bytes(plain(tensor[: sum(self.splits)]))
        parts, work = execution.group.begin_all_to_all(rows, sent, received, execution.what)
        work.wait()
        output = join_rows(parts, tensor, self._received)
        return output, torch.tensor(self._received, dtype=torch.int32, device=self.answer_on)

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        backward = Alltoall(ALLTOALL, [grads[0]], self.gradient_name(), self.process_set, self._received)
        result, _ = backward.differentiable()
        if self._kept_rows:
            result = torch.cat([result, result.new_zeros(self._kept_rows, *result.shape[1:])])
        return [result]


def check_splits(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, process_set: ProcessSet, what: str
) -> list[int]:
    """Returns the number of rows for each rank of the set; raises Horovod's ValueErrors if they do not fit."""
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
        # PyTorch makes an empty list a float tensor too.
        given = given.long()
    if given is None or given.dtype not in _WHOLE:
        raise ValueError(f"{what}: splits={shown(splits)} are not whole numbers of rows: pass a list of ints")
    return given
