"""What programs call: they are printed with the functions of this module, and the truth uses the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import hvdlite as hvd


def draw(like: Tensor, batch: int, rank: int) -> Tensor:
    """Returns random numbers in the shape and dtype of a parameter, the same for the same batch and rank."""
    generator = torch.Generator().manual_seed(7919 * batch + rank + 1)
    if like.is_complex():
        return torch.randn(like.shape, generator=generator, dtype=torch.complex128).to(like.dtype)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def param(shape: Sequence[int], seed: int, dtype: str = "float64", kind: str = "plain") -> torch.nn.Parameter:
    """Returns a parameter, the same on every rank."""
    value = 0.3 * draw(torch.empty(shape, dtype=getattr(torch, dtype)), seed, -1)
    if kind == "channels_last":
        value = value.to(memory_format=torch.channels_last)
    if kind == "transposed":
        value = value.t().contiguous().t()
    return torch.nn.Parameter(value)


def use(param: Tensor, batch: int, rank: int, times: int = 1) -> Tensor:
    """Returns a loss of one parameter, used several times."""
    total = torch.zeros((), dtype=torch.float64)
    for time in range(times):
        product = (param * draw(param, batch + 100000 * time, rank)).sum()
        total = total + torch.tanh((product.abs() if product.is_complex() else product).double())
    return total


def look(table: Tensor, batch: int, rank: int, times: int = 1) -> Tensor:
    """Returns a loss of some rows of an embedding's table, whose gradient is sparse."""
    rows = torch.randint(len(table), (2 * times,), generator=torch.Generator().manual_seed(7919 * batch + rank + 1))
    picked = torch.nn.functional.embedding(rows, table, sparse=True)
    return torch.tanh((picked * draw(picked, batch, rank)).sum().double())


def backward(losses: Sequence[Tensor], change: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
    """Computes gradients of the sum of some losses, changed as by a GradScaler. Without losses there is no pass."""
    loss = sum(losses, torch.zeros((), dtype=torch.float64))
    changed = change(loss)
    if loss.requires_grad:
        changed.backward()


def grads_of(params: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Returns copies of gradients, as they are right before a step."""
    return {
        name: None
        if param.grad is None
        else param.grad.detach().coalesce().clone()
        if param.grad.is_sparse
        else param.grad.detach().clone()
        for name, param in params.items()
    }


class Normed(torch.optim.Optimizer):
    """Divides each gradient by one more than its norm: of a part of a parameter that is something else."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad, state = param.grad.to_dense(), self.state[param]
                    unit = grad / (1 + torch.linalg.vector_norm(grad).to(grad.dtype))
                    state["sum"] = unit + 0.5 * state.get("sum", torch.zeros_like(unit))
                    param.add_(state["sum"], alpha=-group["lr"])
        return loss


class Mean(hvd.Exchange):
    """An exchange of a user's own, which averages."""

    def begin(self, gradients: Any, links: Any) -> Any:
        flat = torch.view_as_real(gradients.flat) if gradients.flat.is_complex() else gradients.flat
        return hvd.ExchangeWork(gradients, [links.all.all_reduce(flat, f"the sum of the {gradients.what}")])


class Rounding(hvd.Compressor):
    """A compression of a user's own: float64 travels as float32."""

    def compress(self, buffer: Tensor) -> Tensor:
        return buffer.to(torch.float32)

    def decompress(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire)
