"""
Chooses flat or hierarchical (two-level) collectives, as configured or by timing all-reduces on both.

    wanted ── True: two levels, False: flat, None: both are tried out at start ── rank 0's medians decide for all

The engines themselves are in `torch_engine` and `hierarchy`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from ..log import log
from .engine import Engine, EngineFactory
from .group import Group
from .hierarchy import HierarchicalEngine, HostEngine
from .host_groups import HostGroups, host_groups_of

_TRIAL_BYTES = (2**20, 16 * 2**20)
_WARM_UP, _TRIALS = 2, 5


class HierarchicalEngineFactory:
    """Engines of two levels, between all ranks; some of the ranks get flat ones."""

    def __init__(
        self,
        flat: EngineFactory,
        within: EngineFactory | None,
        host_groups: HostGroups,
        rank: int,
        token: str,
        devices: set[str],
    ) -> None:
        """``flat`` is between all ranks, each of which must make one of these, with its own ``host_groups``.

        ``within`` is between the ranks of this host, if not as the flat ones are. ``token`` is equal on all ranks
        and never used before.
        """
        self._flat = flat
        self._host_groups = host_groups
        self._devices = devices
        self._within = within or flat.among(
            host_groups.within, host_groups.within.index(rank), f"{token}.within.{host_groups.within[0]}"
        )
        self._across = flat.among(
            host_groups.across, host_groups.across.index(rank), f"{token}.across.{host_groups.across[0]}"
        )

    def open(self) -> Engine:
        return self.around(self._flat.open())

    def around(self, flat: Engine) -> HierarchicalEngine:
        """An engine of two levels over a flat one, which it takes charge of; every rank must call it."""
        with contextlib.ExitStack() as undo:
            scatter, gather = (cast(HostEngine, self._open_of(self._within, undo)) for _ in range(2))
            across = self._open_of(self._across, undo)
            undo.pop_all()
        return HierarchicalEngine(flat, scatter, across, gather, self._host_groups, self._devices)

    @staticmethod
    def _open_of(engine_factory: EngineFactory, undo: contextlib.ExitStack) -> Engine:
        engine = engine_factory.open()
        undo.callback(engine_factory.close, engine)
        return engine

    def restrict(self, engine: HierarchicalEngine, devices: set[str]) -> None:
        """Have this engine and all further ones take tensors on such devices alone."""
        self._devices, engine.devices = devices, frozenset(devices)

    def close(self, engine: Engine, /) -> None:
        assert isinstance(engine, HierarchicalEngine), "it was opened here"
        self.abandon(engine)
        self._flat.close(engine.flat)

    def abandon(self, engine: HierarchicalEngine) -> None:
        """Give back all but the flat engine."""
        engine.close()
        closes: list[Callable[[Engine], None]] = [self._within.close, self._across.close, self._within.close]
        for close, part in zip(closes, engine.parts, strict=True):
            close(part)

    def among(self, group_ranks: Sequence[int], group_rank: int, token: str, /) -> EngineFactory:
        return self._flat.among(group_ranks, group_rank, token)


def choose_levels(
    group: Group,
    engine_factory: EngineFactory,
    within: EngineFactory | None,
    nodes: Sequence[Hashable],
    wanted: bool | None,
    device: torch.device | None,
) -> None:
    """Have a group's all-reduces go within hosts and between them, where that is wanted, or is the faster.

    Every rank must call it, with equal arguments but for ``within`` and ``device``, before anything else is made of the
    group; ``engine_factory`` is where its engines come from. ``within`` is where those between the ranks of this host
    come from if they have something better: tensors of the CPU then go that way unless they are wanted not to.
    ``nodes`` tells the ranks' hosts apart. ``device`` is this rank's own GPU to measure on, or None on all ranks.
    """
    host_groups = host_groups_of(group.rank, nodes)
    if host_groups is None:
        if wanted and group.rank == 0:
            log.warning(
                "hierarchical all-reduces have no effect: they are between several hosts with as many ranks each, more "
                "than one; these have %s",
                ", ".join(str(list(nodes).count(node)) for node in dict.fromkeys(nodes)),
            )
        return
    devices = {"cpu", "cuda"} if wanted else {"cpu"} if within is not None else set()
    if wanted is False or (not devices and device is None):
        return
    (token, *_) = group.all_gather_json(uuid.uuid4().hex, "hvd.init()")
    levels = HierarchicalEngineFactory(engine_factory, within, host_groups, group.rank, token, {*devices, "cuda"})
    engine = levels.around(group.engine)
    try:
        if wanted is None and (device is None or fastest([group.engine, engine], group, device) == 0):
            # None made of them now takes tensors of GPUs.
            levels.restrict(engine, devices)
    except BaseException:
        levels.abandon(engine)
        raise
    if engine.devices:
        group.change_engines(levels, engine)
    else:
        levels.abandon(engine)


def fastest(engines: Sequence[Engine], group: Group, device: torch.device) -> int:
    """The place of the engine with the fastest all-reduces of some sizes, as rank 0 finds. Every rank must call it.

    Each is to be between the ranks of ``group``, whose own engine carries the verdict.
    """
    medians_s = [[_median_s(engine, numel_bytes, device) for engine in engines] for numel_bytes in _TRIAL_BYTES]
    # Each size counts as much as any other.
    shares = [sum(row[place] / min(row) for row in medians_s) for place in range(len(engines))]
    (chosen, *_) = group.all_gather_json(shares.index(min(shares)), "hvd.init()")
    if group.rank == 0:
        log.info(
            "all-reduces of %s MiB took %s ms by each of the ways there are: number %d is taken",
            [numel_bytes // 2**20 for numel_bytes in _TRIAL_BYTES],
            [[round(1e3 * seconds, 3) for seconds in row] for row in medians_s],
            chosen + 1,
        )
    return int(chosen)


def _median_s(engine: Engine, numel_bytes: int, device: torch.device) -> float:
    from statistics import median  # noqa: PLC0415  # takes 10 ms to import, and most jobs have one way alone

    tensor = torch.zeros(numel_bytes // 4, device=device)
    return median([_seconds_of_one(engine, tensor) for _ in range(_WARM_UP + _TRIALS)][_WARM_UP:])


def _seconds_of_one(engine: Engine, tensor: torch.Tensor) -> float:
    began_s = time.perf_counter()
    engine.allreduce([tensor], dist.AllreduceOptions()).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - began_s
