"""An optimizer outlives its world: after shutdown() and init() it averages over the ranks of the new world."""

from __future__ import annotations

import collections
import copy
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from models import Branches, Plain, assert_same_training, batches, build, part_loss, train_alone
from torch import Tensor, nn
from training import take_steps
from worlds import run_generations

import hvdlite as hvd
from hvdlite.buckets.exchange import ExchangeWork, Gradients, Links
from hvdlite.buckets.flags import ParticipantCount
from hvdlite.comm.work import Work

SIZES = [3, 2, 1, 3, 3]


def plain_sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    take_steps(optimizer, lambda step: part_loss(model, x[step, 0], y[step, 0], hvd.rank(), hvd.size()), range(len(x)))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
@pytest.mark.parametrize("options", [{}, {"step_on_arrival": True}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("kind", [Plain, Branches])
def test_in_worlds_of_other_sizes_it_trains_as_one_process_on_their_batches(kind, options, engine):
    first, (x, y) = build(kind), batches(3, 1, 12)
    alone = copy.deepcopy(first)
    for size in SIZES:
        alone = train_alone(alone, plain_sgd, x, y, size)

    def rank(generations: Iterator[int]) -> nn.Module:
        model, optimizer = copy.deepcopy(first), None
        for _ in generations:
            # The steps that a rank has missed because it was not in the world before.
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(
                    plain_sgd(list(model.parameters())), model.named_parameters(), bucket_cap_mb=0.0002, **options
                )
            train(model, optimizer, x, y)
        if options.get("step_on_arrival"):
            # In this mode, steps leave no gradients.
            for param, reference in zip(model.parameters(), alone.parameters(), strict=True):
                param.grad = reference.grad
        return model

    assert_same_training(run_generations(SIZES, rank, engine), alone)


def test_adasum_goes_on_too_and_ranks_stay_equal():
    first, (x, y) = build(Plain), batches(2, 1, 12)

    def rank(generations: Iterator[int]) -> nn.Module:
        model, optimizer = copy.deepcopy(first), None
        for _ in generations:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(plain_sgd(list(model.parameters())), op=hvd.Adasum)
            train(model, optimizer, x, y)
        return model

    models = run_generations([2, 1, 2], rank)
    for one, other, before in zip(*(model.parameters() for model in (*models, first)), strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)


class CountedWork(ExchangeWork):
    """A bucket that `Counts` averages."""

    def __init__(self, gradients: Gradients, works: Sequence[Work], times: collections.Counter[str]) -> None:
        super().__init__(gradients, works)
        self.times = times

    def finish(self, count: ParticipantCount) -> None:
        super().finish(count)
        self.times.update(self.gradients.names)


class Counts(hvd.Exchange):
    """Averages, and counts how often it has done so for each parameter."""

    def __init__(self) -> None:
        self.times: collections.Counter[str] = collections.Counter()

    def begin(self, gradients: Gradients, links: Links) -> ExchangeWork:
        return CountedWork(gradients, [links.all.all_reduce(gradients.flat, gradients.what)], self.times)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.times)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.times = collections.Counter(state)


def test_what_an_exchange_keeps_comes_along():
    first, (x, y) = build(Plain), batches(2, 1, 12)

    def rank(generations: Iterator[int]) -> dict[str, int]:
        model = copy.deepcopy(first)
        optimizer = None
        for _ in generations:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(
                    plain_sgd(list(model.parameters())), model.named_parameters(), exchange=Counts
                )
            train(model, optimizer, x, y)
        return optimizer.state_dict()["hvdlite"]["exchange"]

    first_rank, second_rank = run_generations([2, 1, 2], rank)
    assert set(first_rank.values()) == {6}
    assert set(second_rank.values()) == {4}


def test_gradients_that_were_on_their_way_are_dropped_by_zero_grad_and_else_an_error():
    def rank(generations: Iterator[int]) -> list[float]:
        param = nn.Parameter(torch.zeros(2))
        optimizer = None
        for number in generations:
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
            if number == 1:
                with pytest.raises(hvd.GradientError, match=r"call optimizer.zero_grad\(\) after hvd.init\(\)"):
                    (param * 1.0).sum().backward()
                optimizer.zero_grad()
            (param * float(hvd.rank())).sum().backward()
            if number == 1:
                optimizer.step()
        return param.tolist()

    assert run_generations([2, 2], rank) == [[-0.5, -0.5]] * 2


def test_reading_the_groups_waits_for_no_gradient_of_the_world_before():
    def rank(generations: Iterator[int]) -> list[float]:
        param = nn.Parameter(torch.zeros(2))
        optimizer = None
        for number in generations:
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.5))
            if number == 0 and hvd.rank() == 1:
                param.sum().backward()
            if number == 1:
                # As a reset callback does. Rank 0 has no gradient that it could average, and goes on to the barrier.
                for group in optimizer.param_groups:
                    group["lr"] = 1.0
                hvd.barrier()
                optimizer.zero_grad()
                (param * float(hvd.rank())).sum().backward()
                optimizer.step()
        return param.tolist()

    assert run_generations([2, 2], rank) == [[-0.5, -0.5]] * 2


def test_an_optimizer_that_has_no_parameter_left_steps_in_a_new_world():
    def rank(generations: Iterator[int]) -> float:
        param, optimizer = nn.Parameter(torch.zeros(())), None
        for _ in generations:
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
                take_steps(optimizer, lambda _: param, range(1))
                optimizer.param_groups[0]["params"].clear()
                optimizer.zero_grad()
            optimizer.step()
        return param.item()

    assert run_generations([2, 2], rank) == [-1.0] * 2


def test_without_a_new_world_it_says_so():
    hvd.init()
    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    hvd.shutdown()
    with pytest.raises(hvd.CommunicationError, match=r"call hvd\.init\(\) again after a shutdown"):
        param.sum().backward()
    param.grad = None
    hvd.init()
    param.sum().backward()
    optimizer.step()
    assert param.tolist() == [-1.0, -1.0]


def test_a_hundred_worlds_leave_nothing():
    hvd.init()
    param = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))

    def held() -> tuple[int, int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())

    for world in range(100):
        hvd.shutdown()
        hvd.init()
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if world == 9:
            before = held()
    assert param.tolist() == [-100.0, -100.0]
    # Python's caches grow. Threads and files of the world before, and of earlier tests, may take a moment to go.
    most = before[0], before[1], before[2] + 90 * 5
    give_up_at = time.monotonic() + 60
    while any(now > limit for now, limit in zip(held(), most, strict=True)):
        assert time.monotonic() < give_up_at, (before, held())
        time.sleep(0.01)


def test_a_process_set_is_to_be_added_again():
    def rank(generations: Iterator[int]) -> list[float]:
        both = hvd.ProcessSet([0, 1])
        param, optimizer = nn.Parameter(torch.zeros(2)), None
        for number in generations:
            if number != 1:
                hvd.add_process_set(both)
            if optimizer is None:
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), process_set=both)
            if number == 1:
                with pytest.raises(ValueError, match=r"call hvd.add_process_set\(process_set\)"):
                    (param * float(hvd.rank())).sum().backward()
                continue
            optimizer.zero_grad()
            (param * float(hvd.rank())).sum().backward()
            optimizer.step()
        return param.tolist()

    # The third rank is no member, and steps with its own gradients.
    assert run_generations([3, 3, 3], rank) == [[-1.0, -1.0], [-1.0, -1.0], [-4.0, -4.0]]
