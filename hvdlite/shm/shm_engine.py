"""
`ShmEngine`: the collectives of `torch.distributed.ProcessGroup` on CPU tensors, between ranks of one host.

Each call checks its tensors, takes the next number, makes a `ShmOperation` with the steps from `reductions` or
`data_movement`, and puts it in the `Queue`; it returns a `ShmWork`. `setup` makes the engine's context. `comm.group`
calls the engine, and so does the ProcessGroup in `backend`.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from .. import forks
from ..comm.engine import Engine, EngineState, LostError
from ..comm.flat_bytes import as_bytes, pieces_of
from ..log import log
from .arithmetic import DTYPES, Arithmetic, factor_of
from .board import Board
from .control_block import LEFT, PAYLOAD_BYTES
from .data_movement import AllGather, AllGatherOfParts, AllToAll, SharedBroadcast
from .queue import CollectiveSteps, Queue
from .reductions import ReduceScatter, SharedAllReduce, SmallAllReduce
from .segment import NoMemoryError
from .shm_operation import KINDS, EngineContext, ShmOperation
from .shm_work import ShmWork

_KIND = {name: number for number, name in enumerate(KINDS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
_UINT8 = _DTYPE[torch.uint8]


class ShmEngine(Engine):
    """Runs collectives in shared memory. Each returns at once; the program must not touch its tensors until it is done.

    All ranks must call the same ones in the same order, from one thread at a time; else every rank raises a
    MismatchError. Reductions add in rank order, narrow floats in float32, and round once, so the bits are equal on all
    ranks and in every run.
    """

    ways = MappingProxyType({"cpu": ("shared memory",)})
    reduces_in_one_pass = True
    gathers_parts = True

    def __init__(
        self, context: EngineContext, name: str, when_closed: Callable[[ShmEngine], None] = lambda _: None
    ) -> None:
        super().__init__()
        self._context = context
        self.rank = context.peers.rank
        self.size = context.peers.size
        self.board = Board(self.rank, list(context.peers.control_blocks))
        self._queue = Queue(context.peers, name)
        self._numbers = itertools.count(1)
        self._calling = threading.Lock()
        self._when_closed = when_closed
        self._arithmetics: dict[tuple[object, torch.dtype, float | None], Arithmetic] = {}
        # Whether this is a forked child's copy: only the parent's takes part.
        self._is_copy = False
        forks.when_forked(self)

    def leave_to_parent(self) -> None:
        self._is_copy = True
        why = forks.description()
        self._state, self._calling = EngineState(), threading.Lock()
        self._state.quiesce(why)
        self._queue.leave_to_parent(RuntimeError(why))

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a flat tensor of zeros that is reduced in place, for data reduced often; None if there is no memory.

        The first time that memory is missing on this rank it logs a warning.
        """
        nbytes = numel * dtype.itemsize
        segment = self._context.segment
        try:
            return segment.allocate(nbytes).tensor[:nbytes].view(dtype)
        except NoMemoryError as error:
            if not segment.is_short:
                segment.is_short = True
                log.warning(
                    "rank %d of %d copies gradients to shared memory and back, which is slower than reducing them in "
                    "place: %s (for a container, `docker run --shm-size` sets how much there is)",
                    self.rank, self.size, error,
                )  # fmt: skip
            return None

    def holds(self, tensor: Tensor) -> bool:
        return self._context.segment.find(tensor) is not None

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> ShmWork:
        (tensor,) = tensors
        return self._allreduce(tensor, tensor, opts)

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> ShmWork:
        if (output.dtype, output.numel()) != (input.dtype, input.numel()):
            raise ValueError(
                f"all-reduce of {input.numel()} elements of {input.dtype} into {output.numel()} of {output.dtype}: "
                "both need the same dtype and number of elements"
            )
        return self._allreduce(output, input, opts)

    def _allreduce(self, tensor: Tensor, source: Tensor, opts: dist.AllreduceOptions) -> ShmWork:
        for each in (tensor, source):
            _check(each, "all-reduce")
        arithmetic = self._arithmetic(opts.reduceOp, tensor.dtype)
        call = "all-reduce", tensor.numel(), tensor.dtype, tensor.nbytes
        if tensor.nbytes <= PAYLOAD_BYTES:
            return self._submit(
                [tensor], lambda operation: SmallAllReduce(operation, tensor, source, arithmetic),
                *call, arithmetic=arithmetic,
            )  # fmt: skip
        flat = _flat(tensor)
        flat_source = flat if source is tensor else _flat(source)
        return self._submit(
            [tensor], lambda operation: SharedAllReduce(operation, tensor, flat, arithmetic, flat_source),
            *call, arithmetic=arithmetic,
        )  # fmt: skip

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: Sequence[int], opts: dist.ReduceScatterOptions, /
    ) -> ShmWork:
        """Rank i gets ``counts[i]`` elements of the input; the counts may differ, and are equal on all ranks."""
        if len(counts) != self.size or sum(counts) != input.numel() or counts[self.rank] != output.numel():
            raise ValueError(
                f"reduce-scatter of {input.numel()} elements into {output.numel()} on rank {self.rank} of {self.size}: "
                f"the counts {list(counts)} do not match these numbers"
            )
        parts = pieces_of(input.view(-1), counts)
        return self._reduce_scatter(output, parts, opts.reduceOp, _checked(input, "reduce-scatter"))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: dist.ReduceScatterOptions, /) -> ShmWork:
        return self.reduce_scatter(output, _even(input, self.size), opts.reduceOp, _checked(input, "reduce-scatter"))

    def allgather_base(self, output: Tensor, input: Tensor, /) -> ShmWork:
        return self.allgather([_even(output, self.size)], [input])

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Any, whole: Tensor | None = None) -> ShmWork:
        """``parts`` are this rank's terms, one for each rank, all as large as the output.

        ``whole`` is the memory, as bytes, in which the parts are contiguous, if there is one.
        """
        if len(parts) != self.size or any(part.numel() != output.numel() for part in parts):
            raise ValueError(
                f"reduce-scatter needs an input for each of the {self.size} ranks, as large as the output of "
                f"{output.numel()} elements, and was given {[part.numel() for part in parts]}"
            )
        return self._reduce_scatter(output, parts, op, whole)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Any, whole: Tensor | None) -> ShmWork:
        into = _checked(output, "reduce-scatter")
        flats = [_checked(part, "reduce-scatter") for part in parts]
        arithmetic = self._arithmetic(op, output.dtype)
        counts = [part.numel() for part in parts]
        is_even = len(set(counts)) == 1
        # Uneven counts do not fit into the header that ranks compare: a CRC of them goes into its field for the root.
        numel, digest = (counts[0], 0) if is_even else (sum(counts), zlib.crc32(repr(counts).encode()) & 0xFFFF)
        return self._submit(
            [output],
            lambda operation: ReduceScatter(operation, into, flats, arithmetic, whole),
            "reduce-scatter", numel, output.dtype, max(flat.numel() for flat in flats),
            arithmetic=arithmetic, root=digest,
        )  # fmt: skip

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> ShmWork:
        (tensor,) = tensors
        flat, root = _checked(tensor, "broadcast"), opts.rootRank
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast: there is no rank {root} among the {self.size} ranks")
        return self._submit(
            tensors, lambda operation: SharedBroadcast(operation, flat, root),
            "broadcast", tensor.numel(), tensor.dtype, flat.numel(), root=root,
        )  # fmt: skip

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> ShmWork:
        ((tensor,), (parts,)) = inputs, outputs
        flat = _checked(tensor, "all-gather")
        into = [_checked(part, "all-gather") for part in parts]
        if len(into) != self.size or any(part.numel() != flat.numel() for part in into):
            raise ValueError(
                f"all-gather needs an output for each of the {self.size} ranks, as large as the input of "
                f"{tensor.numel()} elements, and was given {[part.numel() for part in parts]}"
            )
        return self._submit(
            list(parts), lambda operation: AllGather(operation, into, flat),
            "all-gather", tensor.numel(), tensor.dtype, flat.numel(),
        )  # fmt: skip

    def allgather_parts(self, flat: Tensor, counts: Sequence[int], into: Sequence[tuple[int, Tensor]], /) -> ShmWork:
        if len(counts) != self.size or sum(counts) != flat.numel():
            raise ValueError(
                f"all-gather of parts: the counts {list(counts)} of {self.size} ranks are not those of {flat.numel()} "
                "elements: pass one for each rank"
            )
        memory, itemsize = _checked(flat, "all-gather of parts"), flat.element_size()
        bounds = [0, *itertools.accumulate(count * itemsize for count in counts)]
        wanted = [(start * itemsize, _checked(tensor, "all-gather of parts")) for start, tensor in into]
        # As in `_reduce_scatter`, they do not fit into the header.
        digest = zlib.crc32(repr(list(counts)).encode()) & 0xFFFF
        return self._submit(
            [tensor for _, tensor in into], lambda operation: AllGatherOfParts(operation, memory, bounds, wanted),
            "all-gather of parts", flat.numel(), flat.dtype, PAYLOAD_BYTES + 1, root=digest,
        )  # fmt: skip

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> ShmWork:
        parts = _split(input, input_counts, self.size, "input")
        outputs = _split(output, output_counts, self.size, "output")
        return self.alltoall(outputs, parts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor]) -> ShmWork:
        """``inputs`` has a part for each rank, and ``outputs`` room for a part from each."""
        for kind, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self.size:
                raise ValueError(f"all-to-all needs an {kind} for each of the {self.size} ranks, not {len(tensors)}")
        into, parts = ([_checked(part, "all-to-all") for part in side] for side in (outputs, inputs))
        # The parts' sizes differ by rank, so the ranks compare them in a table of the operation.
        return self._submit(
            list(outputs), lambda operation: AllToAll(operation, into, parts),
            "all-to-all", 0, inputs[0].dtype, PAYLOAD_BYTES + 1,
        )  # fmt: skip

    def barrier(self) -> ShmWork:
        # A broadcast of nothing, which ends when all ranks have called it.
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._submit([], lambda operation: SharedBroadcast(operation, flat, 0), "barrier", 0, torch.uint8, 0)

    def revoke(self, reason: str, /) -> None:
        if self._state.revoke(reason):
            self._context.peers.revoke(reason)
            self._queue.revoke(LostError(reason))

    def quiesce(self, reason: str, /) -> None:
        with self._calling:
            self._state.quiesce(reason)
        self._queue.drain()

    def close(self) -> None:
        """Leave the other ranks. It does not block."""
        if not self._is_copy:
            self._queue.close()
            peers = self._context.peers
            peers.leave(LEFT)
            peers.close()
        self._when_closed(self)

    def wait_until_quiet(self) -> None:
        """Wait until no thread of this process writes to other ranks' memory any more. Call it after `close`."""
        if not self._is_copy:
            self._queue.wait_until_idle()

    def _submit(
        self,
        tensors: list[Tensor],
        make: Callable[[ShmOperation], CollectiveSteps],
        kind: str,
        numel: int,
        dtype: torch.dtype,
        nbytes: int,
        *,
        arithmetic: Arithmetic | None = None,
        root: int = 0,
    ) -> ShmWork:
        queue = self._queue
        op_number, extra = (0, 0) if arithmetic is None else (arithmetic.op_number, arithmetic.factor_bits)
        with self._calling:
            self._state.require_open()
            number = next(self._numbers)
            operation = ShmOperation(
                self._context, number, _KIND[kind], op_number, _DTYPE.get(dtype, _UINT8), root, numel, extra
            )
            work = ShmWork(tensors, queue.carry_on, queue.carry_on_in_background, operation)
            # Data that fit a payload are shown at once, so the others wait for nothing else of this rank.
            queue.submit(operation, make(operation), work, in_background=nbytes > PAYLOAD_BYTES)
        queue.run_callbacks()
        return work

    def _arithmetic(self, op: Any, dtype: torch.dtype) -> Arithmetic:
        kind, factor = op.op, factor_of(op)
        key = (kind, dtype, factor)
        made = self._arithmetics.get(key)
        if made is None:
            made = self._arithmetics[key] = Arithmetic(kind, dtype, self.size, factor)
        return made


def _check(tensor: Tensor, what: str) -> None:
    if not tensor.is_cpu:
        raise ValueError(f"{what}: hvdshm supports only CPU tensors, and this one is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what}: hvdshm supports only dense tensors, and this one is {tensor.layout}: use gloo")
    if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(
            f"{what}: the tensor of shape {tuple(tensor.shape)} is not contiguous: pass tensor.contiguous()"
        )


def _checked(tensor: Tensor, what: str) -> Tensor:
    """Returns the tensor's memory as bytes; a ValueError if a collective cannot use the tensor."""
    _check(tensor, what)
    return _flat(tensor)


def _flat(tensor: Tensor) -> Tensor:
    # `data` has a version counter of its own, so autograd does not count the engine's writes as changes by the program.
    return as_bytes(tensor.data)


def _even(tensor: Tensor, size: int) -> list[Tensor]:
    if tensor.numel() % size:
        raise ValueError(f"a tensor of {tensor.numel()} elements cannot be divided evenly among {size} ranks")
    return pieces_of(tensor.view(-1), [tensor.numel() // size] * size)


def _split(tensor: Tensor, counts: Sequence[int], size: int, what: str) -> list[Tensor]:
    """Splits by rows; evenly if there are no counts."""
    if not counts:
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"all-to-all: the {what} of shape {tuple(tensor.shape)} cannot be divided evenly among {size} ranks"
            )
        counts = [tensor.shape[0] // size] * size
    if sum(counts) != tensor.shape[0]:
        raise ValueError(
            f"all-to-all: the {what} has {tensor.shape[0]} rows, and the counts {list(counts)} have another sum"
        )
    return pieces_of(tensor, counts)
