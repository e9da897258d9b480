"""
`allreduce`: an all-reduce of one tensor, by hvdlite and by torch's own backend, beside the copy that bounds it.

    bus bandwidth = 2 (n - 1) / n × bytes / time        as NCCL's tests define it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.engine import HasMemory
from ..comm.group import Group
from ..errors import HvdliteError
from .memory_left import why_too_large
from .plot import Chart, Line, Lines, Point, is_own
from .progress import Progress
from .quantities import name_of, show_bandwidth, show_ratio, show_ratios, show_round_time, show_size, show_time
from .ranks import Ranks
from .report import Report
from .setting import Setting
from .spread import Spread, ratio_of
from .table import Table
from .turns import Samples, take_turns, timed

RIVALS = ("gloo", "nccl")
LIMITS = ("link", "copy", "memcpy")
_BLOCK_S = 0.02
_MOST_REPEATS = 1000
# Two tensors, one to copy to, and what gloo and hvdlite take for themselves.
_TENSORS = 5
_SHARED_TENSORS = 1


@dataclass
class Case:
    """One size in one dtype; ``samples`` are seconds by what was measured, unless it was ``skipped`` for a reason."""

    numel: int
    dtype: torch.dtype
    samples: Samples = field(default_factory=dict)
    skipped: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor: at least one element's."""
        return self.numel * self.dtype.itemsize


class AllReduce:
    """The command. Each size in each dtype is a case, in which all that is measured takes turns."""

    name = "allreduce"

    def __init__(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype], rounds: int) -> None:
        self._rounds = rounds
        self.cases = [Case(max(1, size // dtype.itemsize), dtype) for dtype in dtypes for size in sizes]
        self._setting = Setting()

    @property
    def turns(self) -> int:
        """How many turns all of it takes."""
        return len(self.cases) * self._rounds

    def prepare(self, ranks: Ranks) -> None:
        """Nothing can go wrong before."""

    def run(self, ranks: Ranks, progress: Progress) -> None:
        """Measure; every rank must call it."""
        self._setting = ranks.setting
        for case in self.cases:
            progress.begin(f"{show_size(case.nbytes)} {name_of(case.dtype)}")
            with ranks.channel() as group:
                shared = _SHARED_TENSORS * case.nbytes if shares_memory(ranks, group) else 0
                case.skipped = why_too_large(ranks, _TENSORS * case.nbytes, shared)
                if case.skipped is None:
                    blocks = blocks_of(ranks, group, case)
                    case.samples = {name: [] for name in blocks}
                    take_turns(ranks, blocks, self._rounds, case.samples, progress)
                else:
                    progress.advance(self._rounds)

    def report(self) -> Report:
        """What has been measured by now."""
        return report_of(self.cases, self._setting)


def shares_memory(ranks: Ranks, group: Group) -> bool:
    """Whether tensors that lie in memory of the engine's, as gradients do, are another case than any."""
    return ranks.device.type == "cpu" and isinstance(group.engine, HasMemory)


def blocks_of(ranks: Ranks, group: Group, case: Case) -> dict[str, Callable[[], float]]:
    """What is to take turns in a case, each with as many repetitions as fill a block. Every rank must call it."""
    actions = _actions(ranks, group, case)
    return {name: block_of(ranks, action) for name, action in actions.items()}


def hvdlite_actions(ranks: Ranks, group: Group, case: Case) -> dict[str, Callable[[], object]]:
    """hvdlite's all-reduces of a case: of memory that its engine offers, where it does, and of any."""
    any_tensor = torch.zeros(case.numel, dtype=case.dtype, device=ranks.device)
    tensors = {"hvdlite": any_tensor}
    if shares_memory(ranks, group):
        resident = group.zeros(case.numel, case.dtype, ranks.device)
        tensors = {"hvdlite resident": resident, "hvdlite any": any_tensor}
    actions: dict[str, Callable[[], object]] = {}
    for name, tensor in tensors.items():
        actions[name] = partial(_all_reduce, group, tensor)
        _require_sum(ranks, name, tensor, actions[name])
    return actions


def _all_reduce(group: Group, tensor: Tensor) -> None:
    group.all_reduce(tensor, "all-reduce of the benchmark").wait()


def _actions(ranks: Ranks, group: Group, case: Case) -> dict[str, Callable[[], object]]:
    actions = hvdlite_actions(ranks, group, case)
    rival, tensor = ranks.rival(), torch.zeros(case.numel, dtype=case.dtype, device=ranks.device)
    actions[ranks.rival_name] = lambda: dist.all_reduce(tensor, group=rival)
    _require_sum(ranks, ranks.rival_name, tensor, actions[ranks.rival_name])
    target = torch.zeros_like(tensor)
    actions["memcpy" if ranks.device.type == "cpu" else "copy"] = lambda: target.copy_(tensor)
    if ranks.device.type == "cuda" and torch.cuda.device_count() > 1:
        # What a ring sends its data over, all at once.
        neighbour = (ranks.device.index + 1) % torch.cuda.device_count()
        beyond = torch.zeros_like(tensor, device=torch.device("cuda", neighbour))
        actions["link"] = lambda: beyond.copy_(tensor, non_blocking=True)
    return actions


def _require_sum(ranks: Ranks, name: str, tensor: Tensor, action: Callable[[], object]) -> None:
    """Sum once in earnest, so that nothing is measured that is wrong; the tensor is zero before and after."""
    tensor.fill_(1)
    action()
    # Integers wrap around, and 16 bits round.
    expected = torch.tensor(ranks.size).to(tensor.dtype)
    if not torch.allclose(tensor.double(), expected.double(), rtol=0.01):
        raise HvdliteError(f"{name}: the sum of ones over {ranks.size} ranks is wrong on rank {ranks.rank}: {tensor}")
    tensor.zero_()


def block_of(ranks: Ranks, action: Callable[[], object]) -> Callable[[], float]:
    """The action with as many repetitions as fill a block, the same on all ranks; each must call it."""
    ranks.barrier()
    seconds = ranks.slowest(timed(ranks, action, 2))
    repeats = max(1, min(_MOST_REPEATS, int(_BLOCK_S / max(seconds, 1e-9))))
    return lambda: timed(ranks, action, repeats)


def bus_factor(ranks: int) -> float:
    """What the algorithm bandwidth is multiplied with: what each rank sends of a ring's all-reduce, in tensors."""
    return 2 * (ranks - 1) / ranks


def report_of(cases: Sequence[Case], setting: Setting) -> Report:
    """The report of cases, as far as they have been measured."""
    rows = [row for case in cases for row in _rows(case, setting.ranks)]
    header = ["size", "dtype", "what", "time", "quartiles", "alg", "bus", "× rival", "× limit"]
    lines = [
        [
            *(show_size(row["bytes"]), row["dtype"], row["what"], show_time(row["median_s"])),
            f"{show_time(row['low_s'])} … {show_time(row['high_s'])}",
            *(show_bandwidth(row[key]) for key in ("algorithm_Bps", "bus_Bps")),
            *(show_ratio(row[key]) for key in ("times_faster_than_rival", "times_the_limit")),
        ]
        for row in rows
    ]
    skipped: list[dict[str, Any]] = [
        {"bytes": case.nbytes, "dtype": name_of(case.dtype), "why": case.skipped} for case in cases if case.skipped
    ]
    notes = [f"skipped: {show_size(each['bytes'])} {each['dtype']}: {each['why']}" for each in skipped]
    notes.append(
        "× rival: how many times faster than gloo or nccl by itself. × limit: how many times as long as a copy of the "
        "same bytes (memcpy, copy on the GPU, link to the next GPU), which all ranks make at once."
    )
    title = f"all-reduce between {setting}"
    table = Table(header, lines, words=3, title=title)
    return Report([table], {"rows": rows, "skipped": skipped}, _chart_of(rows, title), notes)


def _chart_of(rows: Sequence[dict[str, Any]], title: str) -> Chart:
    panels = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        found: dict[str, list[Point]] = {}
        for row in rows:
            if row["dtype"] == dtype:
                spread = Spread(row["median_s"], row["low_s"], row["high_s"], row["count"])
                found.setdefault(row["what"], []).append(Point(row["bytes"], spread))
        lines = [Line(what, points, is_own(what)) for what, points in found.items()]
        panels.append(Lines(dtype, "size of the tensor", "time", show_size, show_round_time, lines))
    count = max((row["count"] for row in rows), default=0)
    caption = f"{title}. Medians, of the slowest rank; shades are between quartiles; {count} turns of each."
    return Chart(_sentence_of(rows), caption, panels)


def _sentence_of(rows: Sequence[dict[str, Any]]) -> str:
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if is_own(row["what"]) and row["times_faster_than_rival"] is not None:
            ratios.setdefault(row["what"], []).append(row["times_faster_than_rival"])
    rival = next((row["what"] for row in rows if row["what"] in RIVALS), None)
    if not ratios or rival is None:
        return "How long an all-reduce takes"
    (name, much), *others = [(name, show_ratios(each)) for name, each in ratios.items()]
    return f"{name} is {much} times as fast as {rival}" + "".join(f", {name} {much}" for name, much in others)


def _rows(case: Case, ranks: int) -> list[dict[str, Any]]:
    spreads = {name: spread for name, each in case.samples.items() if (spread := Spread.of(each)) is not None}
    rival = _first_of(spreads, RIVALS)
    limit = _first_of(spreads, LIMITS)
    return [_row(case, name, spread, ranks, rival, limit) for name, spread in spreads.items()]


def _first_of(spreads: Mapping[str, Spread], names: Sequence[str]) -> Spread | None:
    return next((spreads[name] for name in names if name in spreads), None)


def _row(
    case: Case, name: str, spread: Spread, ranks: int, rival: Spread | None, limit: Spread | None
) -> dict[str, Any]:
    is_copy = name in LIMITS
    algorithm = case.nbytes / spread.median
    return {
        "bytes": case.nbytes,
        "dtype": name_of(case.dtype),
        "what": name,
        "median_s": spread.median,
        "low_s": spread.low,
        "high_s": spread.high,
        "count": spread.count,
        "algorithm_Bps": algorithm,
        "bus_Bps": None if is_copy else algorithm * bus_factor(ranks),
        "times_faster_than_rival": None if is_copy else ratio_of(rival, spread),
        "times_the_limit": ratio_of(spread, limit),
        "samples_s": case.samples[name],
    }
