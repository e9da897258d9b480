"""No call from backward to step waits for the device: on one without memory, every access to a value is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import wrap

import hvdlite as hvd
from hvdlite.comm.engine import EngineWork, SingleRankEngine, SingleRankFactory
from hvdlite.comm.group import Group
from hvdlite.optim import arguments
from hvdlite.signing import Signer

DEVICE = torch.device("meta")


@pytest.fixture(autouse=True)
def _the_device_may_be_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users' parameters must have values; on the device of this test, every access to one is detected."""
    monkeypatch.setattr(arguments, "check_sendable", lambda *_: None)


class Echoes(SingleRankEngine):
    """Stands for the engine of several ranks that all do the same."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], /) -> EngineWork:
        for output in outputs[0][1:]:
            output.copy_(inputs[0])
        return super().allgather(outputs, inputs)


class EchoChannels(SingleRankFactory):
    def open(self) -> Echoes:
        return Echoes()


class StaysOnTheDevice(TorchDispatchMode):
    """Notes operations that ask the device for a value, and copies between it and the host."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor) and value.dim() > 0]
        if func is torch.ops.aten._local_scalar_dense.default or len({tensor.device for tensor in tensors}) > 1:
            self.crossings.append(str(func))
        return result


class Net(nn.Module):
    """A model with one layer that is frozen, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.never = nn.Linear(2, 2)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.frozen(x))


def crossings_of_a_step(optimizer: hvd.DistributedOptimizer, model: nn.Module, set_to_none: bool) -> list[str]:
    optimizer.zero_grad(set_to_none)
    loss = model(torch.ones(4, 3, device=DEVICE)).sum()
    with StaysOnTheDevice() as watched:
        loss.backward()
        optimizer.step()
    return watched.crossings


@pytest.mark.parametrize(("size", "make"), [(1, Net), (2, lambda: Net().layers[:1])])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options", [{"step_on_arrival": True}, {}, {"gradient_predivide_factor": 2.0, "compression": hvd.Compression.fp16}]
)
def test_a_step_asks_the_device_for_nothing(size, make, set_to_none, options):
    model = make().to(DEVICE)
    group = Group(EchoChannels(), 0, size, ["here"] * size, signer=Signer(b"alone"))
    optimizer = wrap(group, model.parameters(), lr=0.1, momentum=0.9, bucket_cap_mb=0.0001, **options)
    # What is copied to the device is copied once.
    crossings_of_a_step(optimizer, model, set_to_none)
    assert [crossings_of_a_step(optimizer, model, set_to_none) for _ in range(2)] == [[], []]


def test_the_watch_over_it_sees_what_would_wait():
    with StaysOnTheDevice() as watched:
        torch.ones(3, device=DEVICE).copy_(torch.ones(3))
        torch.ones(3).sum().item()
    assert watched.crossings == ["aten.copy_.default", "aten._local_scalar_dense.default"]
