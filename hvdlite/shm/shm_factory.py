"""
Opens engines between the ranks of one host: shared memory for CPU tensors, torch's own engines for GPU tensors.

`runtime.make_world`, which knows whether a group's ranks are on one host, makes a `ShmEngineFactory`. `open` sets up a
`ShmEngine` through the store (`setup`), and for GPUs combines it with another engine in a `DeviceEngine`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from ..comm.engine import DelegatingEngine, Engine, EngineFactory, SingleRankFactory
from ..comm.gloo import ConnectingRanks
from ..log import log
from .board import Board
from .kept_memory import KeptMemory
from .segment import NoMemoryError, Segment
from .setup import exchange_control_blocks, open_segment
from .shm_engine import ShmEngine


class DeviceEngine(DelegatingEngine):
    """Runs CPU tensors on one engine, and all others on another."""

    reduces_in_one_pass = True
    gathers_parts = True

    def __init__(self, cpu: ShmEngine, other: Engine) -> None:
        super().__init__(cpu, other)
        self._cpu = cpu
        self._other = other
        self.ways = {**other.ways, **cpu.ways}
        self.cannot_repeat = {**other.cannot_repeat, **cpu.cannot_repeat}

    def engine_for(self, tensor: Tensor) -> Engine:
        return self._cpu if tensor.is_cpu else self._other

    @property
    def board(self) -> Board:
        return self._cpu.board

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._cpu.zeros(numel, dtype)

    def holds(self, tensor: Tensor) -> bool:
        return self._cpu.holds(tensor)


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
        engine = ShmEngine(context, "hvdlite shm", self._closed)
        self._engines.add(engine)
        if not self._for_gpus:
            return engine
        try:
            return DeviceEngine(engine, self._torchs.open())
        except BaseException:
            engine.close()
            raise

    def _closed(self, engine: ShmEngine) -> None:
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
