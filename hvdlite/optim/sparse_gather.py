"""
Averages sparse gradients: gathers the rows of all ranks, and adds up those of the same index.

    sparse gradients ── sizes: one all-gather ── indices and values: all-gathers, each of several gradients
                     ── joined in rank order, coalesced, divided ── sparse gradients

Which parameters have sparse gradients, the flags of the buckets say: see `SparseParameters`. The `Reducer` has them
averaged once a step, when all buckets have come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.group import Group
from ..errors import MismatchError
from ..ops.rows import RowGather, row_bytes
from ..ops.sendable import plain_tensor
from .bucket import Bucket
from .exchanges import as_real
from .flags import ParticipantCount
from .layout import Layout
from .plan import first_of
from .settings import Settings
from .slot import Slot


@dataclass(slots=True)
class SparseGradient:
    """One parameter's sparse gradient; None where this rank has none."""

    name: str
    param: Tensor
    grad: Tensor | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """A gradient's indices ``(rows, sparse_dim)`` and values ``(rows, ...)`` here, and how many rows each rank has."""

    gradient: SparseGradient
    indices: Tensor
    values: Tensor
    counts: list[int]

    @property
    def nbytes(self) -> int:
        """What each rank sends: as much as the one with the most rows."""
        return max(self.counts) * (row_bytes(self.indices) + row_bytes(self.values))


class SparseGather:
    """Averages, or sums, the sparse gradients of all ranks, as the settings say."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def averaged(
        self, gradients: Sequence[SparseGradient], group: Group, optimizer: str, count: ParticipantCount
    ) -> Iterator[tuple[SparseGradient, Tensor]]:
        """Each gradient that some rank has, with the average. Every rank passes the same parameters in the same order.

        ``optimizer`` is its name, by which errors and stalls tell it from others. While the rows of one all-gather are
        coalesced, those of the next one travel.
        """
        under_way: deque[tuple[list[_Rows], RowGather]] = deque()
        for batch in _batches(self._rows(gradients, group, optimizer), self._settings.cap_bytes):
            tensors = [tensor for rows in batch for tensor in (rows.indices, rows.values)]
            counts = [rows.counts for rows in batch for _ in range(2)]
            what = _describe([rows.gradient for rows in batch], optimizer)
            under_way.append((batch, RowGather(tensors, counts, group, what)))
            if len(under_way) > 1:
                yield from self._finish(*under_way.popleft(), count)
        for batch, gather in under_way:
            yield from self._finish(batch, gather, count)

    def _rows(self, gradients: Sequence[SparseGradient], group: Group, optimizer: str) -> list[_Rows]:
        """The rows that travel, after the ranks have told each other how many they have."""
        own = [None if gradient.grad is None else plain_tensor(gradient.grad.coalesce()) for gradient in gradients]
        # Of each gradient the sparse dimensions, -1 where there is none, and the rows.
        sizes = torch.tensor(
            [(-1, 0) if grad is None else (grad.sparse_dim(), grad._nnz()) for grad in own], device="cpu"
        )
        parts = group.all_gather(sizes, _describe(gradients, optimizer), [sizes.nbytes] * group.size)
        told = [part.view(sizes.dtype).view(sizes.shape).tolist() for part in parts]
        rows = []
        for gradient, grad, of_ranks in zip(gradients, own, zip(*told, strict=True), strict=True):
            dims = sorted({dim for dim, _ in of_ranks} - {-1})
            if len(dims) > 1:
                raise MismatchError(
                    f"parameter {gradient.name!r} has gradients of {dims} sparse dimensions on the ranks"
                )
            if dims:
                rows.append(self._own_rows(gradient, grad, dims[0], [count for _, count in of_ranks]))
        return rows

    def _own_rows(self, gradient: SparseGradient, grad: Tensor | None, sparse_dim: int, counts: list[int]) -> _Rows:
        param = gradient.param
        if grad is None:
            indices = torch.empty(0, sparse_dim, dtype=torch.int64, device=param.device)
            return _Rows(gradient, indices, param.new_empty(0, *param.shape[sparse_dim:]), counts)
        # Values travel as they are, and only their own rank's are added up as they are gathered.
        before = self._settings.scaling_of_wire(param.dtype.to_real(), len(counts)).before
        values = grad.values() if before == 1.0 else grad.values() * before
        return _Rows(gradient, grad.indices().t(), values, counts)

    def _finish(
        self, batch: Iterable[_Rows], gather: RowGather, count: ParticipantCount
    ) -> Iterator[tuple[SparseGradient, Tensor]]:
        joined = gather.finish()
        for rows, indices, values in zip(batch, joined[::2], joined[1::2], strict=True):
            param = rows.gradient.param
            total = torch.sparse_coo_tensor(indices.t(), values, param.shape, check_invariants=False).coalesce()
            # Those of one row have been added up by now.
            scaling = self._settings.scaling_of_wire(param.dtype.to_real(), len(rows.counts))
            scaling.finish(as_real(total._values()).view(-1), count)
            yield rows.gradient, total


class SparseParameters:
    """The parameters of an optimizer whose gradients are sparse: found by the flags of the buckets, and averaged."""

    def __init__(self, settings: Settings, layout: Layout, size: int) -> None:
        """``size`` is the number of ranks."""
        self._densify = settings.sparse_as_dense
        self._gather = SparseGather(settings)
        self._layout = layout
        self._size = size
        # In this step: the gradients that from the next one on are gathered, with the bucket that they leave.
        self._leaving: list[tuple[Bucket, list[Slot]]] = []
        # Those that are sparse on some ranks and dense on others, by name.
        self._mixed: list[str] = []

    def settle(self, bucket: Bucket) -> list[Slot]:
        """Set the gradients that this rank does not have but others do; return those that are to be gathered."""
        if bucket.is_complete:
            return []
        flags = bucket.read_flags(alone=self._size == 1)
        leaving = [slot for slot, used, sparse in flags if self._settle_one(slot, used, sparse)]
        if leaving:
            self._leaving.append((bucket, leaving))
        return leaving

    def _settle_one(self, slot: Slot, used: bool, sparse: bool) -> bool:
        """Leave in one gradient what the flags of all ranks say; whether it is to be gathered instead."""
        if self._densify:
            if sparse and slot.view is not None:
                slot.param.grad = slot.view.to_sparse(1)
            elif used and not slot.arrived:
                slot.param.grad = slot.view
            return False
        if used and sparse:
            # Said when all buckets have come back, so that no rank still waits for one.
            self._mixed.append(slot.name)
        elif used and not slot.arrived:
            slot.param.grad = slot.view
        return sparse

    def average(self, group: Group, optimizer: str, count: ParticipantCount | None) -> None:
        """When all buckets have come back: average the sparse gradients, also those that are new.

        ``optimizer`` is its name; ``count`` is None where there was no bucket.
        """
        if self._mixed:
            raise MismatchError(
                f"parameter {self._mixed[0]!r} has a sparse gradient on some ranks and a dense one on others: build "
                "the same model on every rank, or wrap the optimizer with sparse_as_dense=True"
            )
        for bucket, leaving in self._leaving:
            self._layout.move_out(bucket, leaving)
        if not self._layout.sparse:
            return
        ranks = ParticipantCount.of_all(self._size) if count is None else count.on_host()
        slots = [home.slot for home in self._layout.sparse]
        gradients = [SparseGradient(slot.name, slot.param, slot.param.grad) for slot in slots]
        for gradient, average in self._gather.averaged(gradients, group, optimizer, ranks):
            gradient.param.grad = average

    def forget(self) -> None:
        """The step is over."""
        self._leaving.clear()
        self._mixed.clear()


def _batches(rows: Iterable[_Rows], cap_bytes: int) -> Iterator[list[_Rows]]:
    """Those that travel together, in order: of one device, and at most so many bytes a rank, or a lone one."""
    batch: list[_Rows] = []
    for each in rows:
        together = [*batch, each]
        if batch and (each.values.device != batch[0].values.device or sum(r.nbytes for r in together) > cap_bytes):
            yield batch
            together = [each]
        batch = together
    if batch:
        yield batch


def _describe(gradients: Sequence[SparseGradient], optimizer: str) -> str:
    names = first_of([gradient.name for gradient in gradients])
    return f"the all-gather of the sparse gradient{'s' if len(gradients) > 1 else ''} of {names} ({optimizer})"
