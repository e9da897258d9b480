"""
What is different at the beginning of a program under Horovod's names: `init`, and `broadcast_optimizer_state`.

Modules under Horovod's names have these in place of the functions of `hvdlite.torch`, as `HorovodBasics` has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hvdlite import torch as names
from hvdlite.environment import CheckParameters, read_environment
from hvdlite.outside_graphs import keep_outside_graphs


def init(
    comm: Any = None,
    process_sets: Iterable[names.ProcessSet] | str | None = None,
    *,
    timeout_s: float | None = None,
    check_parameters: CheckParameters | None = None,
) -> None:
    """Does what `hvdlite.torch.init` does; ranks with different parameters at the first step are warned of.

    There they are an error. Programs that ran with Horovod may take a step before they broadcast parameters, as to make
    an optimizer's state. Unless ``check_parameters`` is given, or ``HVDLITE_CHECK_PARAMETERS`` is set.
    """
    if check_parameters is None and read_environment(os.environ).check_parameters is True:
        check_parameters = "warn"
    names.init(comm, process_sets, timeout_s=timeout_s, check_parameters=check_parameters)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,
    *,
    process_set: names.ProcessSet = names.global_process_set,
) -> None:
    """Does what `hvdlite.torch.broadcast_optimizer_state` does, and leaves gradients of zeros as Horovod does.

    A rank whose optimizer has no state gets them for parameters that have no gradient. Those of the sparse embeddings
    of ``model`` are sparse. Horovod also takes a step with them; here none is taken, which would change parameters.
    """
    has_no_state = not getattr(optimizer, "state", True)
    names.broadcast_optimizer_state(optimizer, root_rank, model, process_set=process_set)
    if not has_no_state:
        return
    embeddings = [each for each in (model.modules() if model is not None else ()) if isinstance(each, nn.Embedding)]
    sparse = {id(each.weight) for each in embeddings if each.sparse}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and param.grad is None:
                param.grad = _sparse_zeros(param) if id(param) in sparse else torch.zeros_like(param)


class HorovodBasics:
    """Horovod's class with `init`, `rank`, `size` and so on as methods; each is the function of `hvdlite.torch`."""

    def __init__(self, *_: object) -> None:
        """Ignores Horovod's arguments, which locate its compiled library; hvdlite has none."""

    init = staticmethod(init)

    def __getattr__(self, name: str) -> Any:
        return getattr(names, name)


def _sparse_zeros(param: Tensor) -> Tensor:
    """Returns a gradient of an embedding without a row."""
    no_rows = torch.empty((1, 0), dtype=torch.int64, device=param.device)
    values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(
        no_rows, values, param.shape, dtype=param.dtype, device=param.device, check_invariants=False
    )


keep_outside_graphs(globals())
