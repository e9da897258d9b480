"""
What carries a collective: a torch.distributed process group, or nobody where a rank is alone.

    Channels (where engines come from) ── open ── Engine (four operations) ── EngineWork (under way)

What is sent through an engine, and which ranks take part, is in `collective`. A backend of hvdlite's own
would be another `Engine`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions


class EngineWork(Protocol):
    """What an engine returns at once for an operation that it has begun."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> torch.futures.Future[Any]: ...


class Engine(Protocol):
    """The part of `torch.distributed.ProcessGroup` that hvdlite is built on."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork: ...
    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork: ...


class Channels(Protocol):
    """Where a group gets further engines from, between the same ranks and independent of each other."""

    def open(self) -> Engine:
        """A new engine; every rank of the group must call it."""
        ...

    def close(self, engine: Engine, /) -> None:
        """Give one back; waits for nobody."""
        ...


class AloneEngine:
    """The engine of a rank that has no others: every collective is done as it begins."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            output[0].copy_(tensor)
        return _Done()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        output.copy_(input)
        return _Done()


class ClosedEngine:
    """The engine of a group that has been left."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        raise self._error()

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        raise self._error()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        raise self._error()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError("hvd.shutdown() or close() was called before: make the optimizer anew after hvd.init()")


class AloneChannels:
    """Engines for a rank that has no others."""

    def open(self) -> Engine:
        return AloneEngine()

    def close(self, engine: Engine, /) -> None:
        return


class _Done:
    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class TorchChannels:
    """Process groups of all ranks: first the default one if it is ours, then further ones beside it."""

    def __init__(self, backend: str, timeout: timedelta, unused_default: dist.ProcessGroup | None = None) -> None:
        self._backend = backend
        self._timeout = timeout
        self._unused_default = unused_default
        self._open: list[dist.ProcessGroup] = []

    def open(self) -> Engine:
        if self._unused_default is not None:
            default, self._unused_default = self._unused_default, None
            return default
        group = dist.new_group(backend=self._backend, timeout=self._timeout)
        assert isinstance(group, dist.ProcessGroup), "every rank is a member of it"
        self._open.append(group)
        return group

    def close(self, engine: Engine, /) -> None:
        # Gone already where the default group has been destroyed, and all others with it.
        for group in [group for group in self._open if group is engine]:
            self._open.remove(group)
            if dist.is_initialized():
                dist.destroy_process_group(group)
