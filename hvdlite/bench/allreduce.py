"""
`allreduce`: measures an all-reduce of one tensor by hvdlite and by torch's own backend, and a copy of the same bytes.

    bus bandwidth = 2 (n - 1) / n × bytes / time        as in NCCL's tests, for n ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.group import Group
from ..comm.reduce_op import Sum
from ..errors import HvdliteError
from ..ops import api
from .arguments import count_flag, flag, read_sizes, show_bandwidth, show_ratio, show_size, show_time, some_of
from .ranks import Ranks
from .report import Case, Chart, Columns, Command, Row, TimesBySize, grouped, quartiles_of, ratio_of

# 4 B to 256 MB, by factors of 4.
DEFAULT_SIZES = tuple(4 * 4**power for power in range(14))
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64")
}
RIVALS = ("gloo", "nccl")
LIMITS = ("link", "copy", "memcpy")
_BLOCK_S = 0.02
_MOST_REPEATS = 1000
# Tensors' worth of memory per case: three tensors, the result of a call, the target of the copy, and the buffers of
# gloo and hvdlite.
_TENSORS = 7
_SIZES = flag("BYTES,…", read_sizes, "such as 4,64,4K,1M,100M (4 to 256M by factors of 4)")
_DTYPES = flag("NAME,…", some_of(DTYPES, "a dtype that can be summed"), f"of {', '.join(DTYPES)} (float32)")


@dataclass
class AllReduceComparison(Command):
    """The command `allreduce`. Each size in each dtype is one case, in which the actions take turns."""

    name = "allreduce"
    help = "time and bandwidth of an all-reduce, beside gloo or NCCL and a copy of the same bytes"
    sizes: Sequence[int] = field(default=DEFAULT_SIZES, metadata=_SIZES)
    dtypes: Sequence[str] = field(default=("float32",), metadata=_DTYPES)
    rounds: int = field(default=15, metadata=count_flag("repetitions of each"))

    columns: ClassVar[Columns] = {
        "size": lambda row: show_size(row["bytes"]),
        "dtype": lambda row: row["dtype"],
        "what": lambda row: row["what"],
        "time": lambda row: show_time(row["median_s"]),
        "quartiles": quartiles_of,
        "alg": lambda row: show_bandwidth(row["algorithm_Bps"]),
        "bus": lambda row: show_bandwidth(row["bus_Bps"]),
        "× rival": lambda row: show_ratio(row["times_faster_than_rival"]),
        "× limit": lambda row: show_ratio(row["times_the_limit"]),
    }
    text_columns = 3
    notes = (
        "× rival: how many times faster than gloo or nccl by itself. × limit: how many times as long as a copy of "
        "the same bytes (memcpy, copy on the GPU, link to the next GPU), which all ranks make at once.",
    )

    def __post_init__(self) -> None:
        self.cases = [case_of(size, dtype) for dtype in self.dtypes for size in self.sizes]
        self.turns = len(self.cases) * self.rounds

    def run(self, ranks: Ranks) -> None:
        self.job = ranks.job
        for case in self.cases:
            what, nbytes = case.label, case.about["bytes"]
            with closing(ranks.group.duplicate()) as group:
                shared_bytes = nbytes if ranks.shares_memory(group) else 0
                case.skipped = ranks.why_too_large(_TENSORS * nbytes, shared_bytes)
                if case.skipped is not None:
                    ranks.progress(what, self.rounds)
                    continue
                actions = {**_own_all_reduces(ranks, group, case), **_rivals(ranks, case)}
                blocks = {name: block_of(ranks, action) for name, action in actions.items()}
                case.samples = {name: [] for name in blocks}
                ranks.take_turns(what, blocks, self.rounds, case.samples)

    def title(self) -> str:
        return f"all-reduce between {self.job}"

    def describe(self, case: Case, name: str, medians: Mapping[str, float]) -> Row:
        rival, limit = (next((medians[each] for each in names if each in medians), None) for names in (RIVALS, LIMITS))
        is_copy, algorithm = name in LIMITS, case.about["bytes"] / medians[name]
        return {
            "what": name,
            "algorithm_Bps": algorithm,
            "bus_Bps": None if is_copy else algorithm * bus_factor(self.job.ranks),
            "times_faster_than_rival": None if is_copy else ratio_of(rival, medians[name]),
            "times_the_limit": ratio_of(medians[name], limit),
        }

    def chart(self, rows: Sequence[Row]) -> Chart:
        panels = [TimesBySize(dtype, of_dtype) for dtype, of_dtype in grouped(rows, "dtype").items()]
        caption = f"{self.title()}. Medians, of the slowest rank; shades are between quartiles."
        return Chart("How long an all-reduce takes", caption, panels)


def case_of(nbytes: int, dtype: str) -> Case:
    """Returns the case of a size, which is rounded down to whole elements, but to at least one."""
    itemsize = DTYPES[dtype].itemsize
    nbytes = max(1, nbytes // itemsize) * itemsize
    return Case(f"{show_size(nbytes)} {dtype}", {"bytes": nbytes, "dtype": dtype})


def _own_all_reduces(ranks: Ranks, group: Group, case: Case) -> dict[str, Callable[[], object]]:
    """Returns hvdlite's all-reduces by name: of an ordinary tensor, of one in shared memory, and `hvd.allreduce`.

    Every rank must call it.
    """
    dtype = DTYPES[case.about["dtype"]]
    numel = case.about["bytes"] // dtype.itemsize
    tensors = {"hvdlite": torch.zeros(numel, dtype=dtype, device=ranks.device)}
    if ranks.shares_memory(group):
        resident = group.zeros(numel, dtype, ranks.device)
        tensors = {"hvdlite resident": resident, "hvdlite any": tensors["hvdlite"]}

    def all_reduce(tensor: Tensor) -> None:
        group.all_reduce(tensor, "all-reduce of the benchmark").wait()

    actions = {name: _checked(ranks, name, tensor, all_reduce) for name, tensor in tensors.items()}
    called = torch.zeros_like(tensors["hvdlite any" if "hvdlite any" in tensors else "hvdlite"])
    return actions | {"hvdlite call": _checked(ranks, "hvdlite call", called, partial(api.allreduce, op=Sum))}


def _rivals(ranks: Ranks, case: Case) -> dict[str, Callable[[], object]]:
    """Returns the all-reduce of torch's own backend, and copies of the same bytes, by name. Every rank must call it."""
    dtype, device, rival = DTYPES[case.about["dtype"]], ranks.device, ranks.rival_name
    tensor, target = (torch.zeros(case.about["bytes"] // dtype.itemsize, dtype=dtype, device=device) for _ in range(2))
    actions = {rival: _checked(ranks, rival, tensor, partial(dist.all_reduce, group=ranks.rival()))}
    actions["memcpy" if device.type == "cpu" else "copy"] = lambda: target.copy_(tensor)
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        # All ranks copy to the next GPU at once, so the copies use the same links as a ring.
        neighbour = (device.index + 1) % torch.cuda.device_count()
        beyond = torch.zeros_like(tensor, device=torch.device("cuda", neighbour))
        actions["link"] = lambda: beyond.copy_(tensor, non_blocking=True)
    return actions


def _checked(ranks: Ranks, name: str, tensor: Tensor, reduce: Callable[[Tensor], object]) -> Callable[[], object]:
    """Returns ``reduce`` as an action on zeros. Raises HvdliteError if it does not sum ones over the ranks.

    It returns the sum, unless that is in the tensor.
    """
    tensor.fill_(1)
    returned = reduce(tensor)
    total = returned if isinstance(returned, Tensor) else tensor
    # Converted to the dtype, in which small integers wrap around and 16-bit floats round.
    expected = float(torch.tensor(ranks.size).to(tensor.dtype))
    # By the smallest and the largest, for which no tensor is made: `why_too_large` has not counted it.
    if not max(abs(float(each) - expected) for each in torch.aminmax(total)) <= 0.01 * abs(expected):
        raise HvdliteError(f"{name}: the sum of ones over {ranks.size} ranks is wrong on rank {ranks.rank}: {total}")
    tensor.zero_()
    return partial(reduce, tensor)


def block_of(ranks: Ranks, action: Callable[[], object]) -> Callable[[], float]:
    """Returns a block that repeats the action for about 20 ms, equally often on each rank. Every rank must call it."""
    ranks.barrier()
    seconds = ranks.slowest(ranks.timed(action, 2))
    repeats = max(1, min(_MOST_REPEATS, int(_BLOCK_S / max(seconds, 1e-9))))
    return lambda: ranks.timed(action, repeats)


def bus_factor(ranks: int) -> float:
    """Returns bus bandwidth / algorithm bandwidth: the number of tensors that each rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks
