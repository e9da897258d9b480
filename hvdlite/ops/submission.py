"""
How an operation on tensors is asked for, whatever it is: checked, named, and carried out as if by its caller.

    operation_async ── submit ── the controller, another thread ── body ── Handle

The body runs on a thread of the controller's, with the caller's CUDA stream and inference mode and without autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..control.handle import Handle
from ..control.request import Execution, Request
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import group_of
from ..runtime.world import current_world
from ..values import shown
from .travel import check_is_outside, check_travels


def submit(
    request: Request, process_set: ProcessSet, tensors: Sequence[Tensor], body: Callable[[Execution], Any]
) -> Handle:
    """Ask for an operation among the ranks of a process set; ``tensors`` are those that the body reads or writes."""
    check_is_outside(request.describe())
    streams = [torch.cuda.current_stream(device) for device in {t.device: None for t in tensors if t.is_cuda}]
    is_inference = torch.is_inference_mode_enabled()

    def run(execution: Execution) -> Any:
        with ExitStack() as as_the_caller:
            as_the_caller.enter_context(torch.inference_mode(is_inference))
            as_the_caller.enter_context(torch.no_grad())
            # With HVDLITE_CHECK=0 the body runs on the caller's thread, where a `with torch.device(...)` would decide
            # on which device it makes its tensors.
            as_the_caller.enter_context(torch._C.DisableTorchFunction())
            for stream in reversed(streams):
                as_the_caller.enter_context(torch.cuda.stream(stream))
            return body(execution)

    def take() -> None:
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    handle = current_world().controller.submit(group_of(process_set, request.describe()), request, run)
    if streams:
        handle.before_taking = take
    return handle


def signature(tensors: Sequence[Tensor], *, is_group: bool, any_first: bool = False) -> dict[str, Any]:
    """The dtype, shape and device that all ranks must agree on; lists of them for a group.

    With ``any_first`` the first dimension may differ by rank, and is given as -1.
    """
    dtypes = [str(tensor.dtype) for tensor in tensors]
    shapes = [[-1, *tensor.shape[1:]] if any_first else list(tensor.shape) for tensor in tensors]
    devices = [tensor.device.type for tensor in tensors]
    if is_group:
        return {"dtype": dtypes, "shape": shapes, "device": devices}
    return {"dtype": dtypes[0], "shape": shapes[0], "device": devices[0]}


def check_tensors(tensors: object, what: str) -> list[Tensor]:
    """The tensors of a grouped operation as `check_travels` gives them, or a TypeError."""
    if isinstance(tensors, Tensor | str | bytes | bytearray) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what}: {type(tensors).__name__} is not a list of tensors: put it in one, as [tensor]")
    return [check_travels(tensor, f"{what}: tensor {number}") for number, tensor in enumerate(tensors)]


def title(kind: str, name: str | None) -> str:
    """What messages call an operation; a TypeError where the name is not a str."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{kind}: name={shown(name)} is not a str: pass one, or leave it out")
    return Request(kind, name).describe()
