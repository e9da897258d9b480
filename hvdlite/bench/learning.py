"""
The small problem of `links --to-loss`, and when each technique has learnt it: steps, seconds and bytes until a loss.

    random numbers ── a random MLP gives each row a class ── Problem: batches, all new ── another MLP learns the classes

Everything is made of seeds: every technique begins with the same parameters, and step by step gets the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .arguments import UsageError
from .techniques import TECHNIQUES
from .variants import Training
from .workloads import Batch

MODEL_NAME, ROWS = "small-mlp", 32
USUAL_LOSS, MOST_STEPS = 1.0, 1000
_INPUTS, _CLASSES = 64, 16
_GUESSED = math.log(_CLASSES)
_TEACHER_WIDTH, _WIDTH = 32, 512
_EVALUATED_ROWS, _EVALUATED_SEED = 512, 2**40
# Techniques whose parameters are always those that all hosts share are evaluated so often.
_STEPS = 10


def read_loss(text: str) -> float:
    """Returns the text as a loss, above 0 and below that of guessing."""
    with suppress(ValueError):
        if 0 < float(text) < _GUESSED:
            return float(text)
    raise UsageError(f"{text!r} is not a loss between 0 and that of guessing, {_GUESSED:.2f}, such as {USUAL_LOSS}")


def steps_of_block(name: str) -> int:
    """Returns the number of steps between two evaluations of a technique: a whole interval, after which hosts agree."""
    interval = TECHNIQUES[name].interval
    return interval if interval > 1 else _STEPS


class Problem:
    """Rows of random numbers in 16 classes, for `_WIDTH` wide layers: 0.3 M parameters, and few operations for each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.manual_seed(0)
        self._teacher = nn.Sequential(
            nn.Linear(_INPUTS, _TEACHER_WIDTH), nn.ReLU(), nn.Linear(_TEACHER_WIDTH, _CLASSES)
        )
        self._evaluated = self._batch(_EVALUATED_SEED, _EVALUATED_ROWS)

    def model(self) -> nn.Module:
        """Returns a new model on the device, with the same parameters each time and on every rank."""
        torch.manual_seed(1)
        layers = (nn.Linear(_INPUTS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(_WIDTH, _CLASSES)).to(self._device)

    def batches(self, first_step: int, count: int, rank: int, size: int) -> list[Batch]:
        """Returns the batches of a rank for ``count`` steps. No rank of the ``size`` and no step has the same ones."""
        return [self._batch(step * size + rank, ROWS) for step in range(first_step, first_step + count)]

    @torch.no_grad()
    def loss(self, training: Training) -> float:
        """Returns the loss on rows that are in no batch, of the parameters that all hosts share."""
        inputs, targets = self._evaluated
        with training.averaged():
            return functional.cross_entropy(training.model(inputs), targets).item()

    @torch.no_grad()
    def _batch(self, seed: int, rows: int) -> Batch:
        inputs = torch.randn(rows, _INPUTS, generator=torch.Generator().manual_seed(seed))
        targets: Tensor = self._teacher(inputs).argmax(1)
        return inputs.to(self._device), targets.to(self._device)


class Progress(NamedTuple):
    """What a technique has taken so far, or until its loss was ``reached``: the last of ``losses``, one per block."""

    reached: bool
    steps: int
    seconds: float
    sent_bytes: float
    losses: Sequence[float]


def progress_of(
    name: str, wanted: float, times: Sequence[float], sent: Sequence[float], losses: Sequence[float]
) -> Progress:
    """Returns the progress of a technique, from a step's seconds and bytes in each block, and the loss after it."""
    steps = steps_of_block(name)
    reached = any(loss <= wanted for loss in losses)
    return Progress(reached, steps * len(losses), steps * math.fsum(times), steps * math.fsum(sent), losses)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer that all techniques train with."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
