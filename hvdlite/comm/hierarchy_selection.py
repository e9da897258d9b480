"""
Chooses flat or hierarchical (two-level) collectives, as configured or by timing all-reduces on both.

`runtime.make_world` calls `choose_levels` for the group of all ranks. When no level is configured, and there are GPUs,
each rank times both engines, and rank 0's medians decide for all ranks. The engines are in `torch_engine` and
`hierarchy`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from ..log import log
from .engine import Engine, EngineFactory
from .group import Group
from .hierarchy import HierarchicalEngine, HostGroups, host_groups_of

_TRIAL_BYTES = (2**20, 16 * 2**20)
_WARM_UP, _TRIALS = 2, 5


class HierarchicalEngineFactory:
    """Opens two-level engines between all ranks; `among` gives flat ones for some of the ranks."""

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

        ``within`` opens the engines between the ranks of this host; by default ``flat`` opens them. ``token`` is equal
        on all ranks and never used before.
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
        """Returns a two-level engine over a flat one, which it takes over. Every rank must call it."""
        with contextlib.ExitStack() as undo:
            engines = []
            for engine_factory in (self._within, self._within, self._across):
                engines.append(engine_factory.open())
                undo.callback(engines[-1].close)
            undo.pop_all()
        scatter, gather, across = engines
        return HierarchicalEngine(flat, scatter, across, gather, self._host_groups, self._devices)

    def restrict(self, engine: HierarchicalEngine, devices: set[str]) -> None:
        """Use two levels only for tensors on ``devices``, in this engine and in all that are opened later."""
        self._devices, engine.devices = devices, frozenset(devices)

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
    """Give the group a two-level engine where that is wanted, or faster.

    Every rank must call it before making another group from this one, with equal arguments except ``within`` and
    ``device``. ``engine_factory`` is the factory that opened the group's engine. ``within`` is a better engine factory
    for the ranks of this host (shared memory), or None; CPU tensors then use two levels unless ``wanted`` is False.
    ``nodes`` are the ranks' hosts. ``wanted`` is True for two levels, False for flat, and None to measure. ``device``
    is this rank's GPU to measure on, or None on all ranks.
    """
    host_groups = host_groups_of(group.rank, nodes)
    if host_groups is None:
        if wanted and group.rank == 0:
            log.warning(
                "hierarchical all-reduces are not used: they need several hosts with the same number of ranks, at "
                "least 2 on each; these hosts have %s",
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
            # Engines made from now on do not use two levels for GPU tensors either.
            levels.restrict(engine, devices)
    except BaseException:
        engine.close_levels()
        raise
    if engine.devices:
        group.change_engines(levels, engine)
    else:
        engine.close_levels()


def fastest(engines: Sequence[Engine], group: Group, device: torch.device) -> int:
    """Returns the index of the engine with the fastest all-reduces, as rank 0 measures. Every rank must call it.

    Every engine must be between the ranks of ``group``, whose own engine sends the result. Raises CommunicationError.
    """
    try:
        medians_s = [[_median_s(engine, numel_bytes, device) for engine in engines] for numel_bytes in _TRIAL_BYTES]
    except RuntimeError as error:
        # The engine's own, where a rank is lost meanwhile.
        raise group.error_of("hvd.init()", error) from error
    # Every size has the same weight.
    shares = [sum(row[index] / min(row) for row in medians_s) for index in range(len(engines))]
    (chosen, *_) = group.all_gather_json(shares.index(min(shares)), "hvd.init()")
    if group.rank == 0:
        log.info(
            "all-reduces of %s MiB took %s ms with each engine, flat and hierarchical: engine %d is used",
            [numel_bytes // 2**20 for numel_bytes in _TRIAL_BYTES],
            [[round(1e3 * seconds, 3) for seconds in row] for row in medians_s],
            chosen + 1,
        )
    return int(chosen)


def _median_s(engine: Engine, numel_bytes: int, device: torch.device) -> float:
    from statistics import median  # noqa: PLC0415  # takes 10 ms to import, and most jobs never measure

    tensor = torch.zeros(numel_bytes // 4, device=device, dtype=torch.float32)
    took_s = []
    for _ in range(_WARM_UP + _TRIALS):
        began_s = time.perf_counter()
        engine.allreduce([tensor], dist.AllreduceOptions()).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(device)
        took_s.append(time.perf_counter() - began_s)
    return median(took_s[_WARM_UP:])
