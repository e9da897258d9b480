"""Random sequences of collectives, in orders and with delays that differ by rank, give what one process computes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_run import trials
from samples import DTYPES, close, combined, sample
from torch import Tensor
from worlds import run_worlds

import hvdlite as hvd

SIZE = 3


@dataclass(frozen=True)
class Call:
    """One collective; its name is its index in the sequence, or there is none if it is waited for at once."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: hvd.ReduceOp
    root: int
    rows: tuple[int, ...]

    def tensors(self, rank: int) -> list[Tensor]:
        if self.kind == "allgather":
            return [sample(rank, self.dtype, (self.rows[rank], *self.shape[1:]))]
        if self.kind == "alltoall":
            return [sample(rank, self.dtype, (sum(self.splits(rank)), *self.shape[1:]))]
        if self.kind == "reducescatter":
            return [sample(rank, self.dtype, (sum(self.rows), *self.shape[1:]))]
        count = 3 if self.kind == "grouped_allreduce" else 1
        return [sample(rank + number, self.dtype, self.shape) for number in range(count)]

    def splits(self, rank: int) -> list[int]:
        return [self.rows[(rank + target) % SIZE] for target in range(SIZE)]

    def begin(self, rank: int, name: str | None) -> hvd.Handle:
        mine = self.tensors(rank)
        begin = {
            "allreduce": lambda: hvd.allreduce_async(mine[0], name=name, op=self.op),
            "allreduce_": lambda: hvd.allreduce_async_(mine[0], name=name, op=self.op),
            "grouped_allreduce": lambda: hvd.grouped_allreduce_async(mine, name=name, op=self.op),
            "allgather": lambda: hvd.allgather_async(mine[0], name),
            "broadcast": lambda: hvd.broadcast_async_(mine[0], self.root, name),
            "alltoall": lambda: hvd.alltoall_async(mine[0], self.splits(rank), name),
            "reducescatter": lambda: hvd.reducescatter_async(mine[0], name, hvd.Sum),
        }
        return begin[self.kind]()

    def check(self, rank: int, result: Any) -> None:
        everybodys = [self.tensors(number) for number in range(SIZE)]
        firsts = [tensors[0] for tensors in everybodys]
        match self.kind:
            case "allreduce" | "allreduce_":
                close(result, combined(self.op, firsts))
            case "grouped_allreduce":
                for got, parts in zip(result, zip(*everybodys, strict=True), strict=True):
                    close(got, combined(self.op, parts))
            case "allgather":
                assert torch.equal(result, torch.cat(firsts))
            case "broadcast":
                assert torch.equal(result, firsts[self.root])
            case "alltoall":
                parts = [tensor.split(self.splits(source))[rank] for source, tensor in enumerate(firsts)]
                assert torch.equal(result[0], torch.cat(parts))
                assert result[1].tolist() == [len(part) for part in parts]
            case _:
                rows = [len(range(number, sum(self.rows), SIZE)) for number in range(SIZE)]
                close(result, combined(hvd.Sum, firsts).split(rows)[rank])


def _calls() -> st.SearchStrategy[Call]:
    reductions = st.sampled_from([hvd.Average, hvd.Sum, hvd.Product, hvd.Min, hvd.Max])
    kinds = ["allreduce", "allreduce_", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
    return st.builds(
        Call,
        kind=st.sampled_from(kinds),
        dtype=st.sampled_from(DTYPES),
        shape=st.sampled_from([(), (0,), (4,), (2, 3), (3, 1, 2)]),
        op=reductions,
        root=st.integers(0, SIZE - 1),
        rows=st.tuples(*[st.integers(0, 3)] * SIZE),
    ).filter(lambda call: not (call.dtype.is_complex and call.op in (hvd.Min, hvd.Max)))


# Several calls in progress at once, begun and waited for in an order that differs by rank, or one that is waited for.
WINDOWS = st.lists(st.lists(_calls(), min_size=1, max_size=6), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=trials(50, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(windows=WINDOWS, seed=st.integers(0, 2**32 - 1))
def test_mixed_collectives_in_any_order_agree_with_one_process_and_none_hangs(windows, seed):
    def rank(number):
        order = random.Random(seed + number)
        for place, window in enumerate(windows):
            names = [f"{place}.{i}" for i in range(len(window))] if len(window) > 1 else [None]
            entries = list(zip(window, names, strict=True))
            order.shuffle(entries)
            under_way = []
            for call, name in entries:
                if order.random() < 0.2:
                    time.sleep(order.random() / 200)
                under_way.append((call, call.begin(number, name)))
            order.shuffle(under_way)
            for call, handle in under_way:
                call.check(number, hvd.synchronize(handle))

    run_worlds(SIZE, rank)
