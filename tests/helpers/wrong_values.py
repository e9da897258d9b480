"""Wrong values for the arguments of public functions, and unusual values that are right, by the argument's name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdlite as hvd

NAN, INF = math.nan, math.inf
HUGE, VAST = 2**63, 10**400
# More digits than Python converts to text.
UNPRINTABLE = 10**5000


class Rude:
    """An object whose methods all raise."""

    def __repr__(self) -> str:
        raise RuntimeError("Rude has no repr")

    def __index__(self) -> int:
        raise RuntimeError("Rude is no number")

    def __float__(self) -> float:
        raise RuntimeError("Rude is no number")


class PathOfBytes:
    def __fspath__(self) -> bytes:
        return b"timeline.json"


def quantized() -> torch.Tensor:
    """Makes a tensor whose repr raises."""
    return torch.ones(2, dtype=torch.uint8).view(torch.quint8)


NO_NUMBERS: list[Any] = ["2", b"2", bytearray(b"2"), [2], (2,), {}, Rude(), torch.ones(2), 1j, np.complex64(1), object]
NO_WHOLE_NUMBERS: list[Any] = [
    *NO_NUMBERS, 0.5, 1.0, NAN, INF, np.float64(1), True, False, np.bool_(True), torch.tensor(True), quantized(),
    np.ones(2), torch.empty((), device="meta", dtype=torch.int64), -1, HUGE, VAST, UNPRINTABLE,
]  # fmt: skip
NO_SWITCHES: list[Any] = ["x", "", b"x", 2, -1, 0.5, NAN, INF, VAST, [True], {}, Rude(), torch.ones(2), quantized()]

WRONG: dict[str, list[Any]] = {
    "name": [5, 0, 1.5, True, b"a name", ["a"], ("a",), Rude(), torch.ones(1), object, UNPRINTABLE],
    "average": NO_SWITCHES,
    "op": [*NO_WHOLE_NUMBERS, 6, "Sum", hvd.ReduceOp, np.int64(7)],
    "prescale_factor": [*NO_NUMBERS, None, NAN, INF, -INF, VAST, UNPRINTABLE, torch.tensor(1 + 1j), np.ones(3)],
    "process_set": [None, 0, True, [0, 1], "global", hvd.ProcessSet([0]), hvd.ProcessSet, torch.ones(1), Rude()],
    "root_rank": [*NO_WHOLE_NUMBERS, None, 9, torch.tensor([0, 1])],
    "splits": [
        "22", "", b"22", 5, {}, Rude(), [1], [2, 2, 2], [-1, 5], [True, True], [1.5, 1.5], [NAN, 1], [HUGE, 0],
        [VAST, 0],
        [UNPRINTABLE, 0], [None, 1], ["2", "2"], [[2, 2]], [3, 3], torch.ones(2), torch.tensor([2, 2]), torch.tensor(2),
        torch.tensor([True, True]), torch.tensor([2, 2], dtype=torch.int32).to_sparse(), quantized(),
        torch.empty(2, dtype=torch.int32, device="meta"), nn.UninitializedParameter(),
    ],
    "compression": [None, "fp16", 16, True, hvd.Compression, torch.float16, [], Rude(), torch.ones(2)],
    "tensors": [
        None, 5, True, "abc", "", b"", bytearray(), torch.ones(2), np.ones(2), {"a": torch.ones(1)}, {1}, [None],
        [[1.0]],
        [torch.ones(1), "a"], [torch.ones(1), None], [Rude()], Rude(), object, (row for row in torch.ones(2)),
    ],
    "params": [
        None, 5, True, "abc", "", b"", torch.ones(2), object, [5], [("a",)], {"a": 5}, {"a": "text"},
        {"a": [torch.ones(1)]},
        {("a",): torch.ones(1)}, {1.5: torch.ones(1)}, [("a", 1.5)], [(Rude(), torch.ones(1))], Rude(),
        [[torch.ones(1)]],
    ],
    "optimizer": [None, 5, "sgd", torch.ones(1), nn.Linear(2, 2), torch.optim.SGD, Rude(), []],
    "named_parameters": [5, "abc", [5], ["a"], [("a",)], [("a", 5)], [(5, nn.Parameter(torch.ones(1)))], Rude(),
        [Rude()]],
    "backward_passes_per_step": [*NO_WHOLE_NUMBERS, 0, None],
    "gradient_predivide_factor": [*NO_NUMBERS, None, 0, -1, False, NAN, INF, VAST, UNPRINTABLE],
    "num_groups": [v for v in NO_WHOLE_NUMBERS if v is not False and not (isinstance(v, int) and v >= HUGE)],
    "groups": [v for v in NO_WHOLE_NUMBERS if not (isinstance(v, int) and v >= HUGE)] + [0, [5], ["a"], [[5]],
        [Rude()], [[Rude()]], ["w"]],
    "sparse_as_dense": [*NO_SWITCHES, None],
    "bucket_cap_mb": [*NO_NUMBERS, True, False, 0, -1, NAN, INF, VAST, HUGE, UNPRINTABLE],
    "autotune": ["x", 1, 0, None, 0.0, Rude(), torch.tensor(True), VAST],
    "step_on_arrival": ["x", 1, 0, None, 0.0, Rude(), torch.tensor(True), VAST],
    # Numbers too large for a float are infinity, with which nothing is clipped.
    "max_norm": [*NO_NUMBERS, True, False, 0, -1, NAN],
    "device": [v for v in NO_WHOLE_NUMBERS if not isinstance(v, int) or isinstance(v, bool)],
    "handle": [0, 1, HUGE, "a", b"a", [], torch.ones(1), Rude()],
    "file_path": [None, 5, True, b"a.json", ["a"], "", "a\0b.json", "/tmp/\ud800.json", PathOfBytes(), Rude(),
        torch.ones(1)],
    "ranks_or_comm": [None, 5, "01", [], [-1], [0, 0], [0.0], [True], ["0"], [VAST], [UNPRINTABLE], [None],
        Rude(), [Rude()]],
    "timeout_s": [*NO_NUMBERS, True, False, 0, -1, NAN, INF, VAST, HUGE, 1e18, UNPRINTABLE],
    "process_sets": ["all", "", 5, True, hvd.ProcessSet([0]), [5], [[0, 1]], [None], Rude(), b"dynamic", torch.ones(1)],
    "comm": ["x", b"x", 5, True, [True], [0.0], ["0"], [-1], [0, 0], [VAST], [UNPRINTABLE], [None], {}, Rude(),
        [Rude()]],
    "check_parameters": ["x", -1, 0.5, Rude(), torch.tensor(True), VAST],
    "hierarchical": ["x", 1, 0, 0.0, Rude(), torch.tensor(True), VAST],
}  # fmt: skip
WRONG["postscale_factor"] = WRONG["prescale_factor"]

# Values that Horovod accepts too, each with its meaning.
RIGHT: dict[str, list[tuple[Any, Any]]] = {
    "name": [("", ""), ("a\0b", "b"), ("ü \N{SNOWMAN}", "b"), ("\ud800", "b"), ("n" * 10_000, "b"),
        (np.str_("n"), "b")],
    "average": [(1, True), (0, False), (True, True), (np.bool_(False), False), (np.int64(1), True), (1.0, True)],
    "op": [(1, hvd.Sum), (np.int64(1), hvd.Sum), (np.uint8(0), hvd.Average), (hvd.ReduceOp.Sum, hvd.Sum)],
    "prescale_factor": [
        (2, 2.0), (np.float32(2), 2.0), (np.int64(2), 2.0), (torch.tensor(2.0), 2.0), (np.array(2.0), 2.0), (True, 1.0),
        (0, 0.0), (-1, -1.0), (HUGE, float(HUGE)),
    ],
    "root_rank": [(np.int64(0), 0), (np.int32(0), 0), (torch.tensor(0), 0), (np.array(0), 0)],
    "backward_passes_per_step": [(np.int64(1), 1)],
    "gradient_predivide_factor": [(np.float32(2), 2.0), (2, 2.0), (True, 1.0), (torch.tensor(2.0), 2.0)],
    "sparse_as_dense": [(1, True), (0, False), (np.bool_(True), True)],
    "groups": [(np.int64(1), 1), (HUGE, 1), (VAST, 1)],
    "num_groups": [(np.int64(1), 1), (False, 0)],
    "bucket_cap_mb": [(1, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (1e-9, 1.0)],
    "splits": [
        ((2, 2), [2, 2]), (np.array([2, 2]), [2, 2]), ([np.int64(2), 2], [2, 2]), ([torch.tensor(2), 2], [2, 2]),
        (torch.tensor([2, 2], dtype=torch.int32), [2, 2]), (range(2, 0, -1), [2, 1]), ([2.0, 2.0], [2, 2]),
    ],
}  # fmt: skip
RIGHT["postscale_factor"] = RIGHT["prescale_factor"]
