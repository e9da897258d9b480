"""
Small synchronous calls between the ranks of one host, whose data go with the vote on the call (`control.voting`).

    api.allreduce(tensor) ── small and plain? ── DirectCall ── the result
                                   └─ no ── None: a `base.Collective`, as any other call

A call takes about a tenth of the time of an operation that goes through the executor and the engine. Its results have
the same bits, and what goes wrong ends as it does there: a call that the other ranks do not make at the same time
becomes that operation. The functions here return None unless the tensor and the arguments are valid and ordinary; the
usual way then finds the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..calls.operation import ALLGATHER, ALLREDUCE, BARRIER, BROADCAST, DirectCall, Kind, Operation
from ..comm.reduce_op import OP_OF_ENGINE, Average, ReduceOp
from ..outside_graphs import keep_outside_graphs
from ..runtime.functions import global_process_set
from ..runtime.world import current_world, is_initialized
from ..shm.board import VoteData
from ..shm.control_block import PAYLOAD_BYTES
from .allreduce import Allreduce
from .base import in_callers_modes
from .broadcast import Broadcast
from .reduction import Reduction
from .rows import Allgather
from .sendable import is_sendable

Result = TypeVar("Result")

# The others need more than one pass, or a form of their own (see `reduction`).
_AVERAGED = frozenset((torch.float32, torch.float64))
_REDUCED = _AVERAGED | {torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64}
_SENT = _REDUCED | {torch.int16, torch.bool}

_OPS: dict[ReduceOp, Any] = {op: of_engine.op for op, of_engine in OP_OF_ENGINE.items()}  # type: ignore[attr-defined]  # not in torch's stubs
_OPS[Average] = dist.ReduceOp.AVG


def allreduce(tensor: Any, name: Any, op: Any, process_set: Any) -> Tensor | None:
    """Does an all-reduce without factors and compression, if it can be done directly."""
    op = Average if op is None else op
    if not (isinstance(op, ReduceOp) and op in _OPS and _is_small(tensor, _AVERAGED if op is Average else _REDUCED)):
        return None

    def result(data: VoteData) -> Tensor:
        return data.reduced(_OPS[op], tensor.shape, tensor.dtype)

    def usual() -> Operation:
        return Allreduce(ALLREDUCE, [tensor], name, process_set, Reduction(op)).operation()

    same = _agreed("allreduce", tensor.dtype, tensor.shape, op)
    return _call(name, process_set, ALLREDUCE, same, tensor, result, usual)


def broadcast(tensor: Any, root_rank: Any, name: Any, process_set: Any) -> Tensor | None:
    """Does a broadcast, if it can be done directly."""
    if not (type(root_rank) is int and _is_small(tensor, _SENT) and 0 <= root_rank < _ranks()):
        return None

    def result(data: VoteData) -> Tensor:
        return data.elements(tensor.dtype, tensor.numel())[root_rank].view(tensor.shape).clone()

    def usual() -> Operation:
        return Broadcast(BROADCAST, [tensor], name, process_set, root_rank).operation()

    same = _agreed("broadcast", tensor.dtype, tensor.shape, root_rank)
    return _call(name, process_set, BROADCAST, same, tensor, result, usual)


def allgather(tensor: Any, name: Any, process_set: Any) -> Tensor | None:
    """Does an all-gather, if it can be done directly: the ranks must have as many rows as each other."""
    if not _is_small(tensor, _SENT):
        return None

    def result(data: VoteData) -> Tensor:
        parts = data.elements(tensor.dtype, tensor.numel())
        rows = len(tensor) if tensor.dim() else 1
        joined: Tensor = tensor.new_empty((len(parts) * rows, *tensor.shape[1:]))
        # With `out`, which autocast leaves alone.
        torch.cat(parts, out=joined.view(-1))
        return joined

    def usual() -> Operation:
        return Allgather(ALLGATHER, [tensor], name, process_set).operation()

    same = _agreed("allgather", tensor.dtype, tensor.shape, None)
    return _call(name, process_set, ALLGATHER, same, tensor, result, usual)


def barrier(operation: Operation, process_set: Any) -> bool:
    """Waits for all ranks, if it can be done directly; returns whether it has. ``operation`` is the same barrier."""
    return _is_ordinary() and bool(
        _call(None, process_set, BARRIER, b"barrier", None, lambda data: True, lambda: operation)
    )


def _is_small(tensor: Any, dtypes: frozenset[torch.dtype]) -> bool:
    """Whether the tensor's bytes can go with a vote as they are, and no gradient must flow."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.dtype in dtypes
        and _is_ordinary()
        # Before what tensors without values, or in another form, cannot answer.
        and is_sendable(tensor)
        and tensor.is_contiguous()
        and 0 < tensor.nbytes <= PAYLOAD_BYTES
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not tensor.is_neg()
    )


def _is_ordinary() -> bool:
    """Whether no mode of torch changes what its functions do on this thread."""
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    )


def _ranks() -> int:
    return current_world().group.size if is_initialized() else 0


@lru_cache(maxsize=1024)
def _agreed(kind: str, dtype: torch.dtype, shape: torch.Size, argument: int | None) -> bytes:
    """What is equal on all ranks that make this call."""
    return repr((kind, str(dtype), tuple(shape), None if argument is None else int(argument))).encode()


def _call(
    name: Any,
    process_set: Any,
    kind: Kind,
    agreed: bytes,
    tensor: Tensor | None,
    result: Callable[[VoteData], Result],
    usual: Callable[[], Operation],
) -> Result | None:
    """Makes the call, if all ranks share memory; None if not."""
    if process_set is not global_process_set or not (name is None or type(name) is str) or not is_initialized():
        return None
    world = current_world()
    if not world.controller.calls_directly:
        return None
    survival = world.survival
    if survival is not None and survival.error_of_call("") is not None:
        return None
    is_inference = torch.is_inference_mode_enabled()
    operation = lambda: in_callers_modes(usual(), is_inference)  # noqa: E731  # a def takes three lines
    call = DirectCall(kind, name, agreed, tensor, result, operation, is_inference)
    made: Result | None = world.controller.call_directly(world.group, call)
    return made


keep_outside_graphs(globals())
