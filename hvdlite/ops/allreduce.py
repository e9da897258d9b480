"""
All-reduce of one tensor, of a group of tensors and of sparse tensors; and the part of a rank that has joined.

    tensors ── fused, one buffer per dtype and device ── Reduction ── results of the tensors' shapes

`api` makes these collectives, `join` uses `stand_in`. `reduction` sums the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calls.operation import SPARSE_ALLREDUCE, Execution, Kind, Run
from ..comm.flat_bytes import flat_of, mark_written, overlapping, pieces_of
from ..comm.reduce_op import Average, ReduceOp
from ..compression.casts import Compression
from ..compression.custom import CustomCompression
from ..errors import UnsupportedError
from ..runtime.process_set import ProcessSet
from .base import Collective
from .packing import all_reduce_packed
from .reduction import COMPRESSIONS, DTYPE_OF, Reduction, average
from .rows import gather_rows
from .sendable import check_sendable, check_writable


@dataclass(eq=False)
class Allreduce(Collective):
    """Combines the tensors of all ranks by a `Reduction`; with ``in_place``, into the given tensors."""

    reduction: Reduction
    in_place: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in self.sources:
            self.reduction.check_dtype(source, self.what)
            if self.in_place:
                check_writable(source, self.what)

    def same(self) -> Mapping[str, Any]:
        return {**self.signature(), **self.reduction.same()}

    def own(self) -> str | None:
        return self.reduction.own()

    def run(self, execution: Execution) -> Any:
        reduction, sources, in_place = self.reduction, self.sources, self.in_place
        _check_stand_ins(reduction, execution)
        reduction.warn_of_averaged_integers(sources, execution.divisor, execution.group, execution.what)
        if isinstance(reduction.compression, CustomCompression):
            assert not in_place, "functions that overwrite their tensors take no compression"
            results = [flat_of([source]).view(source.shape) for source in sources]
            all_reduce_packed(execution.group, reduction, results, execution.divisor, execution.what)
            return self.result(results)
        outputs = list(sources)
        together = list(reduction.fused(execution.group, sources))
        # Of a tensor that is there twice each has the values before the call.
        twice = overlapping(sources) if in_place and len(together) > 1 else ()
        terms = [source.clone() if number in twice else source for number, source in enumerate(sources)]
        for members in together:
            fused_sources = [terms[number] for number in members]
            if not in_place:
                results = reduction.all_reduced(execution.group, fused_sources, execution.divisor, execution.what)
                for number, result in zip(members, results, strict=True):
                    outputs[number] = result
                continue
            counts = [source.numel() for source in fused_sources]
            flat = flat_of(fused_sources, may_share=True)
            reduction.all_reduce(execution.group, flat, counts, execution.divisor, execution.what)
            for number, piece in zip(members, pieces_of(flat, counts), strict=True):
                source = sources[number]
                if piece.data_ptr() != source.data_ptr():
                    source.copy_(piece.view(source.shape))
        if not in_place:
            return self.result(outputs)
        mark_written(sources)
        return self.result(self.inputs)

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        mine = list(grads.values())
        backward = Allreduce(self.kind, mine, self.gradient_name(), self.process_set, self.reduction)
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
        return torch.sparse_coo_tensor(
            indices.t(), values, self.sources[0].shape, check_invariants=False, dtype=values.dtype, device=values.device
        )


def stand_in(kind: Kind, same: Mapping[str, Any]) -> Run:
    """Returns what a rank that has called `join` runs in an all-reduce of the others; it leaves the result unchanged.

    ``same`` is that of the other ranks' operation. On a GPU, the rank's own must be the current device here and there.
    """
    dtypes, shapes, devices = (same[key] if kind.is_grouped else [same[key]] for key in ("dtype", "shape", "device"))
    # No prescaling: a negative factor would turn the lowest number into the highest.
    reduction = Reduction(ReduceOp[same["op"]], compression=COMPRESSIONS.get(same["compression"], Compression.none))

    def run(execution: Execution) -> None:
        _check_stand_ins(reduction, execution)
        with torch.no_grad():
            sources = []
            for dtype_name, shape, device in zip(dtypes, shapes, devices, strict=True):
                dtype = DTYPE_OF[dtype_name]
                sources.append(torch.full(shape, reduction.neutral(dtype), dtype=dtype, device=device))
            for members in reduction.fused(execution.group, sources):
                flat = flat_of([sources[number] for number in members])
                counts = [sources[number].numel() for number in members]
                reduction.all_reduce(execution.group, flat, counts, execution.divisor, execution.what)

    return run


def _check_stand_ins(reduction: Reduction, execution: Execution) -> None:
    """Raises an error, on all ranks alike, if a rank that has joined would need the user's own compression."""
    if any(own is not None for own in execution.owns) and any(own is None for own in execution.owns):
        raise UnsupportedError(
            f"{execution.what}: a rank that has called hvd.join() cannot take part with "
            f"compression={reduction.compression!r}: use one of hvd.Compression, or leave out hvd.join()"
        )
