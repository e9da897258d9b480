"""
`Collective`, the base class of each collective on tensors: checks its arguments, submits it, and differentiates it.

    Collective ── start ── controller ... another thread: run(execution) ── Handle      (asynchronous, and in place)
               └─ differentiable ── start and wait, with `gradient` for autograd       (synchronous)

A subclass defines its kind, the values that must be equal on all ranks, each rank's part once all ranks have requested
it, and its gradient. `run` is called on a thread of the controller, with the caller's CUDA stream and inference mode,
and without autograd.

Gradients are exactly Horovod's, with which its programs have been trained; the manual's `from-horovod` lists them.
Those of Min, Max, Product and Adasum are not derivatives. Every rank must go backward through each collective that it
went forward through. Collectives of the backward pass have the forward's name followed by ``.gradient``, and can be
differentiated again.

`compare` and `raise_together` are for what ranks must agree on besides: equal values, and failures of one of them.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from ..calls.handle import Handle
from ..calls.operation import Execution, Kind, Operation, describe
from ..comm.flat_bytes import as_base
from ..comm.group import Group
from ..errors import CommunicationError, MismatchError
from ..runtime.functions import group_of
from ..runtime.process_set import ProcessSet
from ..runtime.world import current_world, is_initialized
from ..values import shown
from .sendable import check_is_outside, check_sendable, plain_tensor

_MOST_WORDS = 2000
# Few enough that sums of squares over any number of ranks do not overflow.
_PRINT_BITS = 24


@dataclass(eq=False)
class Collective(ABC):
    """An operation on one tensor, or on several at a time, as one rank requests it.

    ``inputs`` have passed `check_sendable`. ``sources`` are plain tensors that share their memory.
    """

    kind: Kind
    inputs: Sequence[Tensor]
    name: str | None
    process_set: ProcessSet

    def __post_init__(self) -> None:
        self.what = title(self.kind, self.name)
        self.sources = [plain_tensor(tensor) for tensor in self.inputs]

    @abstractmethod
    def same(self) -> Mapping[str, Any]:
        """The values that must be equal on all ranks, as in `Operation`."""

    def own(self) -> Any:
        """The values of this rank that the other ranks need, as in `Operation`."""
        return None

    @abstractmethod
    def run(self, execution: Execution) -> Any:
        """Runs the collective, once all ranks have requested it; returns a tensor, or a tuple for a grouped kind."""

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        """Returns the gradients of the inputs; ``grads`` are those of the outputs, by number."""
        raise NotImplementedError(f"{self.what} has no gradient")

    def start(self) -> Handle:
        """Requests the collective, and returns at once."""
        return submit(self.operation(), self.process_set, self.sources)

    def operation(self) -> Operation:
        return Operation(self.kind, self.run, self.name, self.same(), self.own())

    def differentiable(self) -> tuple[Tensor, ...]:
        """Requests the collective and waits; gradients flow through the results to the input tensors."""
        # Not typed in every version of torch.
        untyped: Any = _Differentiable
        return untyped.apply(self, *self.inputs)  # type: ignore[no-any-return]  # what its forward returns

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Returns the outputs in the user's form: a tuple for a grouped kind, else the one tensor."""
        return tuple(outputs) if self.kind.is_grouped else outputs[0]

    def gradient_name(self) -> str | None:
        """The name of the collectives of the backward pass."""
        return None if self.name is None else f"{self.name}.gradient"

    def signature(self, *, any_rows: bool = False) -> dict[str, Any]:
        """Returns what ranks must agree on of the tensors; with ``any_rows``, not on the first dimension."""
        signature: dict[str, list[Any]] = {
            "dtype": [str(tensor.dtype) for tensor in self.sources],
            "shape": [[-1, *tensor.shape[1:]] if any_rows else list(tensor.shape) for tensor in self.sources],
            "device": [tensor.device.type for tensor in self.sources],
        }
        return signature if self.kind.is_grouped else {key: each for key, (each,) in signature.items()}


class _Differentiable(Function):
    """Any collective as an autograd function."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = collective.start().wait()
        # The graph must not keep the tensors alive until the backward pass.
        collective.inputs, collective.sources = [], []
        ctx.collective = collective
        # By dtype alone, so that it is the same on all ranks, whether or not a rank needs the gradients.
        ctx.members = [n for n, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]
        ctx.input_count = len(tensors)
        return tuple(as_base(output) for output in ((result,) if isinstance(result, Tensor) else result))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        results = ctx.collective.gradient({number: grads[number] for number in ctx.members})
        by_number = dict(zip(ctx.members, results, strict=True))
        return (None, *(by_number.get(number) for number in range(ctx.input_count)))


def submit(operation: Operation, process_set: ProcessSet, tensors: Sequence[Tensor]) -> Handle:
    """Requests an operation among the ranks of a process set; ``tensors`` are those that it reads or writes.

    On CUDA, it uses the caller's current streams, and the thread that takes the result waits for them on its own.
    """
    check_is_outside(operation.describe())
    streams = [torch.cuda.current_stream(device) for device in {t.device: None for t in tensors if t.is_cuda}]

    def take() -> None:
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    group, world = group_of(process_set, operation.describe()), current_world()
    if world.survival is not None and (error := world.survival.error_of_call(operation.describe())) is not None:
        # Raised where the operation is waited for, as the errors of all others that a lost rank fails.
        failed = Handle(operation.describe())
        failed.fail(error)
        return failed
    handle = world.controller.submit(group, in_callers_modes(operation, torch.is_inference_mode_enabled(), streams))
    if streams:
        handle.before_taking = take
    return handle


def in_callers_modes(operation: Operation, is_inference: bool, streams: Sequence[torch.cuda.Stream] = ()) -> Operation:
    """Returns the operation, to be run with these streams, this inference mode and no other mode of torch."""

    def run(execution: Execution) -> Any:
        # With HVDLITE_CHECK=0 it runs on the caller's thread, where a `with torch.device(...)` would choose the device
        # of the tensors that it makes.
        with torch.inference_mode(is_inference), torch.no_grad(), torch._C.DisableTorchFunction(), ExitStack() as stack:
            for stream in reversed(streams):
                stack.enter_context(torch.cuda.stream(stream))
            return operation.run(execution)

    return replace(operation, run=run)


def compare(group: Group, value: object, what: str) -> list[Any] | None:
    """Returns None if every rank of the group passed an equal JSON value, else all of them. It waits for all."""
    if group.size == 1 or not is_initialized():
        # A process set that is used without a world has no controller.
        return group.agree(value, what)
    operation = Operation(Kind(what), lambda execution: execution.group.agree(value, what))
    return current_world().controller.submit(group, operation).wait()  # type: ignore[no-any-return]  # what agree returns


def raise_together(
    group: Group, failure: Exception | None, what: str, *, layout: str = "", counts: Sequence[int] = ()
) -> list[int]:
    """Raises an error on every rank if one has a ``failure``. Every rank must call it; it waits for all.

    Raises this rank's ``failure``, or a CommunicationError that names the first rank with one. Raises a MismatchError
    if the ranks' ``layout`` differ, which is a text that describes what they send next. Returns the sums of all ranks'
    ``counts``, which have the same length on all ranks.
    """
    if group.size == 1:
        if failure is not None:
            raise failure
        return list(counts)
    mark = zlib.crc32(layout.encode()) >> (32 - _PRINT_BITS)
    sums_of_ranks = torch.tensor(
        [*counts, int(failure is not None), mark, mark * mark], dtype=torch.int64, device="cpu"
    )
    group.all_reduce(sums_of_ranks, f"the check before {what}").wait()
    *sums, failed, marks, squares = sums_of_ranks.tolist()
    # The variance of the marks is 0 only if all are equal.
    if failed or squares * group.size != marks * marks:
        _raise(group, failure, layout, what)
    return sums


def _raise(group: Group, failure: Exception | None, layout: str, what: str) -> None:
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"[:_MOST_WORDS]
    of_ranks = group.all_gather_json([mine, layout], f"the check before {what}")
    if failure is not None:
        raise failure
    for rank, (words, _) in enumerate(of_ranks):
        if words is not None:
            raise CommunicationError(
                f"{what} failed on {group.describe_rank(group.rank)} because of an error on "
                f"{group.describe_rank(rank)}: {words}"
            )
    other = next(rank for rank, (_, theirs) in enumerate(of_ranks) if theirs != of_ranks[0][1])
    raise MismatchError(
        f"{what}: the compression returned {of_ranks[0][1][:_MOST_WORDS]} on {group.describe_rank(0)} and "
        f"{of_ranks[other][1][:_MOST_WORDS]} on {group.describe_rank(other)}: it must return the same dtype and size "
        "on every rank"
    )


def check_tensors(kind: Kind, tensors: Any, what: str) -> list[Tensor]:
    """Returns the tensor, or the tensors of a grouped kind, after `check_sendable`; raises its errors."""
    if not kind.is_grouped:
        return [check_sendable(tensors, what)]
    if isinstance(tensors, Tensor | str | bytes | bytearray) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what}: {type(tensors).__name__} is not a list of tensors: pass [tensor]")
    return [check_sendable(tensor, f"{what}: tensor {number}") for number, tensor in enumerate(tensors)]


def title(kind: Kind, name: str | None) -> str:
    """Returns an operation's description in messages; raises a TypeError if the name is not a str."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{kind.name}: name={shown(name)} is not a str: pass one, or leave it out")
    return describe(kind, name)
