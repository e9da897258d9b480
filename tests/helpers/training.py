"""What most tests of training do: wrap an SGD for some ranks, and take steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from ranks import set_of
from torch import Tensor, nn

import hvdlite as hvd
from hvdlite.comm.group import Group

T = TypeVar("T")


def wrap(
    where: Group | hvd.ProcessSet,
    params: nn.Module | Iterable[Any],
    named_parameters: Any = None,
    *,
    lr: float = 1.0,
    momentum: float = 0.0,
    **options: Any,
) -> hvd.DistributedOptimizer:
    """Wraps an SGD over a model, with its names, or over parameters; averages are over these ranks."""
    if isinstance(params, nn.Module):
        params, named_parameters = params.parameters(), params.named_parameters()
    inner = torch.optim.SGD(params, lr=lr, momentum=momentum)
    process_set = set_of(where) if isinstance(where, Group) else where
    return hvd.DistributedOptimizer(inner, named_parameters, process_set=process_set, **options)


def wrap_numbered(
    where: Group | hvd.ProcessSet, params: Sequence[nn.Parameter], compression: Any, **options: Any
) -> hvd.DistributedOptimizer:
    """`wrap` with this compression, for parameters that are named p0, p1, ..."""
    named = [(f"p{number}", param) for number, param in enumerate(params)]
    return wrap(where, params, named, compression=compression, **options)


def take_steps(optimizer: torch.optim.Optimizer, loss_of: Callable[[T], Tensor], steps: Iterable[T]) -> None:
    """Takes a step for each of ``steps``: its number, or its batch. ``loss_of`` returns its loss on this rank."""
    for each in steps:
        optimizer.zero_grad()
        loss_of(each).backward()
        optimizer.step()
