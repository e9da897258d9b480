"""Small models with features that are hard for data-parallel training, and functions that train them on ranks or alone.

Models are built under a lock, because ranks are threads here and share PyTorch's random generator.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable

import torch
from ranks import set_of
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.comm.group import Group

FEATURES, CLASSES = 6, 4


class Plain(nn.Module):
    """Two layers; every parameter is used on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.layers(x)


class Tied(nn.Module):
    """One weight used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branches(nn.Module):
    """Has parameters that no rank uses, that only odd parts of the batch use, and that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(FEATURES, 3)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.odd = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, part: int) -> Tensor:
        x = torch.tanh(self.frozen(x))
        return self.head(torch.tanh(self.odd(x)) if part % 2 else x)


class MixedTypes(nn.Module):
    """Has parameters of fp64, fp32 and bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES, dtype=torch.float32))
        self.shift = nn.Parameter(torch.zeros(FEATURES, dtype=torch.bfloat16))
        self.head = nn.Linear(FEATURES, CLASSES)

    def double(self) -> MixedTypes:  # scale and shift keep their dtypes
        self.wide.double()
        self.head.double()
        return self

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.head(torch.tanh(self.wide(x)) * self.scale.double() + self.shift.double())


class ChannelsLast(nn.Module):
    """A convolution whose weight, and so whose gradient, is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, part: int) -> Tensor:
        image = x.reshape(len(x), 2, 1, 3).expand(-1, -1, 2, -1)
        return self.head(torch.tanh(self.conv(image)).flatten(1))


MODELS: list[type[nn.Module]] = [Plain, Tied, Branches, MixedTypes, ChannelsLast]

OptimizerMaker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def alike(model: nn.Module) -> nn.Module:
    """Gives the model values that are equal on all ranks: ranks are threads and share PyTorch's random generator."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.uniform_(param, -0.5, 0.5, generator=generator)
    return model


_BUILDING = threading.Lock()


def build(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    """Returns a new model of this kind in fp64. Models of one kind and seed have equal parameters, in all threads."""
    with _BUILDING:
        return copy.deepcopy(_first_of(kind, seed))


@functools.cache
def _first_of(kind: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def batches(steps: int, passes: int, rows: int) -> tuple[Tensor, Tensor]:
    """Makes inputs of shape (steps, passes, rows, FEATURES) and classes of shape (steps, passes, rows)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, passes, rows, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (steps, passes, rows), generator=generator)
    return x, y


def part_loss(model: nn.Module, x: Tensor, y: Tensor, part: int, parts: int) -> Tensor:
    """Computes the mean loss of one rank's part of a batch."""
    return nn.functional.cross_entropy(model(x.chunk(parts)[part], part), y.chunk(parts)[part])


def train_alone(model: nn.Module, make: OptimizerMaker, x: Tensor, y: Tensor, parts: int) -> nn.Module:
    """Trains in one process on the average of the parts' losses, which is what the ranks compute together."""
    model = copy.deepcopy(model)
    optimizer = make(list(model.parameters()))
    for step in range(len(x)):
        optimizer.zero_grad()
        for micro in range(x.shape[1]):
            losses = [part_loss(model, x[step, micro], y[step, micro], part, parts) for part in range(parts)]
            torch.stack(losses).mean().backward()
        optimizer.step()
    return model


def train_rank(
    group: Group, model: nn.Module, make: OptimizerMaker, x: Tensor, y: Tensor, **options: object
) -> nn.Module:
    """Trains on one rank's part of each batch, with `hvd.DistributedOptimizer`."""
    model = copy.deepcopy(model)
    if not options.get("autotune"):
        options.setdefault("bucket_cap_mb", 0.0002)
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=x.shape[1],
        process_set=set_of(group),
        **options,  # type: ignore[arg-type]
    )
    for step in range(len(x)):
        optimizer.zero_grad()
        for micro in range(x.shape[1]):
            part_loss(model, x[step, micro], y[step, micro], group.rank, group.size).backward()
        optimizer.step()
    optimizer.close()
    return model


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def assert_same_training(models: list[nn.Module], reference: nn.Module) -> None:
    """Asserts that every parameter and gradient equals the reference's, and that the same gradients are missing."""
    for rank, model in enumerate(models):
        for (name, got), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            tolerance = TOLERANCE[expected.dtype]
            torch.testing.assert_close(
                got, expected, rtol=0, atol=tolerance, msg=lambda m, n=name, r=rank: f"{n} on rank {r}: {m}"
            )
            assert (got.grad is None) == (expected.grad is None), f"gradient of {name} on rank {rank}"
            if expected.grad is not None:
                torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=tolerance)
                assert got.grad.stride() == expected.grad.stride(), name
