"""
The ways to train that are compared. Each has a model and an optimizer of its own, and takes whole steps.

README.md has a table of them; to add one, add a function that makes its `Training`, and its name to `VARIANTS`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ..compression.casts import Compression
from ..optim.optimizer import DistributedOptimizer
from .ranks import Ranks
from .workloads import Batch


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Training:
    """A model and its optimizer. ``average`` averages the gradients after backward where neither of the two does."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing

    def step(self, batch: Batch, on_part: Callable[[], object] = _nothing) -> None:
        """One training step; ``on_part`` is called before each of forward, backward and update, and at the end."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        on_part()
        loss = functional.cross_entropy(self.model(inputs), targets)
        on_part()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        on_part()
        self.average()
        self.optimizer.step()
        on_part()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)


def _per_parameter(ranks: Ranks, model: nn.Module) -> Training:
    group = ranks.rival()

    def average() -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        works = [dist.all_reduce(grad, group=group, async_op=True) for grad in reversed(grads)]
        for work in works:
            assert work is not None, "it is asynchronous"
            work.wait()
        torch._foreach_div_(grads, ranks.size)

    return Training(model, _sgd(model), average)


def _ddp(ranks: Ranks, model: nn.Module, *, as_views: bool = False, in_fp16: bool = False) -> Training:
    device_ids = None if ranks.device.type == "cpu" else [ranks.device.index]
    group = ranks.rival()
    wrapped = DistributedDataParallel(model, device_ids, process_group=group, gradient_as_bucket_view=as_views)
    if in_fp16:
        wrapped.register_comm_hook(group, fp16_compress_hook)
    return Training(wrapped, _sgd(model))


def _hvdlite(ranks: Ranks, model: nn.Module, **options: Any) -> Training:
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), **options)
    return Training(model, optimizer, close=optimizer.close)


def _horovod(ranks: Ranks, model: nn.Module) -> Training:
    return Training(
        model, horovod_module().DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters())
    )


def horovod_module() -> Any:
    """Horovod itself, initialised. Raises ImportError where it is missing; hvdlite under its name does not count."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or Path(spec.origin or "/").is_relative_to(Path(__file__).parents[1]):
        raise ImportError("there is no Horovod here")
    module = importlib.import_module("horovod.torch")
    module.init()
    return module


def horovod_problem(ranks: Ranks) -> str | None:
    """Why Horovod cannot be measured, if it cannot. Every rank must call it."""
    problem = None
    try:
        size = horovod_module().size()
        if size != ranks.size:
            problem = f"it sees {size} ranks and hvdlite {ranks.size}: start both by mpirun"
    except (ImportError, ValueError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    return ranks.first(problem and f"horovod cannot be measured: {problem}")


VARIANTS: dict[str, Callable[[Ranks, nn.Module], Training]] = {
    "none": lambda ranks, model: Training(model, _sgd(model)),
    "per-parameter": _per_parameter,
    "ddp": _ddp,
    "ddp-view": partial(_ddp, as_views=True),
    "ddp-fp16": partial(_ddp, in_fp16=True),
    "hvdlite": _hvdlite,
    "hvdlite-fp16": partial(_hvdlite, compression=Compression.fp16),
    "hvdlite-bf16": partial(_hvdlite, compression=Compression.bf16),
    "hvdlite-tuned": partial(_hvdlite, autotune=True),
    "hvdlite-arrival": partial(_hvdlite, step_on_arrival=True),
    "horovod": _horovod,
}
