"""
A training that takes whole steps, and knows how long their parts took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from .ranks import Ranks
from .workloads import Batch


class Parts(NamedTuple):
    """Seconds of a step; ``update`` is all that comes after backward."""

    forward: float
    backward: float
    update: float


def _nothing() -> None:
    return


class Training:
    """A model and its optimizer. ``after_backward`` averages gradients, if neither of the two does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        after_backward: Callable[[], None] = _nothing,
        close: Callable[[], None] = _nothing,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._after_backward = after_backward
        self.close = close

    def step(self, batch: Batch) -> None:
        """One step, whole."""
        self._optimizer.zero_grad()
        self._loss(batch).backward()  # type: ignore[no-untyped-call]  # torch's
        self._after_backward()
        self._optimizer.step()

    def step_in_parts(self, batch: Batch, ranks: Ranks) -> Parts:
        """One step, with a wait for the device after each part."""
        self._optimizer.zero_grad()
        times = [time.perf_counter()]
        loss = self._loss(batch)
        for part in (loss.backward, self._after_backward_and_step):
            ranks.synchronize()
            times.append(time.perf_counter())
            part()
        ranks.synchronize()
        times.append(time.perf_counter())
        return Parts(*(later - earlier for earlier, later in pairwise(times)))

    def _after_backward_and_step(self) -> None:
        self._after_backward()
        self._optimizer.step()

    def _loss(self, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        return functional.cross_entropy(self._model(inputs), targets)
