"""
Averages sparse gradients: gathers the rows of all ranks, and adds up rows with the same index.

    sparse gradients ── sizes: one all-gather ── indices and values: all-gathers of up to cap_bytes
                     ── joined in rank order, coalesced, divided ── sparse gradients

`AveragedStep` calls `SparseParameters.settle` for every bucket that has been averaged. By the bucket's flags it gives
this rank the dense gradients that only other ranks had, and moves parameters with sparse gradients out of the bucket.
At the end of each step it has it average the sparse gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..buckets.bucket import Bucket
from ..buckets.flags import ParticipantCount
from ..buckets.gradient_state import GradientState, require_sparse_untouched
from ..buckets.layout import Layout
from ..buckets.plan import first_of
from ..buckets.settings import Settings
from ..comm.flat_bytes import as_real
from ..comm.group import Group
from ..errors import GradientError, MismatchError
from ..ops.rows import RowGather, row_bytes
from ..ops.sendable import plain_tensor


@dataclass(frozen=True, slots=True)
class _Rows:
    """This rank's indices ``(rows, sparse_dim)`` and values ``(rows, ...)`` of a gradient; row counts of all ranks."""

    state: GradientState
    indices: Tensor
    values: Tensor
    counts: list[int]

    @property
    def nbytes(self) -> int:
        """The bytes that the rank with the most rows sends."""
        return max(self.counts) * (row_bytes(self.indices) + row_bytes(self.values))


class SparseParameters:
    """Finds an optimizer's parameters with sparse gradients by the flags of the buckets, and averages these."""

    def __init__(self, settings: Settings, layout: Layout, size: int) -> None:
        self._settings = settings
        self._layout = layout
        self._size = size
        # In this step: buckets, and the gradients to move out of them, found to be sparse for the first time.
        self._leaving: dict[Bucket, list[GradientState]] = {}
        # In this step: the names of gradients that are sparse on some ranks and dense on others.
        self._mixed: list[str] = []

    def settle(self, bucket: Bucket) -> list[GradientState]:
        """Sets the gradients of a finished bucket that only other ranks have. Returns those to gather instead."""
        leaving = [
            state
            for state, flags in bucket.read_flags(alone=self._size == 1)
            if self._settle_one(state, flags.used, flags.sparse)
        ]
        if leaving:
            names = {state.name for state in leaving}
            at_home = [state for state in bucket.home.states if state.name in names]
            self._leaving.setdefault(bucket.home, []).extend(at_home)
            if bucket.home is not bucket:
                # Sparse in a further round, and dense in the first one.
                self._mixed += [state.name for state in at_home if state.param.grad is not None and not state.sparse]
        return leaving

    def _settle_one(self, state: GradientState, used: bool, sparse: bool) -> bool:
        """Sets one gradient according to the flags of all ranks. Returns whether it must be gathered instead."""
        if self._settings.sparse_as_dense:
            if sparse and state.view is not None:
                state.param.grad = state.view.to_sparse(1)
            elif used and not state.ready:
                state.param.grad = state.view
            return False
        if used and sparse:
            # Raised only in `average`, after all buckets, so that no rank still waits for one.
            self._mixed.append(state.name)
        elif used and not state.ready:
            state.param.grad = state.view
        return sparse

    def average(self, group: Group, optimizer: str, count: ParticipantCount | None) -> None:
        """Averages the sparse gradients, including new ones, after all buckets of a step. Every rank must call it.

        Raises MismatchError on every rank if a gradient is sparse on some and dense on others. ``count``: None without
        buckets.
        """
        if self._mixed:
            raise MismatchError(
                f"parameter {self._mixed[0]!r} has a sparse gradient on some ranks and a dense one on others: build "
                "the same model on every rank, or wrap the optimizer with sparse_as_dense=True"
            )
        if self._leaving and (shard := self._settings.shard) is not None:
            raise GradientError(
                f"parameter {next(iter(self._leaving.values()))[0].name!r} has a sparse gradient, which "
                f"shard={shard.scope!r} does not divide: leave out one of them, or wrap the optimizer with "
                "sparse_as_dense=True"
            )
        for bucket, leaving in self._leaving.items():
            self._layout.move_out(bucket, leaving)
        if not self._layout.sparse:
            return
        ranks = ParticipantCount.of_all(self._size) if count is None else count.on_host()
        states = [home.state for home in self._layout.sparse]
        for state in states:
            if state.ready:
                require_sparse_untouched(state)
        for state, average in self._averages(states, group, optimizer, ranks):
            state.param.grad = average

    def _averages(
        self, states: Sequence[GradientState], group: Group, optimizer: str, count: ParticipantCount
    ) -> Iterator[tuple[GradientState, Tensor]]:
        """Yields each gradient that some rank has, with its average. The next gather runs while one is coalesced."""
        under_way: deque[tuple[list[_Rows], RowGather]] = deque()
        for batch in _batches(self._rows(states, group, optimizer), self._settings.cap_bytes):
            tensors = [tensor for rows in batch for tensor in (rows.indices, rows.values)]
            counts = [rows.counts for rows in batch for _ in range(2)]
            what = _describe([rows.state for rows in batch], optimizer)
            under_way.append((batch, RowGather(tensors, counts, group, what)))
            if len(under_way) > 1:
                yield from self._finish(*under_way.popleft(), count)
        for batch, gather in under_way:
            yield from self._finish(batch, gather, count)

    def _rows(self, states: Sequence[GradientState], group: Group, optimizer: str) -> list[_Rows]:
        """Exchanges the numbers of rows between the ranks, and returns this rank's rows of every gradient to gather."""
        grads = [state.param.grad for state in states]
        own = [None if grad is None else plain_tensor(grad.coalesce()) for grad in grads]
        # For each gradient: its number of sparse dimensions (-1 without a gradient), and of rows.
        sizes = torch.tensor(
            [(-1, 0) if grad is None else (grad.sparse_dim(), grad._nnz()) for grad in own],
            device="cpu",
            dtype=torch.int64,
        )
        parts = group.all_gather(sizes, _describe(states, optimizer), [sizes.nbytes] * group.size)
        of_all_ranks = [part.view(sizes.dtype).view(sizes.shape).tolist() for part in parts]
        rows = []
        for state, grad, of_ranks in zip(states, own, zip(*of_all_ranks, strict=True), strict=True):
            dims = sorted({dim for dim, _ in of_ranks} - {-1})
            if len(dims) > 1:
                raise MismatchError(
                    f"parameter {state.name!r} has gradients with {' and '.join(map(str, dims))} sparse dimensions "
                    "on different ranks: compute them in the same way on every rank, or wrap the optimizer with "
                    "sparse_as_dense=True"
                )
            if dims:
                rows.append(self._own_rows(state, grad, dims[0], [count for _, count in of_ranks]))
        return rows

    def _own_rows(self, state: GradientState, grad: Tensor | None, sparse_dim: int, counts: list[int]) -> _Rows:
        param = state.param
        if grad is None:
            indices = torch.empty(0, sparse_dim, dtype=torch.int64, device=param.device)
            return _Rows(state, indices, param.new_empty(0, *param.shape[sparse_dim:]), counts)
        # Scaled by the factor for the gradient's own dtype, since rows are sent uncompressed.
        before = self._settings.scaling_of_wire(param.dtype.to_real(), len(counts)).before
        values = grad.values() if before == 1.0 else grad.values() * before
        return _Rows(state, grad.indices().t(), values, counts)

    def _finish(
        self, batch: Iterable[_Rows], gather: RowGather, count: ParticipantCount
    ) -> Iterator[tuple[GradientState, Tensor]]:
        joined = gather.finish()
        for rows, indices, values in zip(batch, joined[::2], joined[1::2], strict=True):
            param = rows.state.param
            total = torch.sparse_coo_tensor(
                indices.t(), values, param.shape, check_invariants=False, dtype=values.dtype, device=values.device
            ).coalesce()
            # `coalesce` has added up rows with the same index.
            scaling = self._settings.scaling_of_wire(param.dtype.to_real(), len(rows.counts))
            scaling.finish(as_real(total._values()).view(-1), count)
            yield rows.state, total

    def forget(self) -> None:
        self._leaving.clear()
        self._mixed.clear()


def _batches(rows: Iterable[_Rows], cap_bytes: int) -> Iterator[list[_Rows]]:
    """Yields consecutive gradients on one device, of ``cap_bytes`` per rank or a single one, to gather together."""
    batch: list[_Rows] = []
    for each in rows:
        together = [*batch, each]
        if batch and (each.values.device != batch[0].values.device or sum(r.nbytes for r in together) > cap_bytes):
            yield batch
            together = [each]
        batch = together
    if batch:
        yield batch


def _describe(states: Sequence[GradientState], optimizer: str) -> str:
    names = first_of([state.name for state in states])
    return f"the all-gather of the sparse gradient{'s' if len(states) > 1 else ''} of {names} ({optimizer})"
