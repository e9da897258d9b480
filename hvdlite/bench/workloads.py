"""
The models whose training `step`, `memory` and `links` measure, with random data. docs/measuring.md has a table of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .arguments import UsageError, flag, one_of, read_count

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

    def make(self, device: torch.device) -> nn.Module:
        """Returns the model on ``device``, with the same parameters on every rank."""
        torch.manual_seed(0)
        return self.build().to(device)


def bytes_of(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters."""
    return sum(param.nbytes for param in model.parameters())


def training_bytes(model: nn.Module) -> int:
    """Returns a rough number of bytes for training: parameters, gradients, buckets and wires."""
    return 4 * bytes_of(model)


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
MODEL = flag("NAME", one_of(WORKLOADS, "a model"), f"one of {', '.join(WORKLOADS)} (mlp)")
BATCH = flag("ROWS", read_count, "of each rank (the model's own)")


def workload_of(model: str | None) -> Workload:
    """Returns the workload that ``--model`` names, or the MLP. Raises UsageError if a package for it is missing."""
    workload = WORKLOADS[model or "mlp"]
    missing = workload.missing()
    if missing is not None:
        raise UsageError(f"--model: {missing}")
    return workload
