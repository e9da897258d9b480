"""What is kept of gradients follows the scale of GradScaler: training has the bits of one without any scaler."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from equal_states import assert_same
from fake_hosts import on
from models import alike
from ranks import run_ranks, set_of
from torch import Tensor, nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group

FORMS = {
    "int8": hvd.Compression.int8,
    "int4": hvd.Compression.int4,
    "topk": hvd.Compression.topk(0.1),
    "powersgd": hvd.Compression.powersgd(rank=2, start_step=0, min_ratio=1.1),
}
STEPS, OVERFLOWS = 12, 5


class Run:
    """One training, whose step `OVERFLOWS` has infinite gradients with a scaler, and is left out without."""

    def __init__(self, group: Group, name: str, scaler: torch.amp.GradScaler | None = None) -> None:
        self.rank, self.scaler = group.rank, scaler
        self.model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
        for number, param in enumerate(self.model.parameters()):
            param.data = torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.3
        self.optimizer = self.wrap(group, name)

    def wrap(self, group: Group, name: str) -> hvd.DistributedOptimizer:
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return hvd.DistributedOptimizer(
            inner, self.model.named_parameters(), compression=FORMS[name], process_set=set_of(group)
        )

    def step(self, number: int, unscales: bool = False) -> None:
        samples = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * number + self.rank))
        loss = (self.model(samples) - self.rank).square().mean()
        self.optimizer.zero_grad()
        if self.scaler is None:
            if number != OVERFLOWS:
                loss.backward()
                self.optimizer.step()
            return
        self.scaler.scale(loss * torch.inf if number == OVERFLOWS else loss).backward()
        if unscales:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def values(self) -> Tensor:
        return torch.cat([param.detach().view(-1) for param in self.model.parameters()])


def growing() -> torch.amp.GradScaler:
    """A scaler that doubles the scale after every second step, and halves it when gradients overflow."""
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("place", "unscales", "name"), [*[("2 hosts", False, name) for name in FORMS], ("3 hosts of 2", True, "int4")]
)
def test_training_whose_scale_changes_has_the_bits_of_training_without_a_scaler(place, unscales, name):
    def rank(group: Group) -> None:
        plain, scaled = Run(group, name), Run(group, name, growing())
        scales = set()
        for number in range(STEPS):
            plain.step(number)
            scaled.step(number, unscales)
            scales.add(scaled.scaler.get_scale())
            assert torch.equal(plain.values(), scaled.values()), number
        assert len(scales) > 3

    on(place, rank)


@pytest.mark.parametrize("name", ["int4", "powersgd"])
@pytest.mark.parametrize("consolidates", [False, True])
def test_a_checkpoint_goes_on_with_the_scale_that_the_scaler_has_then(name, consolidates):
    def rank(group: Group) -> None:
        first = Run(group, name, growing())
        for number in range(4):
            first.step(number)
        if consolidates:
            first.optimizer.consolidate_state_dict(to=0)
        # The scale has just been doubled, and is changed by hand below.
        saved: Any = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.scaler.state_dict()))
        assert saved[1]["hvdlite"]["loss_scale"] == saved[2]["scale"] == 32.0
        found = []
        for before, factor in [(0, 1.0), (1, 1.0), (1, 4.0), (4, 0.5)]:
            again = Run(group, name, growing())
            for number in range(before):
                again.step(number)
            again.model.load_state_dict(saved[0])
            again.optimizer.load_state_dict(copy.deepcopy(saved[1]))
            again.scaler.load_state_dict({**saved[2], "scale": saved[2]["scale"] * factor})
            again.step(4)
            again.step(6)
            found.append(again.values())
        assert all(torch.equal(each, found[0]) for each in found)

    on("2 hosts", rank)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("consolidates", [False, True])
def test_a_pickled_optimizer_has_the_state_that_a_checkpoint_has(name, consolidates):
    def rank(own: int) -> None:
        model, scaler = alike(nn.Linear(16, 24)), growing()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=FORMS[name])
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(torch.linspace(-1, 1, 16)) - own).square().mean()
            scaler.scale(optimizer.weighted(loss, 8)).backward()
            scaler.step(optimizer)
            scaler.update()
        if consolidates:
            optimizer.consolidate_state_dict(to=0)
        # The scale has just been doubled.
        again = pickle.loads(pickle.dumps(optimizer)).state_dict()
        assert (again["hvdlite"]["loss_scale"], again["hvdlite"]["weight_reference"]) == (32.0, 8.0)
        assert_same(again, optimizer.state_dict())

    run_worlds(2, rank)


def test_a_new_scaler_begins_with_the_scale_of_its_first_step():
    def rank(group: Group) -> None:
        plain, scaled = Run(group, "int4"), Run(group, "int4", growing())
        for number in range(3):
            plain.step(number)
            scaled.step(number)
        scaled.scaler.update(16.0)
        # The next one has the scale of the old one, which is not asked any more.
        scaled.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        for number in range(3, STEPS):
            plain.step(number)
            scaled.step(number)
            assert torch.equal(plain.values(), scaled.values()), number

    on("2 hosts", rank)


def test_without_anything_kept_no_scaler_is_asked():
    class Asked(torch.amp.GradScaler):
        def get_scale(self) -> float:
            raise AssertionError("it would wait for a GPU")

    def rank(group: Group) -> None:
        model = alike(nn.Linear(3, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=set_of(group)
        )
        scaler = Asked("cpu", init_scale=8.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    run_ranks(2, rank)


class Weighted(Run):
    """One training whose losses are weighted by a power of two, equal on all ranks: it has the bits of one without."""

    def __init__(self, group: Group, name: str, samples: int) -> None:
        super().__init__(group, name)
        self.samples = samples

    def step(self, number: int, unscales: bool = False) -> None:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * number + self.rank))
        loss = (self.model(batch) - self.rank).square().mean()
        self.optimizer.zero_grad()
        self.optimizer.weighted(loss, self.samples).backward()
        self.optimizer.step()


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("place", "name"), [*[("2 hosts", name) for name in FORMS], ("3 hosts of 2", "int4")])
@pytest.mark.parametrize("samples", [2, 1 << 15])
def test_training_whose_losses_are_weighted_alike_has_the_bits_of_training_without_weights(place, name, samples):
    def rank(group: Group) -> None:
        plain, weighted = Run(group, name), Weighted(group, name, samples)
        for number in [each for each in range(STEPS) if each != OVERFLOWS]:
            plain.step(number)
            weighted.step(number)
            assert torch.equal(plain.values(), weighted.values()), number

    on(place, rank)


@pytest.mark.parametrize("name", ["int4", "powersgd"])
@pytest.mark.parametrize("consolidates", [False, True])
def test_a_checkpoint_goes_on_with_the_weights_that_losses_have_then(name, consolidates):
    def rank(group: Group) -> None:
        first = Weighted(group, name, 1 << 14)
        for number in range(4):
            first.step(number)
        if consolidates:
            first.optimizer.consolidate_state_dict(to=0)
        saved: Any = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
        assert saved[1]["hvdlite"]["weight_reference"] == 1 << 14
        found = []
        for steps_before in (0, 2):
            again = Weighted(group, name, 1 << 14)
            for number in range(steps_before):
                again.step(number)
            again.model.load_state_dict(saved[0])
            again.optimizer.load_state_dict(copy.deepcopy(saved[1]))
            again.step(4)
            again.step(6)
            found.append(again.values())
        if not consolidates:
            first.step(4)
            first.step(6)
            found.append(first.values())
        assert all(torch.equal(each, found[0]) for each in found)

    on("2 hosts", rank)


@pytest.mark.parametrize("samples", [1, 8, 1024])
@pytest.mark.parametrize("name", FORMS)
def test_what_steps_without_weights_have_kept_counts_as_much_in_weighted_ones(name, samples):
    """With equal weights on all ranks, powers of two, both kinds of steps have the same bits."""

    def rank(group: Group) -> list[torch.Tensor]:
        found = []
        for weighs in (False, True):
            param = torch.nn.Parameter(torch.zeros(300))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([param], lr=1.0), compression=FORMS[name], process_set=set_of(group)
            )
            for step in range(8):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + group.rank)
                loss = (param * torch.randn(300, generator=generator)).sum()
                if weighs and step not in (0, 1, 5):
                    loss = optimizer.weighted(loss, samples)
                loss.backward()
                optimizer.step()
            found.append(param.detach())
        return found

    for plain, weighted in on("2 hosts", rank):
        assert torch.equal(weighted, plain)


@pytest.mark.parametrize("idle", [0, 1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_a_rank_without_samples_in_the_first_weighted_step_adds_no_more_of_plain_ones_than_is_kept(name, idle):
    """Each host keeps a part of what the sums of all have lost."""

    def rank(group: Group) -> Tensor:
        param = nn.Parameter(torch.zeros(64, 64))
        inner = torch.optim.SGD([param], lr=0.0)
        optimizer = hvd.DistributedOptimizer(inner, compression=FORMS[name], process_set=set_of(group))
        for number in range(3):
            values = torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * number + group.rank))
            optimizer.zero_grad()
            loss = (param * values).sum()
            (loss if number < 2 else optimizer.weighted(loss, int(group.rank != idle))).backward()
            optimizer.step()
        assert param.grad is not None
        return param.grad

    for grad in on("3 hosts", rank):
        # Without what is kept the norm of such an average is near 45.
        assert grad.norm() < 3 * 64
