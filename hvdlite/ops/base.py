"""
`Collective`, the base class of each collective on tensors: checks its arguments, submits it, and differentiates it.

    Collective ── start ── controller ... another thread: run(execution) ── Handle      (asynchronous, and in place)
               └─ differentiable ── the same, waited for, with its `gradient`   (synchronous)

To add a collective, subclass it with its kind, what must be equal on all ranks, what a rank does when all have asked,
and its gradient. It runs on a thread of the controller's, with the caller's CUDA stream and inference mode and without
autograd.

Gradients are Horovod's, to the letter:

    allreduce        the same all-reduce of the gradients: op, factors and compression as forward
    reducescatter    gathered; times the number of ranks for a sum, and times both factors
    allgather        averaged over the ranks; of that, this rank's rows
    broadcast        averaged over the ranks, on the root; zeros elsewhere
    alltoall         sent back

Ranks are those of the process set. Where parameters' gradients are averaged over them afterwards, they are those of the
mean of all ranks' losses for a sum, an average and an all-to-all; a part of that, one in the number of ranks, for an
all-gather and a broadcast, and that number of times as much for a reduce-scatter. Those of Min, Max, Product and Adasum
are no derivatives at all. All of them are what programs that were written for Horovod have been trained with.

Every rank must go backward through what it went forward through; the collectives of the backward pass have the
forward's name with ``.gradient`` behind it. They can be differentiated again, by the same rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from ..comm.group import Group
from ..control.handle import Handle
from ..control.operation import Execution, Kind, Operation, describe
from ..errors import MismatchError
from ..runtime.process_set import ProcessSet
from ..runtime.process_set_functions import group_of
from ..runtime.world import current_world, is_initialized
from ..values import shown
from .sendable import check_is_outside, check_sendable, plain_tensor


class Collective(ABC):
    """An operation on one tensor, or on several at a time, as a rank asks for it."""

    def __init__(self, kind: Kind, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> None:
        """``tensors`` have passed `check_sendable`; there is one, unless the kind is grouped."""
        self.kind = kind
        self.name = name
        self.process_set = process_set
        self.what = title(kind, name)
        self.inputs = list(tensors)
        # Plain tensors over the memory of the given ones.
        self.sources = [plain_tensor(tensor) for tensor in tensors]

    @abstractmethod
    def same(self) -> Mapping[str, Any]:
        """What must be equal on all ranks, as in `Operation`."""

    def own(self) -> Any:
        """What the other ranks need to know of this one's part, as in `Operation`."""
        return None

    @abstractmethod
    def run(self, execution: Execution) -> Any:
        """Carry it out, all ranks having asked for it. The result: a tensor, or a tuple of them for a grouped kind."""

    def gradient(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        """The gradients of inputs from those of outputs, by their numbers; called when the tensors are gone."""
        raise NotImplementedError(f"{self.what} has no gradient")

    def start(self) -> Handle:
        """Ask for it, and return at once."""
        operation = Operation(self.kind, self.run, self.name, self.same(), self.own())
        return submit(operation, self.process_set, self.sources)

    def differentiable(self) -> tuple[Tensor, ...]:
        """Ask for it and wait; its results, through which gradients flow to the tensors that it was made of."""
        # Not typed in every version of torch.
        untyped: Any = _Differentiable
        return untyped.apply(self, *self.inputs)  # type: ignore[no-any-return]  # what its forward returns

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The outputs as the user gets them: a tuple for a grouped kind, else the one tensor."""
        return tuple(outputs) if self.kind.is_grouped else outputs[0]

    def gradient_name(self) -> str | None:
        """The name of the collectives of the backward pass."""
        return None if self.name is None else f"{self.name}.gradient"

    def signature(self, *, any_rows: bool = False) -> dict[str, Any]:
        """The dtype, shape and device that all ranks must agree on; lists of them for a grouped kind.

        With ``any_rows`` the first dimension may differ by rank, and is given as -1.
        """
        signature: dict[str, list[Any]] = {
            "dtype": [str(tensor.dtype) for tensor in self.sources],
            "shape": [[-1, *tensor.shape[1:]] if any_rows else list(tensor.shape) for tensor in self.sources],
            "device": [tensor.device.type for tensor in self.sources],
        }
        return signature if self.kind.is_grouped else {key: each for key, (each,) in signature.items()}


class _Differentiable(Function):
    """Any collective, as autograd knows it."""

    @staticmethod
    def forward(ctx: Any, collective: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = collective.start().wait()
        # Until the backward pass it keeps none of them alive.
        collective.inputs, collective.sources = [], []
        ctx.collective = collective
        # Those that can have a gradient: the same on all ranks, whoever wants one.
        ctx.members = [n for n, tensor in enumerate(tensors) if tensor.is_floating_point() or tensor.is_complex()]
        ctx.input_count = len(tensors)
        return tuple(_as_base(output) for output in ((result,) if isinstance(result, Tensor) else result))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        results = ctx.collective.gradient({number: grads[number] for number in ctx.members})
        by_number = dict(zip(ctx.members, results, strict=True))
        return (None, *(by_number.get(number) for number in range(ctx.input_count)))


def _as_base(output: Tensor) -> Tensor:
    """The same memory as no view of another tensor: views that a Function returns may not be changed in place."""
    if not output._is_view():
        return output
    base = torch.empty(0, dtype=output.dtype, device=output.device)
    return base.set_(output.untyped_storage(), output.storage_offset(), output.size(), output.stride())


def submit(operation: Operation, process_set: ProcessSet, tensors: Sequence[Tensor]) -> Handle:
    """Ask for an operation among the ranks of a process set; ``tensors`` are those that it reads or writes."""
    check_is_outside(operation.describe())
    streams = [torch.cuda.current_stream(device) for device in {t.device: None for t in tensors if t.is_cuda}]
    is_inference = torch.is_inference_mode_enabled()

    def run(execution: Execution) -> Any:
        with ExitStack() as as_the_caller:
            as_the_caller.enter_context(torch.inference_mode(is_inference))
            as_the_caller.enter_context(torch.no_grad())
            # With HVDLITE_CHECK=0 it runs on the caller's thread, where a `with torch.device(...)` would decide on
            # which device it makes its tensors.
            as_the_caller.enter_context(torch._C.DisableTorchFunction())
            for stream in reversed(streams):
                as_the_caller.enter_context(torch.cuda.stream(stream))
            return operation.run(execution)

    def take() -> None:
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    group = group_of(process_set, operation.describe())
    handle = current_world().controller.submit(group, replace(operation, run=run))
    if streams:
        handle.before_taking = take
    return handle


def compare(group: Group, value: object, what: str) -> list[Any] | None:
    """None if every rank of a group passed an equal value, made of JSON's types, else all values in rank order."""
    if group.size == 1 or not is_initialized():
        # A process set that is used without a world has no controller.
        return group.agree(value, what)
    operation = Operation(Kind(what), lambda execution: execution.group.agree(value, what))
    return current_world().controller.submit(group, operation).wait()  # type: ignore[no-any-return]  # what agree returns


def require_equal(group: Group, value: object, what: str, argument: str) -> None:
    """Raise a MismatchError on every rank unless all of them passed an equal value."""
    values = compare(group, repr(value), what)
    if values is not None:
        other = next(i for i, item in enumerate(values) if item != values[0])
        raise MismatchError(
            f"{what}: {argument} is {values[0]} on {group.describe_rank(0)} and {values[other]} on "
            f"{group.describe_rank(other)}: every rank must pass the same"
        )


def check_tensors(kind: Kind, tensors: Any, what: str) -> list[Tensor]:
    """The tensor of an operation, or those of a grouped one, as `check_sendable` gives them; else an error."""
    if not kind.is_grouped:
        return [check_sendable(tensors, what)]
    if isinstance(tensors, Tensor | str | bytes | bytearray) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what}: {type(tensors).__name__} is not a list of tensors: put it in one, as [tensor]")
    return [check_sendable(tensor, f"{what}: tensor {number}") for number, tensor in enumerate(tensors)]


def title(kind: Kind, name: str | None) -> str:
    """What messages call an operation; a TypeError where the name is not a str."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{kind.name}: name={shown(name)} is not a str: pass one, or leave it out")
    return describe(kind, name)
