"""
`Engine`: what runs the collectives of a `group.Group` between its ranks; and the factories that open engines.

    Engine ─┬─ SingleRankEngine    of a rank that has no others
            ├─ TorchEngine         over a process group of torch.distributed (`torch_engine`)
            ├─ ShmEngine           in memory that the ranks of a host share (`shm`)
            └─ DelegatingEngine    has other engines run them: by device, or within hosts and then between (`hierarchy`)

The collectives have the names and arguments of c10d's ProcessGroup. Each returns an `EngineWork` at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from ..errors import CommunicationError, PeerLostError


class RevokedError(CommunicationError):
    """Raised by an engine that was quiesced or revoked. The message says by whom and why."""


class LostError(RevokedError, PeerLostError):
    """Raised by an engine that was revoked, because a rank was lost that others may wait for."""


class EngineState:
    """One engine's state: open, quiesced (it refuses new operations) or revoked (its waits fail, too).

    Of several reasons the first counts. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._revocation: str | None = None

    def require_open(self) -> None:
        """Raises a RevokedError if the engine refuses new operations, and a LostError if it was revoked."""
        if self._refusal is not None:
            raise (RevokedError if self._revocation is None else LostError)(self._refusal)

    def require_not_revoked(self) -> None:
        if self._revocation is not None:
            raise LostError(self._revocation)

    @property
    def is_revoked(self) -> bool:
        return self._revocation is not None

    def quiesce(self, reason: str) -> None:
        with self._lock:
            if self._refusal is None:
                self._refusal = reason

    def revoke(self, reason: str) -> bool:
        """Returns False if the engine was revoked before."""
        with self._lock:
            if self._revocation is not None:
                return False
            self._revocation = reason
            if self._refusal is None:
                self._refusal = reason
            return True


class PeerGoneError(PeerLostError):
    """Raised by an engine that knows which rank it has lost: ``group_rank`` is its number within the engine."""

    def __init__(self, message: str, group_rank: int) -> None:
        super().__init__(message)
        self.group_rank = group_rank


class EngineWork(Protocol):
    """An operation in progress, as the engine returns it."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> torch.futures.Future[Any]: ...


class Engine(ABC):
    """A communicator between some ranks. All of them call the same collectives in the same order."""

    ways: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """By type of device, how its tensors are sent: one name, such as gloo, or two, within hosts and between them."""

    cannot_repeat: Mapping[str, str] = MappingProxyType({})
    """By type of device, the name of what carries its tensors and cannot reduce them again once it was revoked.

    Equal on all ranks. A step in which a rank is lost is discarded there, instead of finished by the others.
    """

    reduces_in_one_pass: bool = False
    """Whether the all-reduce of CPU tensors can average floats (AVG), and there is `allreduce_into`."""

    gathers_parts: bool = False
    """Whether there is `allgather_parts`, for CPU tensors."""

    def __init__(self) -> None:
        self._state = EngineState()

    @abstractmethod
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork: ...

    @abstractmethod
    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork: ...

    @abstractmethod
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork: ...

    @abstractmethod
    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork: ...

    @abstractmethod
    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        """Reduce all ranks' parts for this rank into ``output``.

        ``input``, of shape ``(sum(counts),)``, has one part for each rank, of ``counts`` elements, equal on all ranks.
        """

    @abstractmethod
    def allgather_base(self, output: Tensor, input: Tensor, /) -> EngineWork:
        """Gather all ranks' ``input``, of equal sizes, one after the other in ``output``."""

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> EngineWork:
        """Reduce all ranks' ``input`` into ``output``; both are contiguous, of the same dtype and number of elements.

        It pairs with `allreduce` on other ranks. Only where the engine `reduces_in_one_pass`.
        """
        raise NotImplementedError

    def allgather_parts(self, flat: Tensor, counts: Sequence[int], into: Sequence[tuple[int, Tensor]], /) -> EngineWork:
        """Copy what is wanted of other ranks' parts of a flat tensor, of which each rank has as much, to its place.

        Of ``flat`` only this rank's part is read: ``counts`` are the elements of each rank's part, equal on all ranks.
        ``into`` are positions in ``flat``, each with a flat tensor for the elements there, which lie in one rank's
        part. Only where the engine `gathers_parts`.
        """
        raise NotImplementedError

    def revoke(self, reason: str, /) -> None:
        """Make every wait, now and later, raise a LostError with this reason, and refuse new operations.

        The first reason counts. It does not block, and any thread may call it. Over shared memory the other ranks get
        the same error; over gloo and NCCL they lose a connection.
        """
        self._state.revoke(reason)

    def quiesce(self, reason: str, /) -> None:
        """Refuse new operations with a RevokedError of this reason, and wait until those in progress have ended."""
        self._state.quiesce(reason)

    def require_ended(self) -> None:  # noqa: B027 - most block the thread anyway
        """Block this thread until the operations on GPUs, whose waits block a stream alone, have ended; or raise."""

    def close(self) -> None:  # noqa: B027 - nothing to let go of without others
        """Let go of the other ranks, without blocking. Nothing else of the engine is called after it."""


@runtime_checkable
class KnowsWhoBegan(Protocol):
    """An operation in progress that can report which ranks have not begun it."""

    def not_begun(self) -> list[int]:
        """Returns the group ranks that have not begun it, or an operation before it. It does not block."""
        ...


@runtime_checkable
class HasMemory(Protocol):
    """An engine that has memory of its own, in which it reduces tensors in place."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a flat CPU tensor of zeros in the engine's memory, or None if that is full."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether a flat CPU tensor is in the engine's memory, so that the engine reduces it in place."""
        ...


class SingleRankEngine(Engine):
    """The engine of a rank that has no others: every collective is complete when it returns."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        return self._done()

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        return self._done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        return self._done([(output[0], tensor) for output, tensor in zip(outputs, inputs, strict=True)])

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        return self._done([(output, input)])

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        return self._done([(output, input)])

    def allgather_base(self, output: Tensor, input: Tensor, /) -> EngineWork:
        return self._done([(output, input)])

    def _done(self, copies: Sequence[tuple[Tensor, Tensor]] = ()) -> EngineWork:
        self._state.require_open()
        for output, tensor in copies:
            output.copy_(tensor)
        return Done()


class DelegatingEngine(Engine):
    """Has other engines of the same ranks run the collectives: each the one of `engine_for` a tensor."""

    def __init__(self, *parts: Engine) -> None:
        """It takes over ``parts``: all engines that `engine_for` returns, or that are used otherwise."""
        super().__init__()
        self.parts = parts

    def engine_for(self, tensor: Tensor) -> Engine:
        """Returns the engine for collectives of this tensor; by default the first."""
        return self.parts[0]

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        return self.engine_for(tensors[0]).allreduce(tensors, opts)

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> EngineWork:
        return self.engine_for(input).allreduce_into(output, input, opts)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        return self.engine_for(tensors[0]).broadcast(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        return self.engine_for(inputs[0]).allgather(outputs, inputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        return self.engine_for(input).alltoall_base(output, input, output_counts, input_counts, opts)

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        return self.engine_for(input).reduce_scatter_base(output, input, counts, opts)

    def allgather_base(self, output: Tensor, input: Tensor, /) -> EngineWork:
        return self.engine_for(input).allgather_base(output, input)

    def allgather_parts(self, flat: Tensor, counts: Sequence[int], into: Sequence[tuple[int, Tensor]], /) -> EngineWork:
        return self.engine_for(flat).allgather_parts(flat, counts, into)

    def revoke(self, reason: str, /) -> None:
        super().revoke(reason)
        for part in self.parts:
            part.revoke(reason)

    def quiesce(self, reason: str, /) -> None:
        super().quiesce(reason)
        for part in self.parts:
            part.quiesce(reason)

    def require_ended(self) -> None:
        for part in self.parts:
            part.require_ended()

    def close(self) -> None:
        for part in self.parts:
            part.close()


class EngineFactory(Protocol):
    """Opens engines between a fixed set of ranks."""

    def open(self) -> Engine:
        """Open a new engine, which the caller closes. Every rank of the set must call it."""
        ...

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        """Returns a factory of engines between some of the ranks, in which this rank is ``group_rank``.

        Only these ranks call it. ``token`` is their prefix in the store: equal on all of them, and never used before.
        """
        ...


class SingleRankFactory:
    """Opens engines for a rank that has no others."""

    def open(self) -> Engine:
        return SingleRankEngine()

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        return self


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
