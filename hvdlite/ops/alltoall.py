"""
All-to-all: every rank sends rows of its tensor to each rank, and joins the rows that it receives in rank order.

`api` makes it. Each rank sends its row counts with its request for the operation. Any dtype works, since the rows are
sent as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calls.operation import ALLTOALL, Execution
from ..comm.flat_bytes import as_bytes, plain
from ..errors import UnsupportedError
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import group_of
from ..values import shown
from .base import Collective
from .rows import join_rows, row_bytes
from .sendable import check_sendable

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(eq=False)
class Alltoall(Collective):
    """Sends each rank the rows of a tensor that are for it: ``splits`` are their numbers.

    The result is the rows received from all ranks, in rank order, and the number of rows from each rank, as a tensor on
    the device ``answer_on``.
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
