"""
The models whose steps are measured, with a batch for each.

    mlp           25 M parameters in six square layers           gpt        about 10 M, as nanoGPT's smallest
    resnet-small  0.2 to 2 M in hundreds of small tensors        resnet50   torchvision's
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import UsageError

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer's: attention to what came before, then two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_layers = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        rows, time, width = x.shape
        parts = self.attention_in(self.before_attention(x)).view(rows, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(rows, time, width))
        out: Tensor = x + self.layers(self.before_layers(x))
        return out


class Gpt(nn.Module):
    """Characters in, the next one's logits out."""

    def __init__(
        self, vocabulary: int = 256, time: int = 128, width: int = 384, depth: int = 6, heads: int = 6
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time) of tokens to (batch × time, vocabulary)."""
        places = torch.arange(x.shape[1], device=x.device)
        out: Tensor = self.head(self.blocks(self.tokens(x) + self.places(places)))
        return out.flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions beside what they add to; a stride of 2 halves the image."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(inputs, width, 3, step, 1, bias=False), nn.BatchNorm2d(width))
            for inputs, step in ((before, stride), (width, 1))
        )
        self.beside: nn.Module = nn.Identity()
        if stride != 1:
            self.beside = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, height, width) to what the stride makes of it."""
        out: Tensor = functional.relu(self.second(functional.relu(self.first(x))) + self.beside(x))
        return out


def small_resnet(blocks: int = 18) -> nn.Module:
    """As for CIFAR-10, of 6 × blocks + 2 layers in three widths."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for number in range(blocks):
            layers.append(Residual(before, width, 2 if width > 16 and number == 0 else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _mlp(width: int = 2048, depth: int = 6) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _resnet50() -> nn.Module:
    model: nn.Module = _torchvision().resnet50()
    return model


def _torchvision() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    # Where it was built for another torch, it is no ImportError.
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"resnet50 needs torchvision, which cannot be imported: {reason}") from None


@dataclass(frozen=True)
class Workload:
    """A model, and what it is trained on. ``rows`` is the batch of each rank, unless the user gives one."""

    name: str
    rows: int
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    targets_per_row: int = 1
    require: Callable[[], object] = lambda: None
    """Raises a UsageError where the model cannot be had here."""

    def batch(self, rows: int, seed: int, device: torch.device) -> Batch:
        """Noise, and what it is to be taken for."""
        torch.manual_seed(seed)
        targets = torch.randint(self.classes, (rows * self.targets_per_row,))
        return self.inputs(rows).to(device), targets.to(device)

    def make(self, device: torch.device) -> nn.Module:
        """The model, with the same parameters on every rank."""
        torch.manual_seed(0)
        return self.build().to(device)


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        workload.name: workload
        for workload in (
            Workload("mlp", 16, _mlp, lambda rows: torch.randn(rows, 2048), 2048),
            Workload("gpt", 4, Gpt, lambda rows: torch.randint(256, (rows, 128)), 256, targets_per_row=128),
            Workload("resnet-small", 8, small_resnet, lambda rows: torch.randn(rows, 3, 32, 32), 10),
            Workload("resnet50", 8, _resnet50, lambda rows: torch.randn(rows, 3, 224, 224), 1000, require=_torchvision),
        )
    }
)
