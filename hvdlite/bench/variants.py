"""
The variants of training that `step` and `memory` compare: hvdlite, DDP, Horovod, and training without communication.

`techniques` has those of `links`, which are made by `ddp` and `own` too.

docs/measuring.md has a table of them. To add one, write a function that returns its `Training`, with a model and an
optimizer of its own, and add it to `VARIANTS`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
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
from .arguments import flag, some_of
from .ranks import Ranks
from .workloads import Batch


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Training:
    """A model and its optimizer. ``average`` averages gradients after backward, if model and optimizer do not.

    Within ``averaged()`` the model has the parameters that all hosts share.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    averaged: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, batch: Batch) -> None:
        """Takes a training step."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.average()
        self.optimizer.step()


Inner = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes the optimizer of a model that a variant wraps."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer whose steps are measured."""
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

    return Training(model, sgd(model), average)


def ddp(
    ranks: Ranks,
    model: nn.Module,
    inner: Inner = sgd,
    *,
    as_views: bool = False,
    bucket_cap_mb: int | None = None,
    hook: Callable[[dist.ProcessGroup, DistributedDataParallel], None] | None = None,
) -> Training:
    """Returns training with DDP. ``hook`` registers a communication hook, and is given DDP's process group."""
    device_ids = None if ranks.device.type == "cpu" else [ranks.device.index]
    group = ranks.rival()
    wrapped = DistributedDataParallel(
        model, device_ids, process_group=group, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=as_views
    )
    if hook is not None:
        hook(group, wrapped)
    return Training(wrapped, inner(model))


def in_fp16(group: dist.ProcessGroup, wrapped: DistributedDataParallel) -> None:
    """Makes DDP send gradients in fp16."""
    wrapped.register_comm_hook(group, fp16_compress_hook)


def own(ranks: Ranks, model: nn.Module, inner: Inner = sgd, **options: Any) -> Training:
    """Returns training with hvdlite's optimizer, with these options."""
    optimizer = DistributedOptimizer(inner(model), model.named_parameters(), **options)
    return Training(model, optimizer, close=optimizer.close, averaged=optimizer.averaged)


def _horovod(ranks: Ranks, model: nn.Module) -> Training:
    optimizer = horovod_module().DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return Training(model, optimizer)


def horovod_module() -> Any:
    """Returns ``horovod.torch``, initialized. Raises ImportError if there is none, or if that name is hvdlite's."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or Path(spec.origin or "/").is_relative_to(Path(__file__).parents[1]):
        raise ImportError("Horovod is not installed")
    module = importlib.import_module("horovod.torch")
    module.init()
    return module


def horovod_problem(ranks: Ranks) -> str | None:
    """Returns why Horovod cannot be measured, or None if it can. Every rank must call it."""
    problem = None
    try:
        size = horovod_module().size()
        if size != ranks.size:
            problem = f"it has {size} ranks, and hvdlite {ranks.size}: start the benchmark with mpirun"
    except (ImportError, ValueError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    return ranks.first(problem and f"horovod cannot be measured: {problem}")


VARIANTS: dict[str, Callable[[Ranks, nn.Module], Training]] = {
    "none": lambda ranks, model: Training(model, sgd(model)),
    "per-parameter": _per_parameter,
    "ddp": ddp,
    "ddp-view": partial(ddp, as_views=True),
    "ddp-fp16": partial(ddp, hook=in_fp16),
    "hvdlite": own,
    "hvdlite-fp16": partial(own, compression=Compression.fp16),
    "hvdlite-bf16": partial(own, compression=Compression.bf16),
    "hvdlite-tuned": partial(own, autotune=True),
    "hvdlite-arrival": partial(own, step_on_arrival=True),
    "horovod": _horovod,
}


def variants_flag(known: Collection[str], usual: Collection[str]) -> dict[str, Any]:
    """Returns the metadata of the flag ``--variants``. Without the flag, the variants in ``usual`` are measured."""
    unusual = ", ".join(each for each in known if each not in usual)
    return flag("NAME,…", some_of(known, "a variant"), f"of {', '.join(known)} (all but {unusual})")
