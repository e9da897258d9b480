"""`hvd.stragglers` names the rank that is slow, and the phase, whatever the optimizer's options are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from long_run import trials
from torch import Tensor, nn
from worlds import PLAIN, run_worlds

import hvdlite as hvd
from hvdlite.comm.step_clock import Phase
from hvdlite.runtime.world import current_world

PHASES = ("data and forward", "backward", "optimizer")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"step_on_arrival": True},
    {"backward_passes_per_step": 2},
    {"op": hvd.Adasum},
    {"groups": 2},
)


class OwnTime:
    """A rank's time, which passes only while the rank works; its waits take none."""

    def __init__(self, extra_s: dict[str, float], dice: random.Random) -> None:
        self._now_s = 0.0
        self._extra_s = extra_s
        self._dice = dice

    def stamp(self) -> float:
        return self._now_s

    def is_known(self, stamp: float) -> bool:
        return True

    def seconds_between(self, began: float, ended: float) -> float:
        return ended - began

    def work(self, phase: str) -> None:
        self.pass_by(self._dice.uniform(0.001, 0.0011) + self._extra_s.get(phase, 0.0))

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds


class _Backward(torch.autograd.Function):
    """Works in backward, after the gradients of what comes behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own_time: OwnTime) -> Tensor:
        ctx.own_time = own_time
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.own_time.work("backward")
        return gradients[0], None


class WorkingSGD(torch.optim.SGD):
    own_time: OwnTime

    def step(self, closure: Any = None) -> Any:
        self.own_time.work("optimizer")
        return super().step(closure)


class Trainer:
    """One rank's model and optimizer, and its own time."""

    def __init__(self, options: dict[str, Any], extra_s: dict[str, float], seed: int = 0) -> None:
        self.own_time = OwnTime(extra_s, random.Random(seed))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        hvd.broadcast_parameters(self.layers.state_dict())
        sgd = WorkingSGD(self.layers.parameters(), lr=0.01)
        sgd.own_time = self.own_time
        self.optimizer = hvd.DistributedOptimizer(sgd, self.layers.named_parameters(), **options)
        self.passes = options.get("backward_passes_per_step", 1)
        self.clock = current_world().generation.watch.clock
        self.clock._timer = self.own_time
        # A reading after each step.
        self.clock.turn_on(0.0)

    def step(self) -> None:
        for _ in range(self.passes):
            self.own_time.work("data and forward")
            x = _Backward.apply(self.layers[0](torch.ones(2, 4)), self.own_time)
            self.layers[1](x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_until_all_are_compared(step: Callable[[], None]) -> list[hvd.RankPace]:
    """Takes steps on all ranks until each has the paces of all of them."""
    give_up_at_s = time.monotonic() + 60
    while True:
        for _ in range(3):
            step()
        paces = hvd.stragglers()
        # The same number of steps on all ranks; at first some are compared before others have reported.
        if hvd.allreduce(torch.tensor(len(paces)), op=hvd.Min) == hvd.size():
            return paces
        assert time.monotonic() < give_up_at_s, f"only {[pace.rank for pace in paces]} have been compared"
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(trials(3, 50) * 2))
def test_the_slow_rank_and_its_phase_are_named_on_every_rank(seed):
    dice = random.Random(seed)
    size, engine = dice.choice([2, 3]), dice.choice(["gloo", "shared memory"])
    slow, phase = dice.randrange(size), PHASES[seed % 3]
    options = dice.choice(OPTIONS)

    def rank(rank: int) -> list[hvd.RankPace]:
        trainer = Trainer(options, {phase: 0.01} if rank == slow else {}, seed)
        return step_until_all_are_compared(trainer.step)

    for paces in run_worlds(size, rank, engine=engine):
        worst, *others = paces
        assert (worst.rank, worst.phase) == (slow, phase), options
        assert worst.host == f"node{slow}"
        assert worst.cost > 0.5
        assert worst.relative_score < 0.7
        assert len(others) == size - 1
        assert all(each.cost < 0.1 for each in others)


def test_the_wait_for_an_operation_is_no_time_of_the_ranks_own():
    def rank(rank: int) -> dict[str, float]:
        trainer = Trainer({}, {})
        trainer.step()
        handle = hvd.allreduce_async(torch.ones(1), name="loss")
        with handle.timed():  # as its `wait` does, in which this rank's time would not pass
            trainer.own_time.pass_by(5.0)
        handle.wait()
        trainer.step()
        return {phase.name: trainer.clock._seconds[phase] for phase in Phase}

    for seconds in run_worlds(2, rank):
        assert seconds.pop("WAIT") == pytest.approx(5.0)
        assert all(each < 0.1 for each in seconds.values())


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}], ids=str)
def test_a_rank_that_has_joined_counts_the_steps_that_it_sits_out(options):
    def rank(rank: int) -> tuple[int, int]:
        trainer = Trainer(options, {})
        for _ in range(3 if rank == 1 else 8):
            trainer.step()
        hvd.join()
        trainer.step()
        return trainer.clock._steps, trainer.clock._sat_out

    assert run_worlds(3, rank) == [(9, 0), (9, 5), (9, 0)]


def test_two_optimizers_have_one_clock():
    def rank(rank: int) -> list[hvd.RankPace]:
        # The second one's time counts, since it is made last: it is slow in its own steps.
        first = Trainer({}, {})
        second = Trainer({}, {"optimizer": 0.01} if rank == 1 else {})

        def step() -> None:
            first.step()
            second.step()

        return step_until_all_are_compared(step)

    for paces in run_worlds(2, rank):
        assert (paces[0].rank, paces[0].phase) == (1, "optimizer")


def test_nothing_is_measured_when_it_is_turned_off():
    def rank(rank: int) -> list[hvd.RankPace]:
        clock = current_world().generation.watch.clock
        model = nn.Linear(2, 2)
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert not clock.is_on
        assert clock._steps == 0
        return hvd.stragglers()

    assert run_worlds(2, rank, replace(PLAIN, stragglers=False)) == [[], []]


def test_a_single_rank_has_nobody_to_be_compared_with():
    def rank(rank: int) -> list[hvd.RankPace]:
        trainer = Trainer({}, {})
        for _ in range(3):
            trainer.step()
        return hvd.stragglers()

    assert run_worlds(1, rank) == [[]]
