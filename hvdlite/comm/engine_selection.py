"""
Which engine is to carry all-reduces, where there are several that could: as the user says, or as is measured.

    wanted ── True: two levels, False: flat, None: both are tried out at start ── rank 0's medians decide for all

The engines themselves are in `engine` and `hierarchy`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from ..log import log
from .engine import Engine, EngineFactory
from .group import Group
from .hierarchy import HierarchicalEngineFactory, host_groups_of

_TRIAL_BYTES = (2**20, 16 * 2**20)
_WARM_UP, _TRIALS = 2, 5


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
