"""
Process groups of `torch.distributed` as engines: gloo for tensors of the CPU, NCCL for those of GPUs.

    a call ── open? ── the process group's own operation ── TorchWork ── waits that a revocation ends, too

Where process groups come from is in `engine`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from .engine_state import EngineState
from .flat_bytes import pieces_of

# How often a wait that takes long looks whether the engine was revoked.
_LOOK = timedelta(seconds=0.1)

# c10d's words for a wait that is over before the operation is.
_NOT_DONE_YET = "Operation timed out!"

# Works that nobody has waited for are looked through when there are so many.
_MOST_PENDING = 64

_COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


class TorchEngine:
    """One process group, whose waits and operations can be brought to an end."""

    def __init__(self, process_group: Any, *, has_nccl: bool = False, cut: Callable[[], None] = lambda: None) -> None:
        """``has_nccl``: tensors of GPUs take NCCL, and not gloo; ``cut`` ends gloo's connections."""
        self.process_group = process_group
        self._has_nccl = has_nccl
        self._cut = cut
        self._state = EngineState()
        self._pending: set[TorchWork] = set()

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> TorchWork:
        self._state.require_open()
        return self._begun(self.process_group.allreduce(tensors, opts), tensors[0])

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> TorchWork:
        self._state.require_open()
        return self._begun(self.process_group.broadcast(tensors, opts), tensors[0])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> TorchWork:
        self._state.require_open()
        return self._begun(self.process_group.allgather(outputs, inputs), inputs[0])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> TorchWork:
        self._state.require_open()
        return self._begun(self.process_group.alltoall_base(output, input, output_counts, input_counts, opts), input)

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> TorchWork:
        self._state.require_open()
        return self._begun(self.process_group._allgather_base(output, input), input)

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> TorchWork | _CombinedHere:
        """NCCL's own on GPUs; over gloo an all-to-all, and what comes is combined here, in rank order.

        Gloo's own takes twice as long as that (in PyTorch 2.13, 2 and 4 ranks of one host, 4 MB), and older ones have
        none. Floats of 16 bits are added up in float32 here, and rounded once.
        """
        self._state.require_open()
        if input.is_cuda and self._has_nccl:
            if len(set(counts)) == 1:
                return self._begun(self.process_group._reduce_scatter_base(output, input, opts), input)
            parts = pieces_of(input, counts)
            return self._begun(self.process_group.reduce_scatter([output], [parts], opts), input)
        op: Any = opts.reduceOp  # torch's own stubs know only some of it
        size = len(counts)
        received = input.new_empty(size * output.numel())
        sent = self.alltoall_base(received, input, [output.numel()] * size, counts, AllToAllOptions())
        terms = pieces_of(received, [output.numel()] * size)
        return _CombinedHere(sent, terms, _COMBINE[op.op], output)

    def revoke(self, reason: str, /) -> None:
        if self._state.revoke(reason):
            self._cut()
            if self._has_nccl:
                # Where a GPU waits for another rank nothing else reaches it.
                with contextlib.suppress(RuntimeError):
                    self.process_group._get_backend(torch.device("cuda")).abort()

    def quiesce(self, reason: str, /) -> None:
        self._state.quiesce(reason)
        for work in list(self._pending):
            with contextlib.suppress(RuntimeError):
                work.wait_on_host()

    def forget(self) -> None:
        """Keep no work under way: it would keep the process group."""
        self._pending.clear()

    def _begun(self, work: Any, tensor: Tensor) -> TorchWork:
        made = TorchWork(work, tensor, self._state, self._pending)
        if len(self._pending) > _MOST_PENDING:
            self._pending -= {each for each in list(self._pending) if each.is_completed()}
        return made


class TorchWork:
    """An operation of a process group under way; any number of threads may wait for it."""

    def __init__(self, work: Any, tensor: Tensor, state: EngineState, pending: set[TorchWork]) -> None:
        """It is one of ``pending`` until somebody has waited for it."""
        self._work = work
        self._device = tensor.device
        self._state = state
        self._pending = pending
        pending.add(self)

    def wait(self) -> object:
        """Return when its tensors may be read, or raise why they never may; on a GPU have the current stream wait."""
        try:
            # A CUDA engine's wait is over at once: it is the stream that waits.
            return self._work.wait() if self._device.type == "cuda" else self._wait_on_cpu()
        except RuntimeError as error:
            raise self._state.reason_of(error) from error
        finally:
            self._pending.discard(self)

    def _wait_on_cpu(self) -> object:
        while True:
            try:
                return self._work.wait(_LOOK)
            except RuntimeError as error:
                if _NOT_DONE_YET not in str(error):
                    raise
            if self._work.is_completed():
                return self._work.wait()
            self._state.require_not_revoked()

    def wait_on_host(self) -> None:
        """Return when it is over, on a GPU too."""
        self.wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def is_completed(self) -> bool:
        return self._state.is_revoked or bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future


class _CombinedHere:
    """An all-to-all under way, after which this rank combines what has come."""

    def __init__(
        self, sent: TorchWork, terms: Sequence[Tensor], combine: Callable[..., Tensor], output: Tensor
    ) -> None:
        self._sent = sent
        self._terms = terms
        self._combine = combine
        self._output = output
        self._combining = threading.Lock()
        self._is_combined = False

    def wait(self) -> object:
        self._sent.wait()
        self._finish()
        return True

    def is_completed(self) -> bool:
        return self._sent.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._sent.get_future().then(self._finish_after)

    def _finish_after(self, sent: torch.futures.Future[Any]) -> list[Tensor]:
        sent.value()
        self._finish()
        return [self._output]

    def _finish(self) -> None:
        # Once, whoever comes first: a thread that waits, or gloo's, for the future.
        with self._combining:
            if self._is_combined:
                return
            first, *others = self._terms
            dtype = first.dtype
            is_narrow = dtype.is_floating_point and dtype.itemsize <= 2
            total = first.to(torch.float32) if is_narrow else first
            for term in others:
                self._combine(total, term.to(total.dtype), out=total)
            self._output.copy_(total)
            self._is_combined = True
