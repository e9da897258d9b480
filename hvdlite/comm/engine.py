"""
The `Engine` interface (a subset of c10d's ProcessGroup), and factories of torch's engines and of a single rank's.

    EngineFactory ── open ── Engine (all-reduce, broadcast, ...) ── EngineWork (under way)

What is sent through an engine, and which ranks take part, is in `group`.
hvdlite's own engine, through memory that ranks of a host share, is in `shm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from ..errors import PeerLostError
from .engine_state import EngineState
from .gloo import ConnectingRanks, Connections, open_proven, wait_for_all
from .torch_engine import TorchEngine


class PeerGoneError(PeerLostError):
    """Raised by an engine that knows which rank is gone: `group_rank`."""

    def __init__(self, message: str, group_rank: int) -> None:
        """``group_rank`` is the rank's within the engine."""
        super().__init__(message)
        self.group_rank = group_rank


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
    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        """Leave in ``output`` the combination of all ranks' parts for this one.

        ``input`` is flat, of shape ``(sum(counts),)``: a part for each rank, one after the other, of the ``counts``
        elements that all ranks name alike.
        """
        ...

    def revoke(self, reason: str, /) -> None:
        """End every wait, now and later, with a RevokedError of this reason, and begin nothing more.

        The first reason counts. Waits for nobody, and may be called by any thread. Other ranks of shared memory get
        the same error; those of gloo and NCCL lose a connection.
        """
        ...

    def quiesce(self, reason: str, /) -> None:
        """Begin nothing more, which is a RevokedError of this reason; return when what is under way is over."""
        ...


@runtime_checkable
class HasMemory(Protocol):
    """An engine that reduces tensors in memory of its own where they lie."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor of zeros there, on the CPU; None if there is no more."""
        ...


@runtime_checkable
class OnePassEngine(Protocol):
    """An engine whose all-reduce of CPU tensors divides for an average, and can leave its result in other memory.

    So a tensor that is to stay as it is need not be copied before, and an average takes no pass over it afterwards.
    Its `allreduce` knows AVG of floats, too: the sum, divided by the number of ranks.
    """

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> EngineWork:
        """Leave in ``output`` the combination of all ranks' ``input``; both are contiguous, of one dtype and size.

        Pairs up with `Engine.allreduce` on other ranks.
        """
        ...


class EngineFactory(Protocol):
    """Opens engines among a fixed set of ranks; each is a communicator of its own."""

    def open(self) -> Engine:
        """A new engine; every rank of the group must call it."""
        ...

    def close(self, engine: Engine, /) -> None:
        """Give one back; waits for nobody."""
        ...

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        """A factory of engines among some of the ranks; only they call it, and each is rank ``group_rank`` of them.

        ``token`` names their meeting place: equal on these ranks, and never used before.
        """
        ...


class SingleRankEngine:
    """The engine of a rank that has no others: every collective is done as it begins."""

    def __init__(self) -> None:
        self._state = EngineState()

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        self._state.require_open()
        return Done()

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        self._state.require_open()
        return Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        self._state.require_open()
        for output, tensor in zip(outputs, inputs, strict=True):
            output[0].copy_(tensor)
        return Done()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        self._state.require_open()
        output.copy_(input)
        return Done()

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        self._state.require_open()
        output.copy_(input)
        return Done()

    def revoke(self, reason: str, /) -> None:
        self._state.revoke(reason)

    def quiesce(self, reason: str, /) -> None:
        self._state.quiesce(reason)


class ClosedEngine:
    """The engine of a group that has been left."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        raise self.error()

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        raise self.error()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        raise self.error()

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        raise self.error()

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        raise self.error()

    def revoke(self, reason: str, /) -> None:
        return

    def quiesce(self, reason: str, /) -> None:
        return

    def error(self) -> RuntimeError:
        """What every operation raises."""
        return RuntimeError(
            "hvd.shutdown(), remove_process_set() or close() was called before: after shutdown() call "
            "hvd.init(), otherwise make the optimizer anew"
        )


class SingleRankFactory:
    """Engines for a rank that has no others."""

    def open(self) -> Engine:
        return SingleRankEngine()

    def close(self, engine: Engine, /) -> None:
        return

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        return self


_BACKEND_TYPES = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}


class Done:
    """A work that is complete when it is returned."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def allow_collectives(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let collectives on the CPU take so long; connecting, which is over, may have been given less."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


class TorchEngineFactory:
    """Process groups of all ranks: first the default one if it is ours, then further ones beside it."""

    def __init__(
        self, backend: str, ranks: ConnectingRanks, unused_default: tuple[dist.ProcessGroup, Connections] | None = None
    ) -> None:
        self.backend = backend
        self._ranks = ranks
        self._unused_default = unused_default
        self._opened = itertools.count()
        self._open: list[tuple[TorchEngine, Connections]] = []

    def open(self) -> Engine:
        if self._unused_default is not None:
            (default, connections), self._unused_default = self._unused_default, None
            return TorchEngine(default, has_nccl=_has_nccl(self.backend), cut=connections.cut)
        label = f"group{next(self._opened)}"
        wait_for_all(self._ranks, label)
        group, connections = open_proven(self._make, dist.destroy_process_group, self._ranks, label)
        engine = TorchEngine(group, has_nccl=_has_nccl(self.backend), cut=connections.cut)
        self._open.append((engine, connections))
        return engine

    def _make(self) -> dist.ProcessGroup:
        group = dist.new_group(backend=self.backend, timeout=self._ranks.init_timeout.left())
        assert isinstance(group, dist.ProcessGroup), "every rank is a member of it"
        allow_collectives(group, self._ranks.init_timeout.timeout)
        return group

    def close(self, engine: Engine, /) -> None:
        _forget_works(engine)
        # Gone already where the default group has been destroyed, and all others with it.
        for opened, connections in [each for each in list(self._open) if each[0] is engine]:
            self._open.remove((opened, connections))
            connections.cut()
            if dist.is_initialized():
                dist.destroy_process_group(opened.process_group)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        return SubsetEngineFactory(self._ranks.among(group_ranks, group_rank, token), self.backend, group_ranks)


class SubsetEngineFactory:
    """Opens process groups among a subset of ranks, which meet in a store; the others take no part in it.

    `dist.new_group` is not used: every rank of the job would have to call it for each engine, or else it tells groups
    apart by how many a rank has made.
    """

    def __init__(self, ranks: ConnectingRanks, backend: str, global_ranks: Sequence[int]) -> None:
        """``global_ranks`` are what NCCL calls these ranks when it watches over a collective."""
        self._ranks = ranks
        self._backend = backend
        self._backend_of = _backend_by_device(backend)
        self._global_ranks = list(global_ranks)
        self._opened = itertools.count()
        self._open: list[tuple[TorchEngine, Connections]] = []

    def open(self) -> Engine:
        label = f"channel{next(self._opened)}"
        wait_for_all(self._ranks, label)
        make = partial(self._make, label)
        group, connections = open_proven(make, lambda group: group.shutdown(), self._ranks, label)
        engine = TorchEngine(group, has_nccl=self._backend_of["cuda"] == "nccl", cut=connections.cut)
        self._open.append((engine, connections))
        return engine

    def _make(self, label: str) -> dist.ProcessGroup:
        store = PrefixStore(label, self._ranks.store)
        group = dist.ProcessGroup(store, self._ranks.rank, self._ranks.size)
        made: dict[str, Any] = {}
        for device, name in self._backend_of.items():
            if name not in made:
                made[name] = self._make_backend(name, PrefixStore(device, store))
            group._register_backend(torch.device(device), _BACKEND_TYPES[name], made[name])
        group._set_default_backend(_BACKEND_TYPES[self._backend_of["cpu"]])
        return group

    def close(self, engine: Engine, /) -> None:
        _forget_works(engine)
        for opened, connections in [each for each in list(self._open) if each[0] is engine]:
            self._open.remove((opened, connections))
            connections.cut()
            opened.process_group.shutdown()

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        ranks = self._ranks.among(group_ranks, group_rank, token)
        return SubsetEngineFactory(ranks, self._backend, [self._global_ranks[each] for each in group_ranks])

    def _make_backend(self, name: str, store: Store) -> Any:
        rank, size, init_timeout = self._ranks.rank, self._ranks.size, self._ranks.init_timeout
        if name == "gloo":
            gloo = dist.ProcessGroupGloo(store, rank, size, timeout=init_timeout.left())
            gloo._set_default_timeout(init_timeout.timeout)
            return gloo
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = init_timeout.timeout
        options.global_ranks_in_group = self._global_ranks
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _forget_works(engine: Engine) -> None:
    if isinstance(engine, TorchEngine):
        engine.forget()


def _has_nccl(backend: str) -> bool:
    return backend == "nccl" or "cuda:nccl" in backend.split(",")


def _backend_by_device(backend: str) -> dict[str, str]:
    """What carries CPU and CUDA tensors: of ``gloo``, or of ``cpu:gloo,cuda:nccl``."""
    if ":" not in backend:
        return {"cpu": backend, "cuda": backend}
    backend_of = dict(item.split(":") for item in backend.split(","))
    unknown = sorted(set(backend_of.values()) - _BACKEND_TYPES.keys())
    if unknown:
        raise RuntimeError(
            f"the program chose {unknown[0]} in torch.distributed.init_process_group, and process sets communicate "
            "over gloo and nccl alone: choose one of these, or leave the call to hvd.init()"
        )
    return backend_of
