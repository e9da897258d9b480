"""
Operations that make one tensor of all ranks': all-reduce, reduce-scatter, of one tensor or of a group.

    tensors ── fused, one buffer per dtype and device ── Reduction ── results of the tensors' shapes

What a rank does whose turn it is, and what one does that has joined. How tensors are summed is in `reduction`; the
functions that users call are in `asynchronous` and `operations`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.flat_bytes import pieces_of
from ..comm.reduce_op import Average, ReduceOp, Sum
from ..compression.casts import Compression
from ..compression.custom import OwnCompression
from ..control.handle import Handle
from ..control.request import Execution, Request
from ..errors import UnsupportedError
from ..log import log
from ..runtime.process_set import ProcessSet
from .fusion import flat_of, fused, mark_written, own_memory
from .load import all_reduce_packed, reduce_scatter_packed
from .reduction import COMPRESSIONS, WHOLE, Reduction
from .submission import signature, submit, title
from .travel import check_writable, traveller

_warned_of_integers = threading.Event()


def start_allreduce(
    kind: str,
    tensors: Sequence[Tensor],
    reduction: Reduction,
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
) -> Handle:
    """All-reduce one tensor, or a group of them as one operation."""
    is_group = kind == "grouped_allreduce"
    targets = list(tensors)
    sources = [traveller(tensor) for tensor in tensors]
    for source in sources:
        reduction.check_dtype(source, title(kind, name))
        if in_place:
            check_writable(source, title(kind, name))

    def body(execution: Execution) -> Any:
        _check_stand_ins(reduction, execution)
        _tell_of_averaged_integers(reduction, sources, execution)
        if isinstance(reduction.compression, OwnCompression):
            assert not in_place, "functions that overwrite their tensors take no compression"
            results = [flat_of([source]).view(source.shape) for source in sources]
            all_reduce_packed(
                execution.group,
                reduction,
                results,
                words_of(sources, execution.what),
                execution.divisor,
                execution.what,
            )
            return tuple(results) if is_group else results[0]
        outputs = list(targets)
        for members in fused(sources):
            flat = flat_of([sources[number] for number in members], may_share=in_place)
            counts = [sources[number].numel() for number in members]
            reduction.all_reduce(execution.group, flat, counts, execution.divisor, execution.what)
            for number, piece in zip(members, pieces_of(flat, counts), strict=True):
                if not in_place:
                    outputs[number] = own_memory(piece, flat).view(sources[number].shape)
                elif piece.data_ptr() != sources[number].data_ptr():
                    sources[number].copy_(piece.view(sources[number].shape))
        if in_place:
            mark_written(sources)
        return tuple(outputs) if is_group else outputs[0]

    same = {**signature(sources, is_group=is_group), **reduction.same()}
    return submit(Request(kind, name, same, own=reduction.own()), process_set, sources, body)


def start_reducescatter(
    kind: str,
    tensors: Sequence[Tensor],
    reduction: Reduction,
    name: str | None,
    process_set: ProcessSet,
    rows: Sequence[Sequence[int]] | None = None,
) -> Handle:
    """Reduce-scatter one tensor, or a group of them as one operation.

    ``rows`` are how many rows each rank gets of each tensor, where they are not to be spread evenly.
    """
    what = title(kind, name)
    is_group = kind == "grouped_reducescatter"
    if reduction.op not in (Average, Sum):
        # Horovod's words.
        raise UnsupportedError(
            f"Reducescatter currently only supports AVERAGE and SUM. ({what}: hvd.{reduction.op.name})"
        )
    sources = [traveller(tensor) for tensor in tensors]
    for source in sources:
        reduction.check_dtype(source, what)
        if source.dim() == 0:
            raise ValueError(f"{what}: a scalar has no rows to scatter: pass a tensor of at least one dimension")

    def body(execution: Execution) -> Any:
        _tell_of_averaged_integers(reduction, sources, execution)
        size = execution.group.size
        row_counts = rows if rows is not None else [spread_rows(len(source), size) for source in sources]
        if isinstance(reduction.compression, OwnCompression):
            copies = [flat_of([source]).view(source.shape) for source in sources]
            words = words_of(sources, execution.what)
            results = reduce_scatter_packed(
                execution.group, reduction, copies, words, row_counts, execution.divisor, execution.what
            )
            return tuple(results) if is_group else results[0]
        outputs = list(sources)
        for members in fused(sources):
            slices = [pieces_of(sources[number], row_counts[number]) for number in members]
            parts = [flat_of([pieces[place] for pieces in slices]) for place in range(size)]
            flat = reduction.reduce_scatter(execution.group, parts, execution.divisor, execution.what)
            mine = [pieces[execution.group.rank] for pieces in slices]
            for number, piece, like in zip(members, pieces_of(flat, [m.numel() for m in mine]), mine, strict=True):
                outputs[number] = own_memory(piece, flat).view(like.shape)
        return tuple(outputs) if is_group else outputs[0]

    same = {**signature(sources, is_group=is_group), **reduction.same()}
    if rows is not None:
        same["rows"] = [list(counts) for counts in rows]
    return submit(Request(kind, name, same), process_set, sources, body)


def stand_in(kind: str, same: Any) -> Callable[[Execution], None]:
    """The body for a rank that has called `join`: it takes part, and changes nothing.

    ``same`` is that of the other ranks' request of this kind, which is ``allreduce`` or ``grouped_allreduce``; on a
    GPU it must be called, and carried out, with the rank's own as the current device.
    """
    is_group = kind == "grouped_allreduce"
    dtypes, shapes, devices = ([same[key]] if not is_group else same[key] for key in ("dtype", "shape", "device"))
    # Not to be scaled before: that would make a lowest number of the highest one.
    reduction = Reduction(
        ReduceOp[same["op"]],
        compression=COMPRESSIONS.get(same["compression"], Compression.none),
    )

    def body(execution: Execution) -> None:
        _check_stand_ins(reduction, execution)
        with torch.no_grad():
            sources = []
            for dtype_name, shape, device in zip(dtypes, shapes, devices, strict=True):
                dtype = getattr(torch, dtype_name.removeprefix("torch."))
                sources.append(torch.full(shape, reduction.neutral(dtype), dtype=dtype, device=device))
            for members in fused(sources):
                flat = flat_of([sources[number] for number in members])
                counts = [sources[number].numel() for number in members]
                reduction.all_reduce(execution.group, flat, counts, execution.divisor, execution.what)

    return body


def spread_rows(count: int, size: int) -> list[int]:
    """How many of the rows each rank gets: the first ones get one more where they do not come out even."""
    return [count // size + (rank < count % size) for rank in range(size)]


def words_of(tensors: Sequence[Tensor], what: str) -> list[str]:
    """What messages call each of the tensors of an operation."""
    return [what] if len(tensors) == 1 else [f"tensor {number} of {what}" for number in range(len(tensors))]


def _tell_of_averaged_integers(reduction: Reduction, sources: Sequence[Tensor], execution: Execution) -> None:
    """Warn once, on the first rank: Horovod truncates without a word, and the accuracy of all ranks becomes 0."""
    if (
        reduction.op is not Average
        or execution.divisor == 1
        or execution.group.rank != 0
        or _warned_of_integers.is_set()
    ):
        return
    whole = next((source.dtype for source in sources if source.dtype in WHOLE and source.dtype != torch.bool), None)
    if whole is not None:
        _warned_of_integers.set()
        log.warning(
            "%s averages integers (%s), and truncates the averages, as Horovod does: of 3 and 4 that is 3. Average "
            "tensor.float() instead, or add up with op=hvd.Sum. This is said once",
            execution.what,
            whole,
        )


def _check_stand_ins(reduction: Reduction, execution: Execution) -> None:
    """A compression of the user's own is not known to a rank that has joined; all ranks notice it alike."""
    if any(own is not None for own in execution.owns) and any(own is None for own in execution.owns):
        raise UnsupportedError(
            f"{execution.what}: a rank that has joined cannot stand in where compression={reduction.compression!r}: "
            "use one of hvd.Compression's, or no hvd.join()"
        )
