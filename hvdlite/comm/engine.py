"""
The `Engine` interface (a subset of c10d's ProcessGroup), and the factories that open engines on gloo and NCCL.

An `EngineFactory` opens an `Engine`, whose operations return an `EngineWork` at once. `SingleRankEngine` serves a rank
that has no others, and `ClosedEngine` a group that has been closed. `group.Group` calls the engines; the engine over
process groups is in `torch_engine`, and the one over shared memory in `shm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from ..errors import CommunicationError, PeerLostError, lack_of
from .ending_store import EndingStore
from .engine_state import EngineState
from .gloo import ConnectingRanks, Connections, make_gloo, open_proven, wait_for_all
from .torch_engine import TorchEngine


class PeerGoneError(PeerLostError):
    """Raised by an engine that knows which rank it has lost: ``group_rank``."""

    def __init__(self, message: str, group_rank: int) -> None:
        """``group_rank`` is the lost rank's number within the engine."""
        super().__init__(message)
        self.group_rank = group_rank


class EngineWork(Protocol):
    """An operation in progress, as the engine returns it."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> torch.futures.Future[Any]: ...


class Engine(Protocol):
    """The part of `torch.distributed.ProcessGroup` that hvdlite uses."""

    @property
    def cannot_repeat(self) -> Mapping[str, str]:
        """By type of device, the name of what carries its tensors and cannot reduce them again once it was revoked.

        Equal on all ranks. A step in which a rank is lost is discarded there, instead of finished by the others.
        """
        ...

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork: ...
    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork: ...
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork: ...
    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        """Reduce all ranks' parts for this rank into ``output``.

        ``input`` is flat, of shape ``(sum(counts),)``: one part for each rank, in rank order. ``counts`` are the parts'
        numbers of elements, and must be equal on all ranks.
        """
        ...

    def revoke(self, reason: str, /) -> None:
        """Make every wait, now and later, raise a LostError with this reason, and refuse new operations.

        The first reason counts. It does not block, and any thread may call it. Over shared memory the other ranks get
        the same error; over gloo and NCCL they lose a connection.
        """
        ...

    def quiesce(self, reason: str, /) -> None:
        """Refuse new operations with a RevokedError of this reason, and wait until those in progress have ended."""
        ...

    def require_ended(self) -> None:
        """Block this thread until the operations on GPUs have ended, or raise the error of one.

        Their own waits block the current stream alone.
        """
        ...


@runtime_checkable
class KnowsWhoBegan(Protocol):
    """An operation in progress that can report which ranks have not begun it."""

    def not_begun(self) -> list[int]:
        """Returns the group ranks that have not begun it, or an operation before it. It does not block."""
        ...


@runtime_checkable
class HasMemory(Protocol):
    """An engine that has memory of its own, in which it reduces tensors in place."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a flat CPU tensor of zeros in the engine's memory, or None if that is full."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether a flat CPU tensor is in the engine's memory, so that the engine reduces it in place."""
        ...


@runtime_checkable
class OnePassEngine(Protocol):
    """An engine whose all-reduce of CPU tensors can average, and can write its result to another tensor.

    So the caller needs no copy of a tensor that has to stay unchanged, and no second pass to divide. Its `allreduce`
    also takes AVG of floats: the sum, divided by the number of ranks.
    """

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> EngineWork:
        """Reduce all ranks' ``input`` into ``output``; both are contiguous, of the same dtype and number of elements.

        It pairs with `Engine.allreduce` on other ranks.
        """
        ...


class EngineFactory(Protocol):
    """Opens engines between a fixed set of ranks. Each engine is a separate communicator."""

    def open(self) -> Engine:
        """Open a new engine. Every rank of the set must call it."""
        ...

    def close(self, engine: Engine, /) -> None:
        """Close one of its engines. It does not block."""
        ...

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        """Returns a factory of engines between some of the ranks, in which this rank is ``group_rank``.

        Only these ranks call it. ``token`` is their prefix in the store: equal on all of them, and never used before.
        """
        ...


class SingleRankEngine:
    """The engine of a rank that has no others: every collective is complete when it returns."""

    cannot_repeat: Mapping[str, str] = MappingProxyType({})

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

    def require_ended(self) -> None:
        return


class ClosedEngine:
    """Replaces the engine of a closed group: every operation raises an error."""

    cannot_repeat: Mapping[str, str] = MappingProxyType({})

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

    def require_ended(self) -> None:
        raise self.error()

    def error(self) -> RuntimeError:
        """Returns the error that every operation raises."""
        return RuntimeError(
            "hvd.shutdown(), hvd.remove_process_set() or the optimizer's close() was called before: call hvd.init() "
            "again after a shutdown, else make a new optimizer"
        )


class SingleRankFactory:
    """Opens engines for a rank that has no others."""

    def open(self) -> Engine:
        return SingleRankEngine()

    def close(self, engine: Engine, /) -> None:
        return

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        return self


_BACKEND_TYPES = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}


class Done:
    """An operation that is already complete."""

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def allow_collectives(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the CPU collectives of ``group``; connecting, which is over, may have had a shorter one."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


class TorchEngineFactory:
    """Opens engines between all ranks: first on the default process group if hvdlite made it, then on new groups."""

    def __init__(
        self, backend: str, ranks: ConnectingRanks, unused_default: tuple[dist.ProcessGroup, Connections] | None = None
    ) -> None:
        """``backend`` is ``gloo``, or a map such as ``cpu:gloo,cuda:nccl``; a RuntimeError for another backend in the
        map.

        ``unused_default`` is the default process group that hvdlite has made, with its connections.
        """
        self.backend = backend
        self._unused_default = unused_default
        self._further = SubsetEngineFactory(ranks, backend, range(ranks.size))

    def open(self) -> Engine:
        if self._unused_default is None:
            return self._further.open()
        (default, connections), self._unused_default = self._unused_default, None
        return TorchEngine(default, has_nccl=_has_nccl(self.backend), cut=connections.cut)

    def close(self, engine: Engine, /) -> None:
        self._further.close(engine)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        return self._further.among(group_ranks, group_rank, token)


class SubsetEngineFactory:
    """Opens process groups between some of the ranks, or all, over a store of their own.

    It does not use `dist.new_group`, which every rank of the job would have to call for each engine, in one order with
    the program's own calls, since torch numbers groups by how many a rank has made. So the program may call
    `dist.new_group` at any time, whatever other threads open here.
    """

    def __init__(self, ranks: ConnectingRanks, backend: str, global_ranks: Sequence[int]) -> None:
        """``global_ranks`` are the ranks' numbers in the job, which NCCL's watchdog reports."""
        self._ranks = ranks
        self._backend = backend
        self._backend_of = _backend_by_device(backend)
        self._global_ranks = list(global_ranks)
        self._opened = itertools.count()
        self._open: list[tuple[TorchEngine, Connections]] = []
        # As long as the groups, which refer to them.
        self._stores: list[EndingStore] = []

    def open(self) -> Engine:
        label = f"channel{next(self._opened)}"
        wait_for_all(self._ranks, label)
        try:
            group, connections = open_proven(
                partial(self._make, label), lambda made: made.shutdown(), self._ranks, label
            )
        except CommunicationError:
            raise
        except (OSError, RuntimeError) as error:
            # Torch's own, where a rank is lost while these connect.
            why = lack_of(error) or (
                f"one of them has ended or cannot be reached; look at their output for the cause ({error})"
            )
            own = self._ranks.names[self._ranks.rank]
            raise CommunicationError(f"{own} could not connect to the other ranks: {why}") from error
        engine = TorchEngine(group, has_nccl=self._backend_of["cuda"] == "nccl", cut=connections.cut)
        self._open.append((engine, connections))
        return engine

    def _make(self, label: str, connections: Connections) -> dist.ProcessGroup:
        store = PrefixStore(label, self._ranks.store)
        group = dist.ProcessGroup(store, self._ranks.rank, self._ranks.size)
        made: dict[str, Any] = {}
        for device, name in self._backend_of.items():
            if name not in made:
                made[name] = self._make_backend(name, PrefixStore(device, store), connections)
            group._register_backend(torch.device(device), _BACKEND_TYPES[name], made[name])
        group._set_default_backend(_BACKEND_TYPES[self._backend_of["cpu"]])
        return group

    def close(self, engine: Engine, /) -> None:
        _forget_works(engine)
        for opened, connections in [each for each in list(self._open) if each[0] is engine]:
            self._open.remove((opened, connections))
            connections.shut_down()
            opened.process_group.shutdown()

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        ranks = self._ranks.among(group_ranks, group_rank, token)
        return SubsetEngineFactory(ranks, self._backend, [self._global_ranks[each] for each in group_ranks])

    def _make_backend(self, name: str, store: Store, connections: Connections) -> Any:
        rank, size, init_timeout = self._ranks.rank, self._ranks.size, self._ranks.init_timeout
        if name == "gloo":
            # Held until gloo has connected.
            ending = EndingStore(store, init_timeout.left(), self._ranks.store_wait())
            gloo = make_gloo(ending, rank, size, init_timeout.left(), connections)
            gloo._set_default_timeout(init_timeout.timeout)
            self._stores.append(ending)
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
    """Returns the backend of CPU and of CUDA tensors, from ``gloo`` or from ``cpu:gloo,cuda:nccl``."""
    if ":" not in backend:
        return {"cpu": backend, "cuda": backend}
    backend_of = dict(item.split(":") for item in backend.split(","))
    unknown = sorted(set(backend_of.values()) - _BACKEND_TYPES.keys())
    if unknown:
        raise RuntimeError(
            f"torch.distributed.init_process_group was called with the backend {unknown[0]}, and hvdlite supports only "
            "gloo and nccl: choose one of these, or let hvd.init() call init_process_group"
        )
    return backend_of
