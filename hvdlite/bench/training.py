"""
What is trained to be measured: models with random data, and variants: hvdlite, DDP, Horovod, and no communication.

docs/measuring.md has tables of both. To add a variant, write a function that returns its `Training`, with a model and
an optimizer of its own, and add it to `VARIANTS`. The techniques of `links` are made by `ddp` and `own` too. What a
variant wraps is one of `OPTIMIZERS`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ..compression.casts import Compression
from ..optim.optimizer import DistributedOptimizer
from .arguments import OptionError, choice_flag, flag, read_count, some_of
from .ranks import Ranks

# Inputs and targets.
Batch = tuple[Tensor, Tensor]


class Gpt(nn.Module):
    """A causal language model over characters."""

    def __init__(
        self, vocabulary: int = 256, time: int = 128, width: int = 384, depth: int = 6, heads: int = 6
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        block = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch × time, vocabulary) of tokens (batch, time)."""
        time = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=x.device)
        embedded = self.tokens(x) + self.positions(torch.arange(time, device=x.device))
        out: Tensor = self.head(self.blocks(embedded, mask, is_causal=True))
        return out.flatten(0, 1)


class Residual(nn.Module):
    """A residual block of two convolutions; a stride of 2 halves height and width."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_convolution(channels, width, 3, stride), nn.ReLU(), *_convolution(width, width, 3)
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Sequential(*_convolution(channels, width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, channels, height, width) to (batch, width, height / stride, width / stride)."""
        return functional.relu(self.convolutions(x) + self.shortcut(x))


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width)]


def small_resnet(blocks: int = 18) -> nn.Module:
    """Returns a ResNet for 32 × 32 images, with 6 × ``blocks`` + 2 layers in three widths."""
    layers: list[nn.Module] = [*_convolution(3, 16, 3), nn.ReLU()]
    channels = 16
    for width in (16, 32, 64):
        for number in range(blocks):
            layers.append(Residual(channels, width, 2 if width > 16 and number == 0 else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _mlp(width: int = 2048, depth: int = 6) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _resnet50() -> nn.Module:
    model: nn.Module = importlib.import_module("torchvision.models").resnet50()
    return model


def _missing_torchvision() -> str | None:
    try:
        importlib.import_module("torchvision.models")
    # A torchvision that was built for another torch raises RuntimeError.
    except (ImportError, RuntimeError) as error:
        return "resnet50 needs torchvision, which cannot be imported: " + str(error).partition("\n")[0]
    return None


@dataclass(frozen=True)
class Workload:
    """A model and its data. ``rows`` is the default batch size of each rank."""

    name: str
    rows: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    targets_per_row: int = 1
    missing: Callable[[], str | None] = lambda: None
    """Returns a message about a package that the model needs and that is not installed, or None."""

    def batch(self, rows: int, seed: int, device: torch.device) -> Batch:
        """Returns random inputs and targets on ``device``."""
        torch.manual_seed(seed)
        targets = torch.randint(self.classes, (rows * self.targets_per_row,))
        return self.inputs(rows).to(device), targets.to(device)

    def make(self, device: torch.device, optimizer: str = "sgd") -> nn.Module:
        """Returns the model on ``device``, with the same parameters on every rank: for Muon all but matrices frozen."""
        torch.manual_seed(0)
        model = self.build().to(device)
        for param in model.parameters():
            param.requires_grad_(optimizer != "muon" or param.dim() == 2)
        return model


def bytes_of(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def training_bytes(model: nn.Module, optimizer: str = "sgd") -> int:
    """Returns a rough number of bytes for training: parameters, gradients, buckets, wires and the optimizer's state."""
    return (4 if optimizer == "sgd" else 6) * bytes_of(model)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", 16, _mlp, lambda rows: torch.randn(rows, 2048), 2048),
        Workload("gpt", 4, Gpt, lambda rows: torch.randint(256, (rows, 128)), 256, targets_per_row=128),
        Workload("resnet-small", 8, small_resnet, lambda rows: torch.randn(rows, 3, 32, 32), 10),
        Workload(
            "resnet50", 8, _resnet50, lambda rows: torch.randn(rows, 3, 224, 224), 1000, missing=_missing_torchvision
        ),
    )
}
MODEL = choice_flag("NAME", WORKLOADS, f"one of {', '.join(WORKLOADS)} (mlp)")
BATCH = flag("ROWS", read_count, "of each rank (the model's own)")


def workload_of(model: str) -> Workload:
    """Returns the workload that ``--model`` names. Raises OptionError if a package for it is missing."""
    workload = WORKLOADS[model]
    missing = workload.missing()
    if missing is not None:
        raise OptionError(f"--model: {missing}")
    return workload


@dataclass(frozen=True)
class Training:
    """A model and its optimizer. ``average`` averages gradients after backward, if model and optimizer do not.

    Within ``averaged()`` the model has the parameters that all hosts share.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    averaged: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self, batch: Batch) -> None:
        inputs, targets = batch
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        self.average()
        self.optimizer.step()


Inner = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of some parameters that a variant wraps."""

sgd: Inner = partial(torch.optim.SGD, lr=1e-4, foreach=True)
OPTIMIZERS: dict[str, Inner] = {
    "sgd": sgd,
    "momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "muon": partial(torch.optim.Muon, lr=1e-4),
}
OPTIMIZER = choice_flag("NAME", OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)} (%(default)s); muon trains matrices alone")


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are not frozen."""
    return [param for param in model.parameters() if param.requires_grad]


Make = Callable[..., Training]
"""Returns training in one way, from `Ranks`, the model, and the maker of the optimizer, `sgd` if that is left out."""


def _alone(ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training:
    return Training(model, inner(trained(model)))


def _per_parameter(ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training:
    group = ranks.rival()

    def average() -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        works = [dist.all_reduce(grad, group=group, async_op=True) for grad in reversed(grads)]
        for work in works:
            assert work is not None, "it is asynchronous"
            work.wait()
        torch._foreach_div_(grads, ranks.size)

    return Training(model, inner(trained(model)), average)


def ddp(
    ranks: Ranks,
    model: nn.Module,
    inner: Inner = sgd,
    *,
    as_views: bool = False,
    shards: bool = False,
    bucket_cap_mb: int | None = None,
    hook: Callable[[dist.ProcessGroup, DistributedDataParallel], None] | None = None,
) -> Training:
    """Returns training with DDP. ``hook`` registers a communication hook, and is given DDP's process group.

    With ``shards`` each rank has the optimizer's state of its part of the parameters alone.
    """
    device_ids = None if ranks.device.type == "cpu" else [ranks.device.index]
    group = ranks.rival()
    wrapped = DistributedDataParallel(
        model, device_ids, process_group=group, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=as_views
    )
    if hook is not None:
        hook(group, wrapped)
    if shards:
        zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        return Training(wrapped, zero(trained(model), inner, group))
    return Training(wrapped, inner(trained(model)))


def in_fp16(group: dist.ProcessGroup, wrapped: DistributedDataParallel) -> None:
    """Makes DDP send gradients in fp16."""
    wrapped.register_comm_hook(group, fp16_compress_hook)


def own(ranks: Ranks, model: nn.Module, inner: Inner = sgd, **options: Any) -> Training:
    """Returns training with hvdlite's optimizer, with these options."""
    optimizer = DistributedOptimizer(inner(trained(model)), model.named_parameters(), **options)
    return Training(model, optimizer, close=optimizer.close, averaged=optimizer.averaged)


def _horovod(ranks: Ranks, model: nn.Module, inner: Inner = sgd) -> Training:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return Training(model, horovod_module().DistributedOptimizer(inner(trained(model)), named_parameters=named))


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


VARIANTS: dict[str, Make] = {
    "none": _alone,
    "per-parameter": _per_parameter,
    "ddp": ddp,
    "ddp-view": partial(ddp, as_views=True),
    "ddp-fp16": partial(ddp, hook=in_fp16),
    "ddp-zero": partial(ddp, as_views=True, shards=True),
    "hvdlite": own,
    "hvdlite-fp16": partial(own, compression=Compression.fp16),
    "hvdlite-bf16": partial(own, compression=Compression.bf16),
    "hvdlite-tuned": partial(own, autotune=True),
    "hvdlite-arrival": partial(own, step_on_arrival=True),
    "hvdlite-shard": partial(own, shard="world"),
    "horovod": _horovod,
}
UNUSUAL = ("ddp-zero", "hvdlite-tuned", "hvdlite-arrival", "hvdlite-shard")
"""Those that are measured only if they are named."""


def variants_flag(known: Collection[str], usual: Collection[str]) -> dict[str, Any]:
    """Returns the metadata of the flag ``--variants``. Without the flag, the variants in ``usual`` are measured."""
    unusual = ", ".join(each for each in known if each not in usual)
    return flag("NAME,…", some_of(known, "a variant"), f"of {', '.join(known)} (all but {unusual})")
