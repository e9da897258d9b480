"""What is learnt: every form of sending gradients between two hosts ends near the loss of float32 gradients.

The long form (`long_run.IS_LONG`) trains longer, with three seeds, and prints the table of docs/slow-links.md.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from characters import Text
from fake_bucket import FakeBucket
from fake_hosts import on
from long_run import IS_LONG, chosen, trials
from ranks import set_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as ddps
from torch.nn import functional

import hvdlite as hvd
from hvdlite.comm.group import Group

pytestmark = pytest.mark.slow

SEEDS = range(trials(1, 3))
INT4, OUTER_TOPK = hvd.Compression.int4, hvd.Compression.topk(0.05, error_decay=0.95)


def forms(steps: int, sync_every: int) -> dict[str, dict[str, Any]]:
    """The arguments of each form, for a training of so many steps."""
    return {
        "none": {},
        "int8": {"compression": hvd.Compression.int8},
        "int4": {"compression": INT4},
        "topk": {"compression": hvd.Compression.topk(0.05)},
        "powersgd": {"compression": hvd.Compression.powersgd(rank=4, start_step=steps // 10)},
        "powersgd of rank 8": {"compression": hvd.Compression.powersgd(rank=8, start_step=steps // 4)},
        "localsgd": {"outer": hvd.LocalSGD(sync_every=8)},
        "diloco": {"outer": hvd.DiLoCo(sync_every, compression=INT4)},
        "diloco after ordinary steps": {"outer": hvd.DiLoCo(sync_every, lr=0.8, momentum=0.5, compression=INT4)},
        "sparseloco": {"outer": hvd.DiLoCo(sync_every, lr=1.0, momentum=0.0, compression=OUTER_TOPK)},
    }


class Task:
    """A model, the loss of each rank's batches, and what is measured at the end; the smaller the better."""

    def __init__(self, steps: int, sync_every: int) -> None:
        self.steps, self.forms = steps, forms(steps, sync_every)
        # By form, the number of steps without it at the beginning: about a quarter, so that the last is an outer step.
        self.ordinary = {"diloco after ordinary steps": steps - 3 * steps // 4 // sync_every * sync_every}

    def model(self, seed: int) -> nn.Module:
        raise NotImplementedError

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def measure(self, model: nn.Module) -> float:
        raise NotImplementedError


class Characters(Task):
    """A GPT that predicts the next character; measured is the loss on text that it has not seen."""

    @functools.cached_property
    def _text(self) -> Text:
        return Text()

    def model(self, seed: int) -> nn.Module:
        return self._text.gpt(seed)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        return self._text.batch(8, seed)

    def measure(self, model: nn.Module) -> float:
        inputs, targets = self._text.held_out()
        return functional.cross_entropy(model(inputs), targets).item()


class Digits(Task):
    """An MLP for handwritten digits; measured is the percentage that it takes for others, of those not trained on."""

    @functools.cached_property
    def _data(self) -> tuple[Tensor, Tensor]:
        datasets = pytest.importorskip("sklearn.datasets")
        images, digits = datasets.load_digits(return_X_y=True)
        order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(digits)[order]

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        images, digits = self._data
        rows = torch.randint(1200, (32,), generator=torch.Generator().manual_seed(seed))
        return images[rows], digits[rows]

    def measure(self, model: nn.Module) -> float:
        images, digits = self._data
        return 100 * (model(images[1200:]).argmax(1) != digits[1200:]).double().mean().item()


TASKS = {
    "characters": Characters(trials(100, 600), trials(10, 50)),
    "digits": Digits(trials(150, 600), trials(15, 50)),
}
_BUILDING = threading.Lock()


def train(group: Group, task: Task, name: str, seed: int) -> tuple[float, Tensor]:
    """Returns the measure of the parameters that all ranks share at the end, and these."""
    with _BUILDING:
        model = copy.deepcopy(task.model(seed))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, rate_of(task.steps))
    begins = task.ordinary.get(name, 0)
    for step in range(task.steps):
        if step in (0, begins):
            form = task.forms[name] if step == begins else {}
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=set_of(group), **form)
        optimizer.zero_grad()
        loss_of(task, model, seed, step, group.rank).backward()
        optimizer.step()
        scheduler.step()
    with optimizer.averaged(), torch.no_grad():
        values = torch.cat([param.view(-1) for param in model.parameters()])
        return task.measure(model) if group.rank == 0 else math.nan, values


def loss_of(task: Task, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
    """Returns the loss of a rank's batch of this step."""
    inputs, targets = task.batch(1_000_000 * seed + 2 * step + rank)
    return functional.cross_entropy(model(inputs), targets)


def rate_of(steps: int) -> Callable[[int], float]:
    """A tenth of the steps to warm up, and then a cosine to a tenth of the learning rate."""
    warm_up = steps // 10
    return lambda step: min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))


@functools.cache
def measured(task: str, name: str) -> list[float]:
    """Returns the measure of each seed, of two hosts with one rank each; the ranks' parameters are equal."""
    found = []
    for seed in SEEDS:
        (measure, first), (_, second) = on("2 hosts", functools.partial(train, task=TASKS[task], name=name, seed=seed))
        assert torch.equal(first, second)
        found.append(measure)
    return found


def told(capsys: pytest.CaptureFixture[str], task: str, name: str) -> float:
    """Returns the mean of the measures; in the long form it prints them."""
    found = measured(task, name)
    mean = statistics.fmean(found)
    if IS_LONG:
        with capsys.disabled():
            print(f"\n{task} {name}: {mean:.4g} ({', '.join(f'{each:.4g}' for each in found)})")
    return mean


# For each form: by how many percent its loss may be above that of float32, and by how many points its wrong digits; in
# the short form, where outer steps are too few to come to speed, and in the long one.
BOUNDS = {
    "int8": ((1, 1.0), (1, 0.5)),
    "int4": ((2, 1.0), (2, 0.5)),
    "powersgd": ((2, 1.0), (6, 0.5)),
    "powersgd of rank 8": ((2, 1.0), (2, 0.5)),
    "topk": ((8, 2.0), (8, 0.5)),
    "localsgd": ((6, 1.0), (6, 0.5)),
    "diloco": ((15, 3.0), (8, 2.5)),
    "diloco after ordinary steps": ((15, 3.0), (3, 0.5)),
    "sparseloco": ((12, 5.0), (14, 2.5)),
}

each_form = pytest.mark.parametrize("name", chosen(list(BOUNDS), ["int8", "int4", "powersgd", "diloco", "sparseloco"]))


@pytest.mark.night(but=1)
@each_form
def test_the_loss_of_a_character_gpt_is_near_that_of_float32_gradients(capsys, name):
    plain = told(capsys, "characters", "none")
    assert plain < (2.1 if IS_LONG else 2.6)
    percent, _ = BOUNDS[name][IS_LONG]
    assert told(capsys, "characters", name) < plain * (1 + percent / 100)


@pytest.mark.night(but=1)
@each_form
def test_nearly_as_many_digits_are_recognized_as_with_float32_gradients(capsys, name):
    plain = told(capsys, "digits", "none")
    assert plain < (3 if IS_LONG else 6)
    _, points = BOUNDS[name][IS_LONG]
    assert told(capsys, "digits", name) <= plain + points


def ddps_powersgd(task: Task, seed: int) -> float:
    """The measure of a training in one process whose gradients pass through DDP's hook.

    PowerSGD is linear in what it averages, so averages of both ranks' gradients stand for them.
    """
    form = task.forms["powersgd"]["compression"]
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    state = ddps.PowerSGDState(gloo, form.rank, form.start_step, min_compression_rate=form.min_ratio)
    model = copy.deepcopy(task.model(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(task.steps))
    for step in range(task.steps):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(task, model, seed, step, rank) / 2).backward()
        bucket = FakeBucket([param.grad for param in model.parameters()])
        ddps.powerSGD_hook(state, bucket).wait()
        for param, average in zip(model.parameters(), bucket.gradients(), strict=True):
            param.grad = average
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return task.measure(model)


def plain_diloco(task: Task, seed: int) -> float:
    """The measure of the anchor of two workers in one process, by the algorithm's plain lines, in full precision."""
    rule = task.forms["diloco"]["outer"].rule()
    shared = copy.deepcopy(task.model(seed))
    workers = [copy.deepcopy(shared) for _ in range(2)]
    optimizers = [torch.optim.AdamW(worker.parameters(), lr=3e-3) for worker in workers]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, rate_of(task.steps)) for each in optimizers]
    outer = torch.optim.SGD(shared.parameters(), lr=rule.lr, momentum=rule.momentum, nesterov=True)
    for step in range(task.steps):
        for rank, (worker, optimizer, scheduler) in enumerate(zip(workers, optimizers, schedulers, strict=True)):
            optimizer.zero_grad()
            loss_of(task, worker, seed, step, rank).backward()
            optimizer.step()
            scheduler.step()
        if (step + 1) % rule.sync_every == 0:
            with torch.no_grad():
                for anchor, *own in zip(shared.parameters(), *(each.parameters() for each in workers), strict=True):
                    anchor.grad = anchor - sum(own) / 2
            outer.step()
            for worker in workers:
                worker.load_state_dict(shared.state_dict())
    with torch.no_grad():
        return task.measure(shared)


@pytest.mark.night(but=1)
@pytest.mark.parametrize(("name", "reference"), [("powersgd", ddps_powersgd), ("diloco", plain_diloco)])
def test_a_character_gpt_ends_where_reference_code_in_one_process_does(capsys, name, reference):
    expected = [reference(TASKS["characters"], seed) for seed in SEEDS]
    if IS_LONG:
        with capsys.disabled():
            print(f"\ncharacters {name}, reference: {statistics.fmean(expected):.4g} ({expected})")
    assert measured("characters", name) == pytest.approx(expected, rel=0.005)
