"""
The engine: collectives of `torch.distributed.ProcessGroup` on tensors of the CPU, between ranks of one host.

    a call ── checked, its turn taken ── ShmOperation ── Queue ── ShmWork

What the operations do is in `reductions` and `data_movement`; how an engine is made, in `setup`.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from ..comm.engine_state import EngineState, RevokedError
from ..comm.flat_bytes import as_bytes, pieces_of
from ..log import log
from .arithmetic import DTYPES, OPS, Arithmetic, factor_of
from .board import Board
from .control_block import LEFT, PAYLOAD_BYTES
from .data_movement import AllGather, AllToAll, Barrier, Broadcast
from .queue import CollectiveSteps, Queue
from .reductions import AllReduce, Blocks, ReduceScatter
from .segment import NoMemoryError
from .shm_operation import KINDS, EngineContext, ShmOperation
from .shm_work import ShmWork

_KIND = {name: number for number, name in enumerate(KINDS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
_OP = {op: number for number, op in enumerate(OPS)}
_UINT8 = _DTYPE[torch.uint8]


class ShmEngine:
    """Every collective returns at once; its tensors are the engine's until its work is done.

    All ranks must call the same in the same order, from one thread at a time: a MismatchError on every rank
    otherwise. Reductions add in rank order, narrow floats in float32, and are rounded once; the bits are the same on
    all ranks and in every run.
    """

    def __init__(self, context: EngineContext, name: str) -> None:
        self._context = context
        self._pid = os.getpid()
        self.rank = context.peers.rank
        self.size = context.peers.size
        self.board = Board(self.rank, list(context.peers.control_blocks))
        self._queue = Queue(context.peers, name)
        self._numbers = itertools.count(1)
        self._calling = threading.Lock()
        self._state = EngineState()
        self._blocks = Blocks(context)
        self._arithmetics: dict[tuple[object, torch.dtype, float | None], Arithmetic] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor of zeros that is reduced where it lies, for data that travel often; None if there is no memory.

        That there is none is told once, on this rank.
        """
        nbytes = numel * dtype.itemsize
        segment = self._context.segment
        try:
            return segment.allocate(nbytes).tensor[:nbytes].view(dtype)
        except NoMemoryError as error:
            if not segment.is_short:
                segment.is_short = True
                log.warning(
                    "gradients are copied to shared memory and back on rank %d of %d, and not reduced where they lie: "
                    "%s (a container has as much as `docker run --shm-size` gives it)",
                    self.rank, self.size, error,
                )  # fmt: skip
            return None

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> ShmWork:
        (tensor,) = tensors
        return self._allreduce(tensor, _flat(tensor, "all-reduce"), None, opts)

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> ShmWork:
        if (output.dtype, output.numel()) != (input.dtype, input.numel()):
            raise ValueError(
                f"all-reduce of {input.numel()} elements of {input.dtype} into {output.numel()} of {output.dtype}: "
                "both must be the same"
            )
        return self._allreduce(output, _flat(output, "all-reduce"), _flat(input, "all-reduce"), opts)

    def _allreduce(self, tensor: Tensor, flat: Tensor, source: Tensor | None, opts: dist.AllreduceOptions) -> ShmWork:
        arithmetic = self._arithmetic(opts.reduceOp, tensor.dtype)
        return self._submit(
            [tensor],
            lambda operation: AllReduce(operation, tensor, flat, arithmetic, self._blocks, source),
            "all-reduce", tensor.numel(), tensor.dtype, flat.numel(), op=opts.reduceOp,
        )  # fmt: skip

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: Sequence[int], opts: dist.ReduceScatterOptions, /
    ) -> ShmWork:
        """Rank by rank as many elements of the input as ``counts`` say, which may differ; equal on all ranks."""
        if len(counts) != self.size or sum(counts) != input.numel() or counts[self.rank] != output.numel():
            raise ValueError(
                f"reduce-scatter of {input.numel()} elements into {output.numel()} on rank {self.rank} of {self.size}: "
                f"the counts {list(counts)} do not fit"
            )
        parts = pieces_of(input.view(-1), counts)
        return self._reduce_scatter(output, parts, opts.reduceOp, _flat(input, "reduce-scatter"))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: dist.ReduceScatterOptions, /) -> ShmWork:
        return self.reduce_scatter(output, _even(input, self.size), opts.reduceOp, _flat(input, "reduce-scatter"))

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> ShmWork:
        return self.allgather([_even(output, self.size)], [input])

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Any, whole: Tensor | None = None) -> ShmWork:
        """``parts`` are this rank's terms for each rank; all are as many elements as the output.

        ``whole`` is the bytes that the parts are of, if they lie there one after the other.
        """
        if len(parts) != self.size or any(part.numel() != output.numel() for part in parts):
            raise ValueError(
                f"reduce-scatter needs an input for each of the {self.size} ranks, as large as the output of "
                f"{output.numel()} elements, and was given {[part.numel() for part in parts]}"
            )
        return self._reduce_scatter(output, parts, op, whole)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Any, whole: Tensor | None) -> ShmWork:
        into = _flat(output, "reduce-scatter")
        flats = [_flat(part, "reduce-scatter") for part in parts]
        arithmetic = self._arithmetic(op, output.dtype)
        counts = [part.numel() for part in parts]
        is_even = len(set(counts)) == 1
        # What must be equal on all ranks: uneven counts by a digest, in the place of a root.
        numel, digest = (counts[0], 0) if is_even else (sum(counts), zlib.crc32(repr(counts).encode()) & 0xFFFF)
        return self._submit(
            [output],
            lambda operation: ReduceScatter(operation, into, flats, arithmetic, whole),
            "reduce-scatter", numel, output.dtype, max(flat.numel() for flat in flats), op=op, root=digest,
        )  # fmt: skip

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> ShmWork:
        (tensor,) = tensors
        flat, root = _flat(tensor, "broadcast"), opts.rootRank
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast: there is no rank {root} among {self.size}")
        return self._submit(
            tensors, lambda operation: Broadcast(operation, flat, root),
            "broadcast", tensor.numel(), tensor.dtype, flat.numel(), root=root,
        )  # fmt: skip

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> ShmWork:
        ((tensor,), (parts,)) = inputs, outputs
        flat = _flat(tensor, "all-gather")
        into = [_flat(part, "all-gather") for part in parts]
        if len(into) != self.size or any(part.numel() != flat.numel() for part in into):
            raise ValueError(
                f"all-gather needs an output for each of the {self.size} ranks, as large as the input of "
                f"{tensor.numel()} elements, and was given {[part.numel() for part in parts]}"
            )
        return self._submit(
            list(parts), lambda operation: AllGather(operation, into, flat),
            "all-gather", tensor.numel(), tensor.dtype, flat.numel(),
        )  # fmt: skip

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> ShmWork:
        parts = _split(input, input_counts, self.size, "input")
        outputs = _split(output, output_counts, self.size, "output")
        return self.alltoall(outputs, parts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor]) -> ShmWork:
        """A part from each rank, and one to each."""
        for kind, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self.size:
                raise ValueError(f"all-to-all needs an {kind} for each of the {self.size} ranks, not {len(tensors)}")
        into, parts = ([_flat(part, "all-to-all") for part in side] for side in (outputs, inputs))
        # What parts there are differs by rank, and so stands in the operation's own table.
        return self._submit(
            list(outputs), lambda operation: AllToAll(operation, into, parts),
            "all-to-all", 0, inputs[0].dtype, PAYLOAD_BYTES + 1,
        )  # fmt: skip

    def barrier(self) -> ShmWork:
        return self._submit([], Barrier, "barrier", 0, torch.uint8, 0)

    def revoke(self, reason: str, /) -> None:
        if self._state.revoke(reason):
            self._context.peers.revoke(reason)
            self._queue.revoke(RevokedError(reason))

    def quiesce(self, reason: str, /) -> None:
        with self._calling:
            self._state.quiesce(reason)
        self._queue.drain()

    def close(self) -> None:
        """Leave the other ranks; waits for nobody."""
        # A forked child lets go of it too, and it is its parent that takes part.
        if os.getpid() != self._pid:
            return
        self._queue.close()
        peers = self._context.peers
        peers.leave(LEFT)
        peers.close()

    def _submit(
        self,
        tensors: list[Tensor],
        make: Callable[[ShmOperation], CollectiveSteps],
        kind: str,
        numel: int,
        dtype: torch.dtype,
        nbytes: int,
        *,
        op: Any = None,
        root: int = 0,
    ) -> ShmWork:
        queue = self._queue
        op_number, extra = (0, 0) if op is None else (_OP[op.op], _bits(factor_of(op)))
        with self._calling:
            self._state.require_open()
            number = next(self._numbers)
            operation = ShmOperation(
                self._context, number, _KIND[kind], op_number, _DTYPE.get(dtype, _UINT8), root, numel, extra
            )
            work = ShmWork(tensors, queue.carry_on, queue.carry_on_in_background, operation.progress)
            # The others need nothing more of what fits a payload: it is shown at once.
            queue.submit(operation, make(operation), work, in_background=nbytes > PAYLOAD_BYTES)
        queue.tell()
        return work

    def _arithmetic(self, op: Any, dtype: torch.dtype) -> Arithmetic:
        key = (op.op, dtype, factor_of(op))
        made = self._arithmetics.get(key)
        if made is None:
            made = self._arithmetics[key] = Arithmetic(op.op, dtype, self.size, key[2])
        return made


def _flat(tensor: Tensor, what: str) -> Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"{what}: hvdshm carries tensors of the CPU, and this one is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: hvdshm carries dense tensors, and this one is {tensor.layout}: gloo takes those")
    if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(
            f"{what}: the tensor of shape {tuple(tensor.shape)} is not contiguous: give tensor.contiguous()"
        )
    # `data` has a count of changes of its own: what an engine writes is no change by the program, as of any engine.
    return as_bytes(tensor.data)


def _even(tensor: Tensor, size: int) -> list[Tensor]:
    if tensor.numel() % size:
        raise ValueError(f"a tensor of {tensor.numel()} elements cannot be divided among {size} ranks")
    return pieces_of(tensor.view(-1), [tensor.numel() // size] * size)


def _bits(factor: float | None) -> int:
    """A factor as something that can be compared between ranks."""
    return 0 if factor is None else int.from_bytes(struct.pack("=d", factor), sys.byteorder)


def _split(tensor: Tensor, counts: Sequence[int], size: int, what: str) -> list[Tensor]:
    """By rows; evenly where no counts are given."""
    if not counts:
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"all-to-all: the {what} of shape {tuple(tensor.shape)} has not as much for each of {size} ranks"
            )
        counts = [tensor.shape[0] // size] * size
    if sum(counts) != tensor.shape[0]:
        raise ValueError(f"all-to-all: the {what} has {tensor.shape[0]} rows, and {list(counts)} were asked for")
    return pieces_of(tensor, counts)
