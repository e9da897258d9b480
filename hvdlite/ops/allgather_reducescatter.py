"""
All-gather and reduce-scatter, of one tensor or a group of them; the gradient of each uses the other.

    all-gather      every rank's rows ── joined in rank order, on every rank
    reduce-scatter  tensors of one shape ── summed ── to each rank its rows

`api` makes these collectives. Each rank sends its row counts with its request for the operation. `rows` gathers the
rows, and `reduction` sums the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..calls.operation import (
    ALLGATHER,
    GROUPED_ALLGATHER,
    GROUPED_REDUCESCATTER,
    REDUCESCATTER,
    Execution,
)
from ..comm.flat_bytes import flat_of, fused, own_memory, pieces_of
from ..comm.reduce_op import Average, Sum
from ..compression.custom import CustomCompression
from ..errors import UnsupportedError
from ..runtime.process_set_functions import group_of
from .base import Collective
from .packing import reduce_scatter_packed
from .reduction import Reduction
from .rows import gather_rows, row_count, spread


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
    """This rank's rows of the sum or average of all ranks' tensors, computed by a `Reduction`.

    ``rows`` are the row counts by tensor and rank; None spreads the rows evenly.
    """

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
