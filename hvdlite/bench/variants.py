"""
The ways to train that are compared. Each has a model and an optimizer of its own, and takes whole steps.

    none           no communication at all: each rank for itself
    per-parameter  after backward, an all-reduce for each gradient
    ddp            DistributedDataParallel as it is; ddp-view with gradients as views of its buckets, ddp-fp16 with its
                   fp16 hook
    hvdlite        DistributedOptimizer; hvdlite-fp16 and hvdlite-bf16 with these wires, hvdlite-tuned with autotune,
                   hvdlite-arrival with step_on_arrival
    horovod        Horovod's own DistributedOptimizer, where that is installed
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ..compression.casts import AnyCompression, Compression
from ..optim.optimizer import DistributedOptimizer
from .errors import UsageError
from .ranks import Ranks
from .trainings import Training

Make = Callable[[Ranks, nn.Module], Training]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)


def _none(ranks: Ranks, model: nn.Module) -> Training:
    return Training(model, sgd(model))


def _per_parameter(ranks: Ranks, model: nn.Module) -> Training:
    group = ranks.rival()

    def average() -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        works = [dist.all_reduce(grad, group=group, async_op=True) for grad in reversed(grads)]
        for work in works:
            assert work is not None, "it is asynchronous"
            work.wait()
        torch._foreach_div_(grads, ranks.size)

    return Training(model, sgd(model), after_backward=average)


def _ddp(ranks: Ranks, model: nn.Module, *, as_views: bool = False, in_fp16: bool = False) -> Training:
    device_ids = None if ranks.device.type == "cpu" else [ranks.device.index]
    group = ranks.rival()
    wrapped = DistributedDataParallel(model, device_ids, process_group=group, gradient_as_bucket_view=as_views)
    if in_fp16:
        wrapped.register_comm_hook(group, fp16_compress_hook)
    return Training(wrapped, sgd(model))


def _hvdlite(
    ranks: Ranks,
    model: nn.Module,
    *,
    compression: AnyCompression = Compression.none,
    autotune: bool = False,
    on_arrival: bool = False,
) -> Training:
    optimizer = DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, autotune=autotune, step_on_arrival=on_arrival
    )
    return Training(model, optimizer, close=optimizer.close)


def _horovod(ranks: Ranks, model: nn.Module) -> Training:
    optimizer = horovod_module().DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return Training(model, optimizer)


def horovod_module() -> Any:
    """Horovod itself, begun; an ImportError where it is not there, and hvdlite under its name is not it."""
    spec = importlib.util.find_spec("horovod")
    own = Path(__file__).parents[1]
    if spec is None or Path(spec.origin or "/").is_relative_to(own):
        raise ImportError("there is no Horovod here")
    module = importlib.import_module("horovod.torch")
    module.init()
    return module


def require_horovod(ranks: Ranks) -> None:
    """Raise a UsageError where Horovod cannot be compared with; every rank must call it."""
    why = None
    try:
        size = horovod_module().size()
        if size != ranks.size:
            why = f"it sees {size} ranks and hvdlite {ranks.size}: start both by mpirun"
    except (ImportError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
    why = ranks.first(why)
    if why is not None:
        raise UsageError(f"horovod cannot be measured: {why}")


VARIANTS: Mapping[str, Make] = MappingProxyType(
    {
        "none": _none,
        "per-parameter": _per_parameter,
        "ddp": _ddp,
        "ddp-view": partial(_ddp, as_views=True),
        "ddp-fp16": partial(_ddp, in_fp16=True),
        "hvdlite": _hvdlite,
        "hvdlite-fp16": partial(_hvdlite, compression=Compression.fp16),
        "hvdlite-bf16": partial(_hvdlite, compression=Compression.bf16),
        "hvdlite-tuned": partial(_hvdlite, autotune=True),
        "hvdlite-arrival": partial(_hvdlite, on_arrival=True),
        "horovod": _horovod,
    }
)
# What is measured unless others are asked for.
USUAL = tuple(name for name in VARIANTS if name not in ("hvdlite-tuned", "hvdlite-arrival"))
