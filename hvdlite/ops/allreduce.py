"""
All-reduce: of one tensor or a group of them, of sparse ones, and what a rank does that has joined.

    tensors ── fused, one buffer per dtype and device ── Reduction ── results of the tensors' shapes

How tensors are summed is in `reduction`; the functions that users call are in `operations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.flat_bytes import flat_of, fused, mark_written, own_memory, pieces_of
from ..comm.reduce_op import Average, ReduceOp
from ..compression.casts import Compression
from ..compression.custom import CustomCompression
from ..control.operation import SPARSE_ALLREDUCE, Execution, Kind, Run
from ..errors import UnsupportedError
from ..runtime.process_set import ProcessSet
from .base import Collective
from .packing import all_reduce_packed
from .reduction import COMPRESSIONS, DTYPE_OF, Reduction, average
from .rows import gather_rows
from .sendable import check_sendable, check_writable


class Allreduce(Collective):
    """The tensors of all ranks made one, by a `Reduction`; ``in_place`` into the given tensors."""

    def __init__(
        self,
        kind: Kind,
        tensors: Sequence[Tensor],
        reduction: Reduction,
        name: str | None,
        process_set: ProcessSet,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(kind, tensors, name, process_set)
        self._reduction = reduction
        self._in_place = in_place
        for source in self.sources:
            reduction.check_dtype(source, self.what)
            if in_place:
                check_writable(source, self.what)

    def same(self) -> Mapping[str, Any]:
        return {**self.signature(), **self._reduction.same()}

    def own(self) -> str | None:
        return self._reduction.own()

    def run(self, execution: Execution) -> Any:
        reduction, sources, in_place = self._reduction, self.sources, self._in_place
        _check_stand_ins(reduction, execution)
        reduction.warn_of_averaged_integers(sources, execution.divisor, execution.group, execution.what)
        if isinstance(reduction.compression, CustomCompression):
            assert not in_place, "functions that overwrite their tensors take no compression"
            results = [flat_of([source]).view(source.shape) for source in sources]
            all_reduce_packed(execution.group, reduction, results, execution.divisor, execution.what)
            return self.result(results)
        outputs = list(sources)
        for members in fused(sources):
            fused_sources = [sources[number] for number in members]
            counts = [source.numel() for source in fused_sources]
            if in_place:
                flat = flat_of(fused_sources, may_share=True)
                reduction.all_reduce(execution.group, flat, counts, execution.divisor, execution.what)
            else:
                flat = reduction.all_reduced(execution.group, fused_sources, execution.divisor, execution.what)
            for number, piece in zip(members, pieces_of(flat, counts), strict=True):
                if not in_place:
                    outputs[number] = own_memory(piece, flat).view(sources[number].shape)
                elif piece.data_ptr() != sources[number].data_ptr():
                    sources[number].copy_(piece.view(sources[number].shape))
        if not in_place:
            return self.result(outputs)
        mark_written(sources)
        return self.result(self.inputs)

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        mine = list(grads.values())
        backward = Allreduce(self.kind, mine, self._reduction, self.gradient_name(), self.process_set)
        return backward.differentiable()


class SparseAllreduce(Collective):
    """The sum or average of sparse tensors: all ranks' indices and values, joined and not coalesced."""

    def __init__(self, tensor: Tensor, reduction: Reduction, name: str | None, process_set: ProcessSet) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.detach()
            self._parts = [tensor._indices().t(), tensor._values()]
        super().__init__(SPARSE_ALLREDUCE, [tensor], name, process_set)
        self._reduction = reduction
        for part in self._parts:
            check_sendable(part, self.what)

    def same(self) -> Mapping[str, Any]:
        (tensor,) = self.sources
        return {**self.signature(), "op": self._reduction.op.name, "sparse_dim": tensor.sparse_dim()}

    def own(self) -> int:
        return self.sources[0]._nnz()

    def run(self, execution: Execution) -> Tensor:
        indices, values = gather_rows(
            self._parts, [list(execution.owns), list(execution.owns)], execution.group, execution.what
        )
        if self._reduction.op is Average:
            average(values, execution.divisor)
        return torch.sparse_coo_tensor(indices.t(), values, self.sources[0].shape, check_invariants=False)


def stand_in(kind: Kind, same: Mapping[str, Any]) -> Run:
    """What a rank that has called `join` does in an all-reduce of the others: it takes part, and changes nothing.

    ``same`` is that of the other ranks' operation; on a GPU this must be called, and what it returns be run, with the
    rank's own as the current device.
    """
    dtypes, shapes, devices = (same[key] if kind.is_grouped else [same[key]] for key in ("dtype", "shape", "device"))
    # Not to be scaled before: that would make a lowest number of the highest one.
    reduction = Reduction(ReduceOp[same["op"]], compression=COMPRESSIONS.get(same["compression"], Compression.none))

    def run(execution: Execution) -> None:
        _check_stand_ins(reduction, execution)
        with torch.no_grad():
            sources = []
            for dtype_name, shape, device in zip(dtypes, shapes, devices, strict=True):
                dtype = DTYPE_OF[dtype_name]
                sources.append(torch.full(shape, reduction.neutral(dtype), dtype=dtype, device=device))
            for members in fused(sources):
                flat = flat_of([sources[number] for number in members])
                counts = [sources[number].numel() for number in members]
                reduction.all_reduce(execution.group, flat, counts, execution.divisor, execution.what)

    return run


def _check_stand_ins(reduction: Reduction, execution: Execution) -> None:
    """A compression of the user's own is not known to a rank that has joined; all ranks notice it alike."""
    if any(own is not None for own in execution.owns) and any(own is None for own in execution.owns):
        raise UnsupportedError(
            f"{execution.what}: a rank that has joined cannot stand in where compression={reduction.compression!r}: "
            "use one of hvd.Compression's, or no hvd.join()"
        )
