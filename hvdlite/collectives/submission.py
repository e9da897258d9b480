"""
How an operation on tensors is asked for, whatever it is: checked, named, and carried out as if by its caller.

    operation_async ── submit ── the conductor, another thread ── body ── Handle

The body runs on a thread of the conductor's, with the caller's CUDA stream and inference mode and without autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..agreement.handle import Handle
from ..agreement.request import Request, Turn
from ..errors import WrongTypeError
from ..process_set import ProcessSet
from ..process_sets import group_of
from ..world import current_world


def submit(request: Request, process_set: ProcessSet, tensors: Sequence[Tensor], body: Callable[[Turn], Any]) -> Handle:
    """Ask for an operation among the ranks of a process set; ``tensors`` are those that the body reads or writes."""
    if request.name is not None and not isinstance(request.name, str):
        raise TypeError(f"{request.kind}: name={request.name!r} is not a str")
    streams = [torch.cuda.current_stream(device) for device in {t.device: None for t in tensors if t.is_cuda}]
    is_inference = torch.is_inference_mode_enabled()

    def run(turn: Turn) -> Any:
        with ExitStack() as as_the_caller:
            as_the_caller.enter_context(torch.inference_mode(is_inference))
            as_the_caller.enter_context(torch.no_grad())
            for stream in reversed(streams):
                as_the_caller.enter_context(torch.cuda.stream(stream))
            return body(turn)

    def take() -> None:
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    handle = current_world().conductor.submit(group_of(process_set, request.describe()), request, run)
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


def check_tensor(tensor: object, what: str) -> None:
    """Raise a TypeError unless it is a dense tensor, and a ValueError unless it has values."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what}: {type(tensor).__name__} is not a tensor: wrap it, as torch.tensor(value)")
    if tensor.layout != torch.strided:
        raise WrongTypeError(
            f"{what}: the tensor is {tensor.layout}: pass a dense one, as tensor.to_dense(), or sum it with "
            "hvd.sparse_allreduce_async"
        )
    check_has_values(tensor, f"{what}: the tensor")


def check_has_values(tensor: Tensor, what: str) -> None:
    """Raise a ValueError for a tensor that is a shape and no more."""
    if tensor.is_meta:
        raise ValueError(f"{what} is on the meta device and has no values: make it on a real one, as to_empty() does")


def check_tensors(tensors: object, what: str) -> list[Tensor]:
    """The tensors of a grouped operation as a list, or a TypeError."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what}: {type(tensors).__name__} is not a list of tensors")
    for number, tensor in enumerate(tensors):
        check_tensor(tensor, f"{what}: tensor {number}")
    return list(tensors)


def check_writable(tensor: Tensor, what: str) -> None:
    """Raise a ValueError if a tensor could not be overwritten; in the middle of an operation the others would hang."""
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{what}: elements of the tensor share their memory, as expand() makes them: clone() it")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{what}: the tensor was made in torch.inference_mode(), and is to change there only")


def title(kind: str, name: str | None) -> str:
    """What messages call an operation."""
    return Request(kind, name).describe()
