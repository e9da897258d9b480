"""`torch.distributed.checkpoint` has an optimizer without state take a step, which is none of training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from worlds import run_worlds

import hvdlite as hvd

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    # Its first step is another one than later ones.
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    # Its state begins with the learning rate.
    "Rprop": torch.optim.Rprop,
}


MODEL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def model_of() -> nn.Module:
    return copy.deepcopy(MODEL)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    model(batch).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("shard", [None, "world"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_been_taken_though_one_rank_alone_takes_it(name, shard):
    def train(rank: int) -> None:
        found = []
        for asks in (False, True):
            model = model_of()
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), shard=shard)
            if asks and rank == 1:
                before = weights(model)
                pattern = dcp.get_optimizer_state_dict(model, optimizer)
                assert pattern["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
                assert name == "SGD" or pattern["state"]["0.weight"]
                assert_same(weights(model), before)
                assert optimizer.state_dict()["state"] == {}, "as the program itself sees it"
            for number in range(3):
                take_step(model, optimizer, rank, number)
            found.append(weights(model))
        assert_same(*found)

    run_worlds(2, train)


@pytest.mark.parametrize("shard", [None, "world"])
def test_what_is_loaded_into_it_stays(shard):
    def train(rank: int) -> None:
        model, other = model_of(), model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard=shard)
        later = hvd.DistributedOptimizer(torch.optim.AdamW(other.parameters()), shard=shard)
        for number in range(2):
            take_step(model, optimizer, rank, number)
        optimizer.consolidate_state_dict(to=None)
        saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
        pattern: dict[str, Any] = dcp.get_optimizer_state_dict(other, later)
        assert pattern["state"].keys() == saved["state"].keys()
        dcp.set_optimizer_state_dict(other, later, saved)
        other.load_state_dict(model.state_dict())
        for number in range(2, 4):
            take_step(model, optimizer, rank, number)
            take_step(other, later, rank, number)
        assert_same(weights(model), weights(other))

    run_worlds(2, train)


def test_with_masters_it_has_these_and_is_in_float32():
    def train(rank: int) -> None:
        model = model_of().bfloat16()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard="world", master=True)
        pattern: dict[str, Any] = dcp.get_optimizer_state_dict(model, optimizer)
        for name, param in model.named_parameters():
            state = pattern["state"][name]
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
            assert all(value.dtype == torch.float32 for value in state.values())
            assert torch.equal(state["master"], param.float())

    run_worlds(2, train)


def test_a_first_step_of_training_is_none_of_it_whoever_calls_it():
    def _init_optim_state(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    model = model_of()
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    _init_optim_state(optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 1
