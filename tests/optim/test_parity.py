"""Several ranks compute what one process computes on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    MODELS,
    Branches,
    MixedTypes,
    Plain,
    adamw,
    assert_same_training,
    batches,
    build,
    sgd,
    train_alone,
    train_rank,
)
from ranks import run_ranks
from torch import nn
from training import wrap

import hvdlite as hvd
from hvdlite.comm.group import Group

SIZES = [1, 2, pytest.param(3, marks=pytest.mark.slow), 4]


@pytest.mark.night(but=20)
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_together_match_one_process_on_the_whole_batch(kind, size, passes, make):
    # One step for models with bf16: its rounding would affect all other parameters from the second step on.
    steps = 1 if kind is MixedTypes else 3
    model, (x, y) = build(kind), batches(steps, passes, 4 * size)
    reference = train_alone(model, make, x, y, size)
    assert_same_training(run_ranks(size, lambda group: train_rank(group, model, make, x, y)), reference)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("option", [{"gradient_predivide_factor": 2.5}, {"groups": 2}, {"bucket_cap_mb": 25.0}])
def test_options_that_change_the_way_do_not_change_the_average(size, option):
    model, (x, y) = build(Branches), batches(3, 1, 4 * size)
    reference = train_alone(model, sgd, x, y, size)
    assert_same_training(run_ranks(size, lambda group: train_rank(group, model, sgd, x, y, **option)), reference)


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_the_average_times_the_number_of_ranks(size):
    model, (x, y) = build(Plain), batches(1, 1, 4 * size)

    def gradients(group: Group) -> list[torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = wrap(group, own.parameters(), lr=0.0, op=hvd.Sum)
        nn.functional.cross_entropy(own(x[0, 0].chunk(size)[group.rank], 0), y[0, 0].chunk(size)[group.rank]).backward()
        optimizer.step()
        return [param.grad for param in own.parameters()]

    reference = train_alone(model, sgd, x, y, size)
    for got in run_ranks(size, gradients):
        for grad, param in zip(got, reference.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad * size, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_a_16_bit_wire_costs_one_rounding_per_leg_and_parameters_stay_wide(size, compression):
    model, (x, y) = build(Plain).float(), batches(4, 1, 4 * size)
    reference = train_alone(model, sgd, x.float(), y, size)

    def rank(group: Group) -> nn.Module:
        return train_rank(group, model, sgd, x.float(), y, compression=compression)

    for got in run_ranks(size, rank):
        for param, expected in zip(got.parameters(), reference.parameters(), strict=True):
            assert param.dtype == param.grad.dtype == torch.float32
            torch.testing.assert_close(param, expected, rtol=0, atol=3e-2)
            assert not torch.equal(param, expected), "nothing was rounded: was anything compressed?"


def test_a_16_bit_wire_carries_an_average_of_values_whose_sum_would_overflow():
    def gradient(group: Group) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(3))
        optimizer = wrap(group, [weight], lr=0.0, compression=hvd.Compression.fp16)
        (weight * 40000.0).sum().backward()
        optimizer.step()
        return weight.grad

    for got in run_ranks(3, gradient):
        torch.testing.assert_close(got, torch.full((3,), 40000.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_nan_and_inf_travel_as_they_are(value, compression):
    def gradient(group: Group) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(3))
        optimizer = wrap(group, [weight], lr=0.0, compression=compression)
        factor = torch.tensor([value, 1.0, 2.0]) if group.rank == 0 else torch.ones(3)
        (weight * factor).sum().backward()
        optimizer.step()
        return weight.grad

    for got in run_ranks(2, gradient):
        torch.testing.assert_close(got, torch.tensor([value, 1.0, 1.5]), equal_nan=True)


def test_two_runs_and_all_ranks_hold_the_same_bits_after_20_steps():
    model, (x, y) = build(Branches).float(), batches(20, 1, 12)

    def run() -> list[list[torch.Tensor]]:
        trained = run_ranks(3, lambda group: train_rank(group, model, adamw, x.float(), y))
        return [[param.detach() for param in one.parameters()] for one in trained]

    first, second = run(), run()
    for params in [*first[1:], *second]:
        assert all(torch.equal(a, b) for a, b in zip(params, first[0], strict=True))


def test_the_small_truth_of_the_tutorials_averages_14():
    """The loss sum of (x·w)² on x = 2r, 2r+1 at w = 1: gradients 2·(0+1) and 2·(4+9), on average 14."""

    def gradient(group: Group) -> float:
        w = nn.Parameter(torch.ones(1))
        optimizer = wrap(group, [w], lr=0.0)
        x = torch.tensor([2.0 * group.rank, 2.0 * group.rank + 1])
        ((x * w) ** 2).sum().backward()
        optimizer.step()
        return w.grad.item()

    assert run_ranks(2, gradient) == [14.0, 14.0]
