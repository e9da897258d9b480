"""
The techniques of sending gradients that `links` compares: those of hvdlite, and DDP's.

docs/measuring.md has a table of them. To add one, write a `Technique`, and add it to `TECHNIQUES`.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..buckets.outer import DiLoCo, LocalSGD
from ..compression.casts import Compression
from .ranks import Ranks
from .variants import Inner, Training, ddp, in_fp16, own, sgd
from .workloads import bytes_of

DDP, DDP_FP16 = "ddp", "ddp-fp16"
_RANK = 4  # of the thin matrices of both PowerSGDs
# Unmeasured steps. In the third one DDP's PowerSGD compresses for the first time; it allows no earlier start.
_WARM_UPS, _DDP_START_STEP = 3, 2


class Make(Protocol):
    """Returns training of a model with one technique, and with the optimizer that ``inner`` makes."""

    def __call__(self, ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training: ...


@dataclass(frozen=True)
class Technique:
    """How gradients are sent. All blocks take ``interval`` steps, since only the last of them may send anything."""

    make: Make
    interval: int = 1

    @property
    def warm_ups(self) -> int:
        """The number of unmeasured steps: whole intervals, so that each block is one."""
        return _WARM_UPS if self.interval == 1 else self.interval


def _ddp_powersgd(ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training:
    # Over gloo in a single bucket. The hook starts its second and third all-reduce in callbacks, whose order between
    # buckets may differ between ranks, and which then wait for each other: ranks end with an error, or hang.
    cap_mb = None if ranks.device.type == "cuda" else bytes_of(model) // 2**20 + 1
    return ddp(ranks, model, inner, bucket_cap_mb=cap_mb, hook=_powersgd_hook)


def _powersgd_hook(group: dist.ProcessGroup, wrapped: DistributedDataParallel) -> None:
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    state = hooks.PowerSGDState(group, matrix_approximation_rank=_RANK, start_powerSGD_iter=_DDP_START_STEP)
    wrapped.register_comm_hook(state, hooks.powerSGD_hook)


def _compressed(compression: object) -> Technique:
    return Technique(partial(own, compression=compression))


def _outer(outer: LocalSGD | DiLoCo) -> Technique:
    return Technique(partial(own, outer=outer), outer.sync_every)


TECHNIQUES = {
    DDP: Technique(ddp),
    DDP_FP16: Technique(partial(ddp, hook=in_fp16)),
    "ddp-powersgd": Technique(_ddp_powersgd),
    "none": _compressed(Compression.none),
    "fp16": _compressed(Compression.fp16),
    "bf16": _compressed(Compression.bf16),
    "int8": _compressed(Compression.int8),
    "int4": _compressed(Compression.int4),
    "topk": _compressed(Compression.topk()),
    "powersgd": _compressed(Compression.powersgd(_RANK, start_step=0)),
    "localsgd": _outer(LocalSGD(sync_every=8)),
    "diloco": _outer(DiLoCo(sync_every=100, compression=Compression.int4)),
}


def is_ddp(name: str) -> bool:
    """Whether this is the name of a technique of DDP."""
    return name.startswith(DDP)


def missing_for(name: str) -> str | None:
    """Returns a message about a package that the technique needs and that is not installed, or None."""
    if name == "ddp-powersgd" and importlib.util.find_spec("numpy") is None:
        return "ddp-powersgd: PyTorch's hook needs numpy, which is not installed"
    return None
