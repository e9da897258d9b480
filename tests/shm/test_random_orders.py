"""Random sequences of collectives in shared memory, waited for in random order, give the results of a model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm.engines import begin_all_reduce, begin_broadcast, run_engines

from hvdlite.shm.control_block import PAYLOAD_BYTES
from hvdlite.shm.shm_engine import ShmEngine
from hvdlite.shm.shm_operation import CHUNK_BYTES

SIZE = 3
NUMELS = (0, 1, 5, PAYLOAD_BYTES // 8, PAYLOAD_BYTES // 8 + 1, 5000, CHUNK_BYTES // 8 + 1, CHUNK_BYTES // 2 + 3)


def values(rank: int, number: int, numel: int) -> torch.Tensor:
    return torch.arange(numel) * (rank + 1) + number


def begin(engine: ShmEngine, number: int, dice: random.Random) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """Begins an operation that is the same on all ranks, on data at other places: work, results, expected results."""
    kind, numel, root = dice.randrange(6), dice.choice(NUMELS), dice.randrange(SIZE)
    resident = [dice.random() < 0.5 for _ in range(SIZE)][engine.rank]
    ranks = range(SIZE)
    mine = values(engine.rank, number, numel)
    if resident and numel:
        memory = engine.zeros(numel, torch.int64)
        assert memory is not None
        mine = memory.copy_(mine)
    everybodys = [values(rank, number, numel) for rank in ranks]
    if kind == 0:
        return begin_all_reduce(engine, mine), [mine], [sum(everybodys, start=torch.zeros(numel, dtype=torch.int64))]
    if kind == 1:
        return begin_broadcast(engine, mine, root), [mine], [everybodys[root]]
    outputs = [torch.empty_like(mine) for _ in ranks]
    if kind == 2:
        return engine.allgather([outputs], [mine]), outputs, everybodys
    if kind == 3:
        # Each receiver gets a number of elements that depends on both ranks.
        sent = [mine[: numel * other // SIZE].clone() for other in ranks]
        outputs = [torch.empty_like(sent[engine.rank]) for _ in ranks]
        return engine.alltoall(outputs, sent), outputs, [each[: numel * engine.rank // SIZE] for each in everybodys]
    if kind == 4:
        work = engine.reduce_scatter(outputs[0], [mine + other for other in ranks], dist.ReduceOp(dist.ReduceOp.MAX))
        return work, [outputs[0]], [everybodys[-1] + engine.rank]
    return engine.barrier(), [], []


def check_sequence(seed: int, length: int) -> None:
    def on_rank(engine: ShmEngine) -> None:
        alike, own = random.Random(seed), random.Random(seed * SIZE + engine.rank)
        under_way = []
        for number in range(length):
            under_way.append(begin(engine, number, alike))
            while len(under_way) > own.randrange(25):
                work, results, expected = under_way.pop(own.randrange(len(under_way)))
                if own.random() < 0.3:
                    work.get_future().wait()
                work.wait()
                assert all(map(torch.equal, results, expected)), number
        for work, results, expected in under_way:
            work.wait()
            assert all(map(torch.equal, results, expected))

    run_engines(SIZE, on_rank)


def test_a_random_sequence_is_what_the_model_says() -> None:
    check_sequence(seed=0, length=30)


@pytest.mark.night(but=2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_so_are_more_of_them(seed: int) -> None:
    check_sequence(seed, length=150)
