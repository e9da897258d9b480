"""
Opens engines between the ranks of one host: shared memory for CPU tensors, torch's own engines for GPU tensors.

`runtime.make_world`, which knows whether a group's ranks are on one host, makes a `ShmEngineFactory`. `open` sets up a
`ShmEngine` through the store (`setup`), and for GPUs combines it with another engine in a `DeviceEngine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore

from ..comm.engine import Engine, EngineFactory, EngineWork, SingleRankFactory
from ..comm.gloo import ConnectingRanks
from ..comm.hierarchy import HostEngine
from ..log import log
from .board import Board
from .kept_memory import KeptMemory
from .segment import NoMemoryError, Segment
from .setup import exchange_control_blocks, open_segment
from .shm_engine import ShmEngine


class DeviceEngine:
    """Runs CPU tensors on one engine, and all others on another."""

    def __init__(self, cpu: ShmEngine, other: Engine) -> None:
        self.cpu = cpu
        self.other = other

    @property
    def cannot_repeat(self) -> Mapping[str, str]:
        return {**self.other.cannot_repeat, **self.cpu.cannot_repeat}

    @property
    def board(self) -> Board:
        return self.cpu.board

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.cpu.empty(numel, dtype)

    def holds(self, tensor: Tensor) -> bool:
        return self.cpu.holds(tensor)

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> EngineWork:
        return self._of(tensors[0]).allreduce(tensors, opts)

    def allreduce_into(self, output: Tensor, input: Tensor, opts: dist.AllreduceOptions, /) -> EngineWork:
        return self.cpu.allreduce_into(output, input, opts)

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> EngineWork:
        return self._of(tensors[0]).broadcast(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> EngineWork:
        return self._of(inputs[0]).allgather(outputs, inputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_counts: list[int], input_counts: list[int], opts: AllToAllOptions, /
    ) -> EngineWork:
        return self._of(input).alltoall_base(output, input, output_counts, input_counts, opts)

    def reduce_scatter_base(
        self, output: Tensor, input: Tensor, counts: list[int], opts: dist.ReduceScatterOptions, /
    ) -> EngineWork:
        return self._of(input).reduce_scatter_base(output, input, counts, opts)

    def revoke(self, reason: str, /) -> None:
        self.cpu.revoke(reason)
        self.other.revoke(reason)

    def quiesce(self, reason: str, /) -> None:
        self.cpu.quiesce(reason)
        self.other.quiesce(reason)

    def require_ended(self) -> None:
        self.other.require_ended()

    def _allgather_base(self, output: Tensor, input: Tensor, /) -> EngineWork:
        return self._host_engine_of(input)._allgather_base(output, input)

    def _of(self, tensor: Tensor) -> Engine:
        return self.cpu if tensor.device.type == "cpu" else self.other

    def _host_engine_of(self, tensor: Tensor) -> HostEngine:
        return self.cpu if tensor.device.type == "cpu" else cast("HostEngine", self.other)


class ShmEngineFactory:
    """Opens engines between ranks of one host; if one rank lacks shared memory, all ranks get torch's engines."""

    def __init__(
        self, ranks: ConnectingRanks, torchs: EngineFactory, *, for_gpus: bool, kept: KeptMemory | None = None
    ) -> None:
        """``torchs`` opens torch's engines between the same ranks, as a fallback.

        ``for_gpus``: each engine gets one of these beside it, for GPU tensors. ``kept`` is memory that outlives these
        engines; None where it ends with the last of them.
        """
        self._ranks = ranks
        self._torchs = torchs
        self._for_gpus = for_gpus
        self._kept = kept
        self._opened = itertools.count()
        # Exists only while there are engines, so that no file stays open longer.
        self._segment: Segment | NoMemoryError | None = None
        self._engines: set[ShmEngine] = set()
        self._has_warned = False

    def open(self) -> Engine:
        label, ranks = f"shm{next(self._opened)}", self._ranks
        if self._segment is None:
            self._segment = _segment_or_error(self._kept)
        try:
            store, signer = PrefixStore(label, ranks.store), ranks.signer.derive(label)
            context = exchange_control_blocks(
                store, ranks.rank, ranks.size, self._segment, ranks.init_timeout, signer, ranks.wait_until_set
            )
        except NoMemoryError as error:
            self._close_unused()
            self._warn(error)
            return self._torchs.open()
        except BaseException:
            self._close_unused()
            raise
        engine = ShmEngine(context, "hvdlite shm")
        self._engines.add(engine)
        if not self._for_gpus:
            return engine
        try:
            return DeviceEngine(engine, self._torchs.open())
        except BaseException:
            self._close_shm(engine)
            raise

    def close(self, engine: Engine, /) -> None:
        if isinstance(engine, DeviceEngine):
            self._close_shm(engine.cpu)
            self._torchs.close(engine.other)
        elif isinstance(engine, ShmEngine):
            self._close_shm(engine)
        else:
            self._torchs.close(engine)

    def _close_shm(self, engine: ShmEngine) -> None:
        engine.close()
        if self._kept is not None:
            self._kept.add_closed(engine.wait_until_quiet)
        self._engines.discard(engine)
        self._close_unused()

    def _close_unused(self) -> None:
        if not self._engines and isinstance(self._segment, Segment):
            if self._kept is None:
                self._segment.close()
            self._segment = None

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        if len(group_ranks) == 1:
            return SingleRankFactory()
        ranks = self._ranks.among(group_ranks, group_rank, token)
        torchs = self._torchs.among(group_ranks, group_rank, token)
        return ShmEngineFactory(ranks, torchs, for_gpus=self._for_gpus, kept=self._kept)

    def _warn(self, error: NoMemoryError) -> None:
        if self._ranks.rank == 0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "CPU tensors use gloo instead of shared memory, which would be faster: %s (for a container, `docker "
                "run --shm-size` sets how much there is; HVDLITE_SHM=0 turns this warning off)",
                error,
            )


def _segment_or_error(kept: KeptMemory | None) -> Segment | NoMemoryError:
    try:
        return open_segment() if kept is None else kept.segment()
    except NoMemoryError as error:
        return error
