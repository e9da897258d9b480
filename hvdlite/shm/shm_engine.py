"""
`ShmEngine`: the collectives of `torch.distributed.ProcessGroup` on CPU tensors, between ranks of one host.

Each call checks its tensors, takes the next number, and puts a `ShmWork` with the steps from `collectives` in the
`Queue`. `setup` makes the engine's context. `comm.group` calls the engine, and so does the ProcessGroup in `backend`.
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
from ..comm.flat_bytes import pieces_of
from ..log import log
from . import collectives
from .arithmetic import DTYPES, Arithmetic
from .board import Board
from .control_block import LEFT, PAYLOAD_BYTES
from .queue import Queue, ShmWork
from .segment import NoMemoryError
from .shm_operation import KINDS, EngineContext, ShmOperation, Steps

_KIND = {name: number for number, name in enumerate(KINDS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
_UINT8 = _DTYPE[torch.uint8]
_LARGE = PAYLOAD_BYTES + 1  # the bytes of what is never shown in a payload


class ShmEngine(Engine):
    """Runs collectives in shared memory.

    Ranks that call different ones get a MismatchError on all. Reductions add in rank order, narrow floats in float32,
    and round once, so the bits are equal on all ranks and in every run.
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
        self._arithmetics: dict[tuple[object, torch.dtype], Arithmetic] = {}
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
        """Returns a flat tensor of zeros that is reduced in place; None, and once a warning, if there is no memory."""
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
        return self._submit(
            "all-reduce", [tensor], tensor.dtype, tensor.numel(), tensor.nbytes,
            collectives.all_reduce, tensor, source, arithmetic, arithmetic=arithmetic,
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
        return self._reduce_scatter(output, pieces_of(input.view(-1), counts), opts.reduceOp, input)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Any, whole: Tensor | None = None) -> ShmWork:
        """``parts`` are this rank's terms, one for each rank, all as large as the output.

        ``whole`` is the tensor in which the parts are contiguous, if there is one.
        """
        _require_alike(parts, self.size, output, "reduce-scatter needs an input", "output")
        return self._reduce_scatter(output, parts, op, whole)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: Any, whole: Tensor | None) -> ShmWork:
        into, *flats = [_checked(each, "reduce-scatter") for each in (output, *parts)]
        memory = None if whole is None else _checked(whole, "reduce-scatter")
        arithmetic = self._arithmetic(op, output.dtype)
        counts = [part.numel() for part in parts]
        # Uneven counts do not fit into the header that ranks compare.
        numel, root = (counts[0], 0) if len(set(counts)) == 1 else (sum(counts), _digest(counts))
        return self._submit(
            "reduce-scatter", [output], output.dtype, numel, max(flat.numel() for flat in flats),
            collectives.reduce_scatter, into, flats, arithmetic, memory, arithmetic=arithmetic, root=root,
        )  # fmt: skip

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> ShmWork:
        (tensor,) = tensors
        flat, root = _checked(tensor, "broadcast"), opts.rootRank
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast: there is no rank {root} among the {self.size} ranks")
        return self._submit(
            "broadcast", tensors, tensor.dtype, tensor.numel(), flat.numel(), collectives.broadcast, flat, root,
            root=root,
        )  # fmt: skip

    def allgather_base(self, output: Tensor, input: Tensor, /) -> ShmWork:
        return self.allgather([even_parts(output, self.size)], [input])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> ShmWork:
        ((tensor,), (parts,)) = inputs, outputs
        flat = _checked(tensor, "all-gather")
        into = [_checked(part, "all-gather") for part in parts]
        _require_alike(into, self.size, flat, "all-gather needs an output", "input")
        return self._submit(
            "all-gather", list(parts), tensor.dtype, tensor.numel(), flat.numel(), collectives.all_gather, into, flat
        )

    def allgather_parts(self, flat: Tensor, counts: Sequence[int], into: Sequence[tuple[int, Tensor]], /) -> ShmWork:
        if len(counts) != self.size or sum(counts) != flat.numel():
            raise ValueError(
                f"all-gather of parts: the counts {list(counts)} of {self.size} ranks are not those of {flat.numel()} "
                "elements: pass one for each rank"
            )
        memory, itemsize = _checked(flat, "all-gather of parts"), flat.element_size()
        bounds = [0, *itertools.accumulate(count * itemsize for count in counts)]
        wanted = [(start * itemsize, _checked(tensor, "all-gather of parts")) for start, tensor in into]
        return self._submit(
            "all-gather of parts", [tensor for _, tensor in into], flat.dtype, flat.numel(), _LARGE,
            collectives.all_gather_of_parts, memory, bounds, wanted, root=_digest(list(counts)),
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
            "all-to-all", list(outputs), inputs[0].dtype, 0, _LARGE, collectives.all_to_all, into, parts
        )

    def barrier(self) -> ShmWork:
        # A broadcast of nothing, which ends when all ranks have called it.
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._submit("barrier", [], torch.uint8, 0, 0, collectives.broadcast, nothing, 0)

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
        kind: str,
        tensors: list[Tensor],
        dtype: torch.dtype,
        numel: int,
        nbytes: int,
        collective: Callable[..., Steps],
        *arguments: object,
        arithmetic: Arithmetic | None = None,
        root: int = 0,
    ) -> ShmWork:
        """Begins ``collective`` with these arguments; what ranks compare besides is in the other ones."""
        queue = self._queue
        op_number = 0 if arithmetic is None else arithmetic.op_number
        with self._calling:
            self._state.require_open()
            number = next(self._numbers)
            operation = ShmOperation(
                self._context, number, _KIND[kind], op_number, _DTYPE.get(dtype, _UINT8), root, numel
            )
            work = ShmWork(queue, tensors, operation, collective(operation, *arguments))
            # Data that fit a payload are shown at once, so the others wait for nothing else of this rank.
            queue.submit(work, in_background=nbytes > PAYLOAD_BYTES)
        queue.run_callbacks()
        return work

    def _arithmetic(self, op: Any, dtype: torch.dtype) -> Arithmetic:
        key = (op.op, dtype)
        made = self._arithmetics.get(key)
        if made is None:
            made = self._arithmetics[key] = Arithmetic(op.op, dtype, self.size)
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
    return collectives.bytes_of(tensor)


def _require_alike(parts: Sequence[Tensor], size: int, other: Tensor, what: str, of_what: str) -> None:
    if len(parts) != size or any(part.numel() != other.numel() for part in parts):
        raise ValueError(
            f"{what} for each of the {size} ranks, as large as the {of_what}; their sizes are "
            f"{[part.numel() for part in parts]} and {other.numel()}"
        )


def _digest(counts: Sequence[int]) -> int:
    """Returns what ranks compare in the place of a root, to see that these counts are equal on all."""
    return zlib.crc32(repr(counts).encode()) & 0xFFFF


def even_parts(tensor: Tensor, size: int) -> list[Tensor]:
    """Returns one of ``size`` equal parts of a tensor for each rank, flat; a ValueError if it cannot be divided."""
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
