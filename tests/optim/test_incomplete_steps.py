"""A GradScaler sees averages, and all ranks step alike, also where a step is not complete on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_hosts import on
from ranks import run_ranks
from torch import Tensor, nn
from training import wrap

import hvdlite as hvd
from hvdlite.comm.group import Group

INF = float("inf")

# The passes of each rank in a step, as the factor of its gradient in each; a negative one is under no_sync. Two passes
# are a step of `backward_passes_per_step`.
Passes = tuple[float, ...]
STEPS: dict[str, tuple[Passes, Passes]] = {
    "complete": ((1.0, 2.0), (3.0, 4.0)),
    "fewer passes": ((2.0,), (3.0,)),
    "fewer passes on a rank": ((2.0,), (3.0, 4.0)),
    "no pass on a rank": ((), (3.0, 4.0)),
    "only passes in no_sync": ((-1.0, -2.0), (-3.0,)),
    "only such on a rank": ((-1.0,), (3.0, 4.0)),
    "an infinity in a complete step": ((1.0, INF), (3.0, 4.0)),
    "an infinity in fewer passes": ((INF,), (3.0,)),
    "an infinity and a rank without a pass": ((), (3.0, INF)),
    "an infinity in no_sync": ((1.0, 2.0), (-INF,)),
}


def mean_of(step: str) -> float:
    """The average of both ranks' sums."""
    return sum(abs(factor) for passes in STEPS[step] for factor in passes) / 2


def backward(optimizer: hvd.DistributedOptimizer, loss: Callable[[float], Tensor], passes: Passes) -> None:
    for factor in passes:
        if factor < 0:
            with optimizer.no_sync():
                loss(-factor).backward()
        else:
            loss(factor).backward()


def scaler_steps(optimizer: Any, scaler: Any, param: nn.Parameter, recipe: str) -> None:
    """One step by each of the recipes; a norm of 1e9 clips nothing, but reads what is there."""
    if recipe == "clipped":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([param], 1e9)
    if recipe == "as for Horovod":
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.night(but=24)
@pytest.mark.slow(but=10)
@pytest.mark.parametrize("recipe", ["plain", "clipped", "as for Horovod"])
@pytest.mark.parametrize("drops", [True, False], ids=["", "without zero_grad"])
@pytest.mark.parametrize("first", STEPS)
def test_a_grad_scaler_decides_on_averages_whenever_a_step_is_asked_for(first, recipe, drops):
    """Each kind of step is followed by each other one, on the same scaler and optimizer."""
    kinds = [kind for second in STEPS for kind in (first, second)]

    def rank(group: Group) -> list[tuple[float, float]]:
        param = nn.Parameter(torch.zeros(1))
        optimizer = wrap(group, [param], backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=10**6)
        # It has no scale before, and a rank may have no loss in its first step.
        scaler.scale(torch.zeros(()))
        found = []
        for kind in kinds:
            if drops:
                optimizer.zero_grad()
            backward(optimizer, lambda factor: scaler.scale(param * factor).sum(), STEPS[kind][group.rank])
            scaler_steps(optimizer, scaler, param, recipe)
            found.append((param.item(), scaler.get_scale()))
            if not drops:
                # Not by the optimizer's own method, which begins a new step.
                param.grad = None
        return found

    expected, value, scale = [], 0.0, 2.0**20
    for kind in kinds:
        skips = mean_of(kind) == INF
        value, scale = (value, scale / 2) if skips else (value - mean_of(kind), scale)
        expected.append((value, scale))
    assert run_ranks(2, rank) == [expected] * 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_gradients_that_a_pass_whose_step_is_skipped_leaves_in_another_optimizer_are_dropped(op):
    """As by a GAN's generator at the start of training, where the scale is too large."""

    def rank(group: Group) -> list[float]:
        generator, discriminator = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        of_generator, of_discriminator = wrap(group, [generator], op=op), wrap(group, [discriminator])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
        for step in range(3):
            scaler.scale(generator * (INF if step == 0 else 1.0) + discriminator).sum().backward()
            scaler.step(of_generator)
            scaler.update()
            of_discriminator.zero_grad()
            (discriminator * (group.rank + 1)).sum().backward()
            of_discriminator.step()
            of_discriminator.zero_grad()
            of_generator.zero_grad()
        return [generator.item(), discriminator.item()]

    assert run_ranks(2, rank) == [[-2.0, -4.5]] * 2


COMPRESSIONS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "int8": hvd.Compression.int8,
    "topk": hvd.Compression.topk(),
}


@pytest.mark.night(but=20)
@pytest.mark.slow(but=8)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("uses", ["all", "the last"])
@pytest.mark.parametrize("drops", ["by zero_grad", "by a new pass"])
@pytest.mark.parametrize("alone", [0, 1, 2])
def test_gradients_that_a_pass_for_another_optimizer_leaves_on_some_ranks_only_are_an_error_on_all(
    alone, drops, uses, compression
):
    """The rank that drops them has sent buckets, with which the others' next ones are summed."""

    def rank(group: Group) -> list[float]:
        generator = nn.Parameter(torch.zeros(1))
        # As many buckets.
        discriminator = [nn.Parameter(torch.zeros(40)) for _ in range(3)]
        options = {"compression": COMPRESSIONS[compression], "bucket_cap_mb": 1e-4}
        of_generator, of_discriminator = wrap(group, [generator]), wrap(group, discriminator, **options)

        def takes_step() -> None:
            sum(param.sum() * (group.rank + 1) for param in discriminator).backward()
            of_discriminator.step()
            of_discriminator.zero_grad()

        def drops_and_takes_step() -> None:
            if drops == "by zero_grad":
                of_discriminator.zero_grad()
            else:
                for param in discriminator:
                    param.grad = None
            takes_step()

        for _ in range(2):
            takes_step()
        used = discriminator if uses == "all" else discriminator[:1]
        loss = generator.sum() + (sum(param.sum() for param in used) if group.rank == alone else 0.0)
        loss.backward()
        of_generator.step()
        with pytest.raises(hvd.GradientError, match=r"some ranks have dropped gradients of .*requires_grad_"):
            drops_and_takes_step()
        with pytest.raises(hvd.GradientError, match="zero_grad"):
            of_discriminator.step()
        of_discriminator.zero_grad()
        before = [param.detach().clone() for param in discriminator]
        takes_step()
        return [(param - earlier).mean().item() for param, earlier in zip(discriminator, before, strict=True)]

    results = run_ranks(3, rank)
    assert results == results[:1] * 3
    if compression in ("none", "fp16"):
        assert results[0] == pytest.approx([-2.0] * 3, abs=1e-3)


def test_where_no_rank_has_a_gradient_a_grad_scaler_says_so_as_in_one_process():
    def rank(group: Group) -> None:
        optimizer = wrap(group, [nn.Parameter(torch.zeros(1))])
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(optimizer)

    run_ranks(2, rank)


def test_weighted_losses_of_no_samples_leave_a_rank_without_gradients_and_in_the_scalers_step():
    def rank(group: Group) -> list[float]:
        param = nn.Parameter(torch.zeros(1))
        optimizer = wrap(group, [param])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            n = 0 if group.rank == step % 2 else 3
            loss = (param * (INF if step == 2 and group.rank == 1 else 2.0)).sum()
            scaler.scale(optimizer.weighted(loss, n)).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(param.item())
        return found

    assert run_ranks(2, rank) == [[-2.0, -4.0, -4.0, -6.0]] * 2


@pytest.mark.parametrize("kind", [kind for kind in STEPS if mean_of(kind) != INF])
def test_max_norm_clips_the_average_of_an_incomplete_step(kind):
    def rank(group: Group) -> tuple[float, float]:
        param = nn.Parameter(torch.zeros(1))
        optimizer = wrap(group, [param], backward_passes_per_step=2, max_norm=0.5)
        backward(optimizer, lambda factor: (param * factor).sum(), STEPS[kind][group.rank])
        optimizer.step()
        return optimizer.grad_norm.item(), param.item()

    for norm, value in run_ranks(2, rank):
        assert norm == mean_of(kind)
        assert value == pytest.approx(-0.5)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_in_skip_synchronize_without_averages_is_an_error_however_many_passes_there_were(passes):
    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(1))
        optimizer = wrap(group, [param], backward_passes_per_step=2)
        backward(optimizer, lambda factor: (param * factor).sum(), (1.0,) * passes)
        with (
            pytest.raises(hvd.GradientError, match="while gradients are not averaged: call synchronize"),
            optimizer.skip_synchronize(),
        ):
            optimizer.step()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        assert param.item() == -passes

    run_ranks(2, rank)


@pytest.mark.parametrize("size", [1, 2])
def test_with_outer_steps_too_a_scaler_sees_the_averages_of_an_incomplete_step(size):
    def rank(group: Group) -> list[float]:
        param = nn.Parameter(torch.zeros(1))
        outer = hvd.LocalSGD(sync_every=2)
        optimizer = wrap(group, [param], backward_passes_per_step=2, outer=outer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
        found = []
        for kind in ("fewer passes", "an infinity in fewer passes", "no pass on a rank", "complete"):
            optimizer.zero_grad()
            backward(optimizer, lambda factor: scaler.scale(param * factor).sum(), STEPS[kind][group.rank % 2])
            scaler.step(optimizer)
            scaler.update()
            found.append(param.item())
        return found

    values = [-2.5, -2.5, -2.5 - 3.5, -2.5 - 3.5 - 5.0]
    for found in on(["a", "a"] * size, rank):
        assert found == values
