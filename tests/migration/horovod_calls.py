"""A Horovod program that makes each call of `horovod.torch` in turn and writes what came of it, rank by rank, as JSON.

    python horovod_calls.py OUTCOMES [WORD]    one rank of it, which writes OUTCOMES.RANK; only calls with that word

It names nothing but Horovod's own. Run by Horovod itself it says what Horovod does (`recorded.json`, made by
`record.py`), run by hvdlite what hvdlite does: `test_calls` compares the two.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch

CALLS: dict[str, Callable[[], Any]] = {}
DONE: list[str] = []
DTYPES = [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
MOVED_DTYPES = [torch.uint8, torch.int8, torch.int16, *DTYPES]
NOT_HOROVODS = [torch.bool, torch.bfloat16]
OPS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
CAUGHT_AS = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
    "AssertionError": AssertionError,
    "NotImplementedError": NotImplementedError,
    "AttributeError": AttributeError,
    "HorovodInternalError": hvd.HorovodInternalError,
}
# Module-level, so that it can be pickled.
Pair = namedtuple("Pair", "first second")


def call(what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a call under ``function(argument): what is special``; the decorated function returns its outcome."""

    def enter(function: Callable[[], Any]) -> Callable[[], Any]:
        assert what not in CALLS, what
        CALLS[what] = function
        return function

    return enter


def own(dtype: torch.dtype = torch.float32, rows: int = 4, columns: int = 3) -> torch.Tensor:
    """Returns a value that differs by rank; its sums, products and halves are exact in all dtypes."""
    values = torch.arange(rows * columns).reshape(rows, columns) % 5 - 2 + hvd.rank()
    return values.to(dtype)


def watched(rows: int = 4) -> torch.Tensor:
    return own(rows=rows).requires_grad_()


def weights_like(result: torch.Tensor) -> torch.Tensor:
    """Returns the factors by which a rank's loss multiplies a result: they differ by rank and element."""
    return (torch.arange(result.numel()).reshape(result.shape) + 1.0) * (hvd.rank() + 1)


def gradient(function: Callable[..., Any], *tensors: torch.Tensor) -> list[Any]:
    results = function(*tensors)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    sum((each * weights_like(each)).sum() for each in results).backward()
    return [tensor.grad for tensor in tensors]


def members() -> hvd.ProcessSet:
    """Returns the process set that this rank is in: the even ranks or the odd ones; all ranks if there is one rank."""
    return hvd.global_process_set if hvd.size() == 1 else SETS[hvd.rank() % 2]


def strangers() -> hvd.ProcessSet:
    """Returns a process set that this rank is not in."""
    return SETS[1 - hvd.rank() % 2]


# --- allreduce and its group

REDUCING: dict[str, Callable[..., Any]] = {
    "allreduce": hvd.allreduce,
    "allreduce_": lambda tensor, *args, **named: hvd.allreduce_(tensor.clone(), *args, **named),
    "allreduce_async": lambda *args, **named: hvd.synchronize(hvd.allreduce_async(*args, **named)),
    "allreduce_async_": lambda tensor, *args, **named: hvd.synchronize(
        hvd.allreduce_async_(tensor.clone(), *args, **named)
    ),
}
GROUPED: dict[str, Callable[..., Any]] = {
    "grouped_allreduce": hvd.grouped_allreduce,
    "grouped_allreduce_": lambda tensors, *args, **named: hvd.grouped_allreduce_(
        [tensor.clone() for tensor in tensors], *args, **named
    ),
    "grouped_allreduce_async": lambda *args, **named: hvd.synchronize(hvd.grouped_allreduce_async(*args, **named)),
    "grouped_allreduce_async_": lambda tensors, *args, **named: hvd.synchronize(
        hvd.grouped_allreduce_async_([tensor.clone() for tensor in tensors], *args, **named)
    ),
}


def one_or_two(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return [own(dtype), own(dtype, rows=1)] if name.startswith("grouped") else own(dtype)


def watched_one_or_two(name: str) -> list[torch.Tensor]:
    return [watched(), watched(rows=1)] if name.startswith("grouped") else [watched()]


def apply_to(name: str, function: Callable[..., Any], **named: Any) -> Callable[..., Any]:
    """Returns a function of several tensors, whether Horovod's function takes one tensor or a list."""
    grouped = name.startswith("grouped")
    return lambda *tensors: function(list(tensors) if grouped else tensors[0], **named)


for _name, _function in {**REDUCING, **GROUPED}.items():

    def _reducing(name: str = _name, function: Callable[..., Any] = _function) -> None:
        first = "tensors" if name.startswith("grouped") else "tensor"
        for dtype in [*MOVED_DTYPES, *NOT_HOROVODS]:
            call(f"{name}({first}): {dtype}")(lambda dtype=dtype: function(one_or_two(name, dtype), op=hvd.Sum))
        call(f"{name}({first}): not contiguous")(lambda: function([own().t()] if first == "tensors" else own().t()))
        call(f"{name}({first}): a number")(lambda: function(3.0))
        call(f"{name}({first}): with no elements")(
            lambda: function([torch.ones(0, 2)] if first == "tensors" else torch.ones(0, 2), op=hvd.Sum)
        )
        call(f"{name}({first}): a scalar")(
            lambda: function([torch.tensor(2.0)] if first == "tensors" else torch.tensor(2.0))
        )
        call(f"{name}({first}): of another shape on the last rank")(
            lambda: function(
                [own(rows=4 + (hvd.rank() == hvd.size() - 1))] if first == "tensors"
                else own(rows=4 + (hvd.rank() == hvd.size() - 1)),
                name="shapes",
            )
        )  # fmt: skip
        call(f"{name}(average): True")(lambda: function(one_or_two(name), average=True))
        call(f"{name}(average): False")(lambda: function(one_or_two(name), average=False))
        call(f"{name}(average): with op")(lambda: function(one_or_two(name), average=True, op=hvd.Sum))
        call(f"{name}(name): given")(lambda: function(one_or_two(name), name=f"given {name}"))
        for op_name, op in OPS.items():
            for dtype in (torch.float32, torch.int64):
                call(f"{name}(op): {op_name} of {dtype}")(
                    lambda op=op, dtype=dtype: function(one_or_two(name, dtype), op=op)
                )
        call(f"{name}(op): Average of float16")(lambda: function(one_or_two(name, torch.float16)))
        call(f"{name}(op): Adasum")(lambda: function(one_or_two(name), op=hvd.Adasum))
        call(f"{name}(op): Adasum in a process set")(
            lambda: function(one_or_two(name), op=hvd.Adasum, process_set=members())
        )
        for dtype in DTYPES:
            call(f"{name}(prescale_factor): 0.5 of {dtype}")(
                lambda dtype=dtype: function(one_or_two(name, dtype), op=hvd.Sum, prescale_factor=0.5)
            )
            call(f"{name}(postscale_factor): 0.5 of {dtype}")(
                lambda dtype=dtype: function(one_or_two(name, dtype), op=hvd.Sum, postscale_factor=0.5)
            )
        call(f"{name}(prescale_factor): of an average")(lambda: function(one_or_two(name), prescale_factor=4.0))
        call(f"{name}(postscale_factor): of an average")(lambda: function(one_or_two(name), postscale_factor=4.0))
        call(f"{name}(postscale_factor): of a maximum")(
            lambda: function(one_or_two(name), op=hvd.Max, postscale_factor=4.0)
        )
        call(f"{name}(prescale_factor): a negative one of a minimum")(
            lambda: function(one_or_two(name), op=hvd.Min, prescale_factor=-1.0)
        )
        call(f"{name}(process_set): the own one")(
            lambda: function(one_or_two(name), name="in a set", process_set=members())
        )
        call(f"{name}(process_set): a foreign one")(
            lambda: function(one_or_two(name), name="in a set", process_set=strangers())
        )
        if name in ("allreduce", "grouped_allreduce"):
            call(f"{name}(compression): fp16")(
                lambda: function(one_or_two(name), compression=hvd.Compression.fp16, op=hvd.Sum)
            )
            call(f"{name}(compression): of one's own")(
                lambda: function(one_or_two(name), compression=Halves, op=hvd.Sum)
            )
            for op_name, op in {**OPS, "Adasum": hvd.Adasum}.items():
                call(f"{name}(op): gradient of {op_name}")(
                    lambda op=op: gradient(apply_to(name, function, op=op), *watched_one_or_two(name))
                )
            call(f"{name}(prescale_factor): gradient")(
                lambda: gradient(
                    apply_to(name, function, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
                    *watched_one_or_two(name),
                )
            )
            call(f"{name}(compression): gradient")(
                lambda: gradient(
                    apply_to(name, function, op=hvd.Sum, compression=hvd.Compression.fp16), *watched_one_or_two(name)
                )
            )
            call(f"{name}(process_set): gradient")(
                lambda: gradient(apply_to(name, function, process_set=members()), *watched_one_or_two(name))
            )

    _reducing()


class Halves:
    """A compression as programs write it for Horovod: it sends half of each tensor's value."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor / 2, tuple(tensor.shape)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert tuple(tensor.shape) == ctx
        return tensor * 2


call("grouped_allreduce(tensors): none")(lambda: hvd.grouped_allreduce([]))
call("allreduce(op): as a number")(
    lambda: ([int(op) for op in (*OPS.values(), hvd.Adasum)], hvd.allreduce(own(), op=1))
)
call("allreduce(tensor): the result of one that has a gradient")(
    lambda: hvd.allreduce(watched(), op=hvd.Sum).requires_grad
)


@call("allreduce_async(tensor): the result of one that has a gradient")
def _() -> Any:
    result = hvd.synchronize(hvd.allreduce_async(watched(), op=hvd.Sum))
    return result, result.requires_grad


@call("allreduce_(tensor): a parameter")
def _() -> Any:
    param = torch.nn.Parameter(own())
    result = hvd.allreduce_(param, op=hvd.Sum)
    return result, param, result is param


@call("grouped_allreduce_(tensors): parameters")
def _() -> Any:
    params = [torch.nn.Parameter(own()), torch.nn.Parameter(own(rows=1))]
    hvd.grouped_allreduce_(params, op=hvd.Sum)
    return params


call("sparse_allreduce_async(tensor): a matrix of rows, Sum")(
    lambda: dense(hvd.sparse_allreduce_async(rows_of_a_matrix(), "rows", hvd.Sum))
)
call("sparse_allreduce_async(op): Average")(
    lambda: dense(hvd.sparse_allreduce_async(rows_of_a_matrix(), "rows", hvd.Average))
)
call("sparse_allreduce_async(process_set): the own one")(
    lambda: dense(hvd.sparse_allreduce_async(rows_of_a_matrix(), "rows in a set", hvd.Average, process_set=members()))
)
call("sparse_allreduce_async(name): left out")(lambda: hvd.sparse_allreduce_async(rows_of_a_matrix()))


def rows_of_a_matrix() -> torch.Tensor:
    indices = torch.tensor([[0, hvd.rank()], [1, hvd.rank() % 2]])
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, hvd.rank() + 1.0]), (4, 2))


def dense(handle: Any) -> Any:
    return handle().to_dense()


# --- allgather and its group

for _name, _function in {
    "allgather": hvd.allgather,
    "allgather_async": lambda *args, **named: hvd.synchronize(hvd.allgather_async(*args, **named)),
    "grouped_allgather": hvd.grouped_allgather,
    "grouped_allgather_async": lambda *args, **named: hvd.synchronize(hvd.grouped_allgather_async(*args, **named)),
}.items():

    def _gathering(name: str = _name, function: Callable[..., Any] = _function) -> None:
        first = "tensors" if name.startswith("grouped") else "tensor"
        for dtype in [*MOVED_DTYPES, *NOT_HOROVODS]:
            call(f"{name}({first}): {dtype}")(lambda dtype=dtype: function(one_or_two(name, dtype)))
        call(f"{name}({first}): not contiguous")(lambda: function([own().t()] if first == "tensors" else own().t()))
        call(f"{name}({first}): another number of rows on each rank")(
            lambda: function([own(rows=hvd.rank())] if first == "tensors" else own(rows=hvd.rank()))
        )
        call(f"{name}({first}): of other columns on the last rank")(
            lambda: function(
                [own(columns=3 + (hvd.rank() == hvd.size() - 1))] if first == "tensors"
                else own(columns=3 + (hvd.rank() == hvd.size() - 1)),
                name="columns",
            )
        )  # fmt: skip
        call(f"{name}(name): given")(lambda: function(one_or_two(name), name=f"given {name}"))
        call(f"{name}(process_set): the own one")(lambda: function(one_or_two(name), name="a", process_set=members()))
        call(f"{name}(process_set): a foreign one")(
            lambda: function(one_or_two(name), name="a", process_set=strangers())
        )
        if not name.endswith("async"):
            call(f"{name}({first}): gradient")(lambda: gradient(apply_to(name, function), *watched_one_or_two(name)))
            call(f"{name}({first}): gradient of other rows on each rank")(
                lambda: gradient(apply_to(name, function), watched(rows=hvd.rank() + 1))
            )
            call(f"{name}(process_set): gradient")(
                lambda: gradient(apply_to(name, function, process_set=members()), *watched_one_or_two(name))
            )

    _gathering()


call("allgather(tensor): a scalar")(lambda: hvd.allgather(torch.tensor(2.0)))


# --- broadcast

for _name, _function in {
    "broadcast": hvd.broadcast,
    "broadcast_": lambda tensor, *args, **named: hvd.broadcast_(tensor.clone(), *args, **named),
    "broadcast_async": lambda *args, **named: hvd.synchronize(hvd.broadcast_async(*args, **named)),
    "broadcast_async_": lambda tensor, *args, **named: hvd.synchronize(
        hvd.broadcast_async_(tensor.clone(), *args, **named)
    ),
}.items():

    def _broadcasting(name: str = _name, function: Callable[..., Any] = _function) -> None:
        for dtype in [*MOVED_DTYPES, *NOT_HOROVODS]:
            call(f"{name}(tensor): {dtype}")(lambda dtype=dtype: function(own(dtype), 0))
        call(f"{name}(tensor): not contiguous")(lambda: function(own().t(), 0))
        call(f"{name}(tensor): a scalar")(lambda: function(torch.tensor(hvd.rank() + 2.0), 0))
        call(f"{name}(tensor): of another shape on the last rank")(
            lambda: function(own(rows=4 + (hvd.rank() == hvd.size() - 1)), 0, name="shapes")
        )
        call(f"{name}(root_rank): the last one")(lambda: function(own(), hvd.size() - 1))
        call(f"{name}(root_rank): left out")(lambda: function(own()))
        call(f"{name}(root_rank): the own one, that is another on each rank")(
            lambda: function(own(), hvd.rank(), name="roots")
        )
        call(f"{name}(root_rank): not there")(lambda: function(own(), hvd.size()))
        call(f"{name}(name): given")(lambda: function(own(), 0, name=f"given {name}"))
        call(f"{name}(process_set): the own one, its first rank")(
            lambda: function(own(), members().ranks[0], name="b", process_set=members())
        )
        call(f"{name}(process_set): a foreign one")(
            lambda: function(own(), strangers().ranks[0], name="b", process_set=strangers())
        )

    _broadcasting()


@call("broadcast_(tensor): a parameter")
def _() -> Any:
    param = torch.nn.Parameter(own())
    result = hvd.broadcast_(param, 0)
    return param, result is param


call("broadcast(tensor): gradient")(lambda: gradient(lambda tensor: hvd.broadcast(tensor, 0), watched()))
call("broadcast(root_rank): gradient for the last one")(
    lambda: gradient(lambda tensor: hvd.broadcast(tensor, hvd.size() - 1), watched())
)
call("broadcast(process_set): gradient")(
    lambda: gradient(lambda tensor: hvd.broadcast(tensor, members().ranks[0], process_set=members()), watched())
)


# --- alltoall

for _name, _function in {
    "alltoall": hvd.alltoall,
    "alltoall_async": lambda *args, **named: hvd.synchronize(hvd.alltoall_async(*args, **named)),
}.items():

    def _exchanging(name: str = _name, function: Callable[..., Any] = _function) -> None:
        def even(dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return own(dtype, rows=2 * hvd.size())

        def splits() -> torch.Tensor:
            return torch.arange(hvd.size(), dtype=torch.int32) + 1

        def uneven() -> torch.Tensor:
            return own(rows=int(splits().sum()))

        for dtype in [*MOVED_DTYPES, *NOT_HOROVODS]:
            call(f"{name}(tensor): {dtype}")(lambda dtype=dtype: function(even(dtype)))
        call(f"{name}(tensor): not contiguous")(lambda: function(own(rows=3, columns=4 * hvd.size()).t()))
        call(f"{name}(tensor): rows that cannot be spread")(lambda: function(own(rows=2 * hvd.size() + 1)))
        call(f"{name}(splits): given")(lambda: function(uneven(), splits()))
        call(f"{name}(splits): of 64 bits")(lambda: function(uneven(), splits().long()))
        call(f"{name}(splits): of two dimensions")(lambda: function(uneven(), splits().reshape(1, -1)))
        call(f"{name}(splits): more than there are rows")(lambda: function(own(rows=hvd.size() - 1), splits()))
        call(f"{name}(splits): fewer than there are rows")(
            lambda: function(own(rows=hvd.size() + 2), torch.ones(hvd.size(), dtype=torch.int32))
        )
        call(f"{name}(splits): too many")(lambda: function(uneven(), torch.ones(hvd.size() + 1, dtype=torch.int32)))
        call(f"{name}(splits): a list")(lambda: function(uneven(), splits().tolist()))
        call(f"{name}(splits): some of them 0")(
            lambda: function(
                own(), torch.tensor([4 if rank == hvd.size() - 1 else 0 for rank in range(hvd.size())]).int()
            )
        )
        call(f"{name}(name): given")(lambda: function(even(), name=f"given {name}"))
        call(f"{name}(process_set): the own one")(lambda: function(even(), name="x", process_set=members()))
        call(f"{name}(process_set): a foreign one")(lambda: function(even(), name="x", process_set=strangers()))
        if name == "alltoall":
            call(f"{name}(tensor): gradient")(lambda: gradient(function, even().requires_grad_()))
            call(f"{name}(splits): gradient")(
                lambda: gradient(lambda tensor: function(tensor, splits())[0], uneven().requires_grad_())
            )
            call(f"{name}(process_set): gradient")(
                lambda: gradient(
                    lambda tensor: function(tensor, process_set=members()),
                    own(rows=2 * members().size()).requires_grad_(),
                )
            )

    _exchanging()


# --- reducescatter and its group

for _name, _function in {
    "reducescatter": hvd.reducescatter,
    "reducescatter_async": lambda *args, **named: hvd.synchronize(hvd.reducescatter_async(*args, **named)),
    "grouped_reducescatter": hvd.grouped_reducescatter,
    "grouped_reducescatter_async": lambda *args, **named: hvd.synchronize(
        hvd.grouped_reducescatter_async(*args, **named)
    ),
}.items():

    def _scattering(name: str = _name, function: Callable[..., Any] = _function) -> None:
        first = "tensors" if name.startswith("grouped") else "tensor"
        for dtype in [*MOVED_DTYPES, *NOT_HOROVODS]:
            call(f"{name}({first}): {dtype}")(lambda dtype=dtype: function(one_or_two(name, dtype), op=hvd.Sum))
        call(f"{name}({first}): not contiguous")(lambda: function([own().t()] if first == "tensors" else own().t()))
        call(f"{name}({first}): more ranks than rows")(
            lambda: function([own(rows=1)] if first == "tensors" else own(rows=1), op=hvd.Sum)
        )
        call(f"{name}({first}): a scalar")(
            lambda: function([torch.tensor(2.0)] if first == "tensors" else torch.tensor(2.0))
        )
        call(f"{name}(name): given")(lambda: function(one_or_two(name), name=f"given {name}"))
        for op_name, op in {**OPS, "Adasum": hvd.Adasum}.items():
            call(f"{name}(op): {op_name}")(lambda op=op: function(one_or_two(name), op=op, name="ops"))
        call(f"{name}(op): left out")(lambda: function(one_or_two(name)))
        call(f"{name}(prescale_factor): 0.5")(lambda: function(one_or_two(name), op=hvd.Sum, prescale_factor=0.5))
        call(f"{name}(postscale_factor): 0.5")(lambda: function(one_or_two(name), op=hvd.Sum, postscale_factor=0.5))
        call(f"{name}(prescale_factor): of an average")(lambda: function(one_or_two(name), prescale_factor=4.0))
        call(f"{name}(postscale_factor): of an average")(lambda: function(one_or_two(name), postscale_factor=4.0))
        call(f"{name}(process_set): the own one")(lambda: function(one_or_two(name), name="rs", process_set=members()))
        call(f"{name}(process_set): a foreign one")(
            lambda: function(one_or_two(name), name="rs", process_set=strangers())
        )
        if not name.endswith("async"):
            call(f"{name}(compression): fp16")(
                lambda: function(one_or_two(name), compression=hvd.Compression.fp16, op=hvd.Sum)
            )
            call(f"{name}(compression): gradient")(
                lambda: gradient(
                    apply_to(name, function, op=hvd.Sum, compression=hvd.Compression.fp16), *watched_one_or_two(name)
                )
            )
            for op_name, op in {"Average": hvd.Average, "Sum": hvd.Sum}.items():
                call(f"{name}(op): gradient of {op_name}")(
                    lambda op=op: gradient(apply_to(name, function, op=op), *watched_one_or_two(name))
                )
                call(f"{name}(prescale_factor): gradient of {op_name}")(
                    lambda op=op: gradient(
                        apply_to(name, function, op=op, prescale_factor=0.5, postscale_factor=3.0),
                        *watched_one_or_two(name),
                    )
                )
                call(f"{name}(process_set): gradient of {op_name}")(
                    lambda op=op: gradient(
                        apply_to(name, function, op=op, process_set=members()), *watched_one_or_two(name)
                    )
                )

    _scattering()


# --- handles, barrier


@call("poll(handle): of what is done")
def _() -> Any:
    handle = hvd.allreduce_async(own(), name="polled")
    hvd.barrier()
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)


@call("poll(handle): of one that was synchronized")
def _() -> Any:
    handle = hvd.allreduce_async(own())
    hvd.synchronize(handle)
    return hvd.poll(handle)


@call("synchronize(handle): twice")
def _() -> Any:
    handle = hvd.allreduce_async(own())
    hvd.synchronize(handle)
    return hvd.synchronize(handle)


@call("synchronize(handle): of another order on each rank")
def _() -> Any:
    handles = [hvd.allreduce_async(own() * number, name=f"ordered {number}", op=hvd.Sum) for number in range(4)]
    order = [(number + hvd.rank()) % 4 for number in range(4)]
    results = {number: hvd.synchronize(handles[number]) for number in order}
    return [results[number] for number in range(4)]


call("barrier(process_set): none")(hvd.barrier)
call("barrier(process_set): the own one")(lambda: hvd.barrier(process_set=members()))


# --- what replicates


@call("broadcast_parameters(params): a state_dict")
def _() -> Any:
    model = module()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return list(model.state_dict().items())


@call("broadcast_parameters(params): a list of pairs")
def _() -> Any:
    model = module()
    hvd.broadcast_parameters(list(model.named_parameters()), 0)
    return list(model.parameters())


@call("broadcast_parameters(params): a list of tensors")
def _() -> Any:
    model = module()
    hvd.broadcast_parameters([param.data for param in model.parameters()], 0)
    return list(model.parameters())


@call("broadcast_parameters(params): a generator")
def _() -> Any:
    model = module()
    hvd.broadcast_parameters(model.named_parameters(), 0)
    return list(model.parameters())


call("broadcast_parameters(params): nothing")(lambda: hvd.broadcast_parameters({}, 0))
call("broadcast_parameters(params): a number")(lambda: hvd.broadcast_parameters(3, 0))
call("broadcast_parameters(params): a number in a dict")(lambda: hvd.broadcast_parameters({"weight": 3}, 0))


@call("broadcast_parameters(root_rank): the last one")
def _() -> Any:
    model = module()
    hvd.broadcast_parameters(model.state_dict(), hvd.size() - 1)
    return list(model.parameters())


call("broadcast_parameters(root_rank): left out")(lambda: hvd.broadcast_parameters(module().state_dict()))
call("broadcast_parameters(root_rank): not there")(lambda: hvd.broadcast_parameters(module().state_dict(), hvd.size()))


def module() -> torch.nn.Module:
    """Returns a module whose values differ by rank and are the same in every run."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_((torch.arange(param.numel()).reshape(param.shape) % 7 - 3) / 8 + hvd.rank() / 4 + number / 16)
    return model


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = module()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model[2](model[0](own())).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    # Not the names of options: those depend on the version of PyTorch.
    options = [{key: group[key] for key in ("lr", "momentum", "betas", "weight_decay") if key in group}
               for group in state["param_groups"]]  # fmt: skip
    return {"state": {str(key): each for key, each in state["state"].items()}, "options": options}


@call("broadcast_optimizer_state(optimizer): SGD with momentum")
def _() -> Any:
    _, optimizer = trained(lambda params: torch.optim.SGD(params, lr=0.5 ** (hvd.rank() + 1), momentum=0.5))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return state_of(optimizer)


@call("broadcast_optimizer_state(optimizer): Adam, that has stepped more often on higher ranks")
def _() -> Any:
    _, optimizer = trained(lambda params: torch.optim.Adam(params, lr=0.5 ** (hvd.rank() + 1)), 2 + hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return state_of(optimizer)


@call("broadcast_optimizer_state(optimizer): options of all types")
def _() -> Any:
    _, optimizer = trained(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5))
    which = hvd.rank() + 1
    optimizer.param_groups[0].update(
        whole=which, fraction=which / 2, flag=which == 1, nothing=None, pair=(which, 0.5), words=f"rank {which}"
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    return {key: group[key] for key in ("whole", "fraction", "flag", "nothing", "pair", "words")}


@call("broadcast_optimizer_state(optimizer): a namedtuple and a tensor among the options")
def _() -> Any:
    _, optimizer = trained(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5))
    which = hvd.rank() + 1
    optimizer.param_groups[0].update(pair=Pair(which, 0.5), tensor=torch.tensor([which / 2]))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    return type(group["pair"]).__name__, tuple(group["pair"]), group["tensor"]


@call("broadcast_optimizer_state(optimizer): an option that rank 0 alone has")
def _() -> Any:
    _, optimizer = trained(lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5))
    optimizer.param_groups[0]["always"] = 1
    if hvd.rank() == 0:
        optimizer.param_groups[0]["only_on_0"] = 5
    if hvd.size() == 1:
        return 5
    # In Horovod, a KeyError on the ranks that do not have it.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.param_groups[0]["only_on_0"]


@call("broadcast_optimizer_state(optimizer): several groups")
def _() -> Any:
    def make(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return torch.optim.SGD(
            [{"params": [first], "lr": 0.25 / (hvd.rank() + 1)}, {"params": others}], lr=1.0, momentum=0.5
        )

    _, optimizer = trained(make)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return state_of(optimizer)


@call("broadcast_optimizer_state(optimizer): without a state, but with momentum")
def _() -> Any:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 ** (hvd.rank() + 1), momentum=0.5, weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return list(model.parameters()), optimizer.param_groups[0]["lr"]


@call("broadcast_optimizer_state(optimizer): without anything but options")
def _() -> Any:
    optimizer = torch.optim.SGD(plain().parameters(), lr=0.5 ** (hvd.rank() + 1))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.param_groups[0]["lr"]


call("broadcast_optimizer_state(optimizer): LBFGS")(
    lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(module().parameters()), root_rank=0)
)


@call("broadcast_optimizer_state(optimizer): a wrapped one")
def _() -> Any:
    model = module()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5 ** (hvd.rank() + 1), momentum=0.5),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.param_groups[0]["lr"]


@call("broadcast_optimizer_state(root_rank): the last one")
def _() -> Any:
    _, optimizer = trained(lambda params: torch.optim.SGD(params, lr=0.5 ** (hvd.rank() + 1), momentum=0.5))
    hvd.broadcast_optimizer_state(optimizer, hvd.size() - 1)
    return state_of(optimizer)


@call("broadcast_optimizer_state(model): given")
def _() -> Any:
    model, optimizer = trained(lambda params: torch.optim.SGD(params, lr=0.5 ** (hvd.rank() + 1), momentum=0.5))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    return state_of(optimizer)


call("broadcast_object(obj): a dict")(
    lambda: hvd.broadcast_object({"epoch": hvd.rank() + 3, "pair": (1, None)}, 0, name="dict")
)
call("broadcast_object(name): left out")(lambda: hvd.broadcast_object([hvd.rank(), 5.0]))
call("broadcast_object(root_rank): the last one")(
    lambda: hvd.broadcast_object(hvd.rank() if hvd.rank() == hvd.size() - 1 else None, hvd.size() - 1, name="last")
)
call("broadcast_object(process_set): the own one")(
    lambda: hvd.broadcast_object(hvd.rank(), members().ranks[0], name="set", process_set=members())
)
call("broadcast_object(obj): a function that is made here")(
    lambda: hvd.broadcast_object(lambda: 5, 0, name="function")()  # noqa: PLW0108
)
call("allgather_object(obj): a dict")(lambda: hvd.allgather_object({"rank": hvd.rank()}))
call("allgather_object(name): given")(lambda: hvd.allgather_object(["rank", hvd.rank()] * hvd.rank(), name="lists"))


# --- process sets


@call("ProcessSet(ranks): what it says of itself")
def _() -> Any:
    own_set = members()
    return [own_set.ranks, own_set.size(), own_set.rank(), own_set.included()]


call("ProcessSet(ranks): a foreign one")(lambda: [strangers().ranks, strangers().size(), strangers().included()])
call("ProcessSet.rank(): of a foreign one")(lambda: strangers().rank())
call("ProcessSet(ranks): not sorted")(lambda: hvd.ProcessSet([2, 0, 1]).ranks)
call("ProcessSet(ranks): words")(lambda: hvd.ProcessSet(["0"]).ranks)
call("ProcessSet.process_set_id(): before it is added")(lambda: hvd.ProcessSet([0]).process_set_id)


@call("global_process_set(): what it says of itself")
def _() -> Any:
    every = hvd.global_process_set
    return [every.process_set_id, every.ranks, every.size(), every.rank(), every.included()]


@call("ProcessSet(ranks): equal to others")
def _() -> Any:
    every = hvd.ProcessSet(range(hvd.size()))
    return every == hvd.ProcessSet(list(range(hvd.size()))), every == hvd.ProcessSet([0, 9]), members() == members()


@call("add_process_set(process_set): later than init")
def _() -> Any:
    added = hvd.add_process_set([0])
    return hvd.remove_process_set(added)


call("remove_process_set(process_set): the global one")(lambda: hvd.remove_process_set(hvd.global_process_set))
call("remove_process_set(process_set): one that was never added")(lambda: hvd.remove_process_set(hvd.ProcessSet([0])))


# --- the optimizer


def plain() -> torch.nn.Module:
    """Returns an optimizer that is equal on all ranks; its parameters' names are used by this call alone."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_((torch.arange(param.numel()).reshape(param.shape) % 5 - 2) / 4)
    return model


def names_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(f"call {len(DONE)}: {name}", param) for name, param in model.named_parameters()]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def wrapped(make: Any = sgd, names: bool = True, **named: Any) -> tuple[torch.nn.Module, Any]:
    model = plain()
    if names:
        named["named_parameters"] = names_of(model)
    return model, hvd.DistributedOptimizer(make(model.parameters()), **named)


def back(model: torch.nn.Module, scale: float = 1.0) -> None:
    (model(own()) * scale).sum().backward()


def steps(model: torch.nn.Module, optimizer: Any, count: int = 2, passes: int = 1) -> Any:
    gradients = []
    for _ in range(count):
        optimizer.zero_grad()
        for each in range(passes):
            back(model, each + 1)
        optimizer.synchronize()
        gradients.append([param.grad.clone() for param in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
    return gradients, list(model.parameters())


OPTIONS: dict[str, dict[str, Any]] = {
    "compression): fp16": {"compression": hvd.Compression.fp16},
    "compression): of one's own": {"compression": Halves},
    "op): Sum": {"op": hvd.Sum},
    "op): Average": {"op": hvd.Average},
    "gradient_predivide_factor): 4": {"gradient_predivide_factor": 4.0},
    "groups): 2": {"groups": 2},
    "num_groups): 2": {"num_groups": 2},
    "named_parameters): left out": {"names": False},
    "sparse_as_dense): without sparse ones": {"sparse_as_dense": True},
}
for _title, _options in OPTIONS.items():
    call(f"DistributedOptimizer({_title}")(lambda options=_options: steps(*wrapped(**options)))


call("DistributedOptimizer(optimizer): its steps")(lambda: steps(*wrapped()))
call("DistributedOptimizer(optimizer): SGD with momentum and weight decay")(
    lambda: steps(*wrapped(lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5, weight_decay=0.5)))
)


@call("DistributedOptimizer(groups): lists of parameters")
def _() -> Any:
    model = plain()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()),
        named_parameters=names_of(model),
        groups=[list(model.parameters())[:2]],
    )
    return steps(model, optimizer)


for _bad in (0, -1, "two", [[3]], 2.5):

    @call(f"DistributedOptimizer(groups): {_bad!r}")
    def _(bad: Any = _bad) -> Any:
        wrapped(groups=bad)
        return "accepted"


@call("DistributedOptimizer(groups): a parameter twice")
def _() -> Any:
    model = plain()
    first = next(model.parameters())
    hvd.DistributedOptimizer(
        sgd(model.parameters()),
        named_parameters=names_of(model),
        groups=[[first], [first]],
    )
    return "accepted"


for _bad in (0, -1):

    @call(f"DistributedOptimizer(backward_passes_per_step): {_bad}")
    def _(bad: Any = _bad) -> Any:
        wrapped(backward_passes_per_step=bad)
        return "accepted"


call("DistributedOptimizer(backward_passes_per_step): 3")(lambda: steps(*wrapped(backward_passes_per_step=3), passes=3))
call("DistributedOptimizer(backward_passes_per_step): a step before they are all there")(
    lambda: steps(*wrapped(backward_passes_per_step=3), passes=2)
)


@call("DistributedOptimizer(backward_passes_per_step): one pass too many")
def _() -> Any:
    model, optimizer = wrapped(backward_passes_per_step=2)
    back(model)
    back(model)
    try:
        back(model)
    finally:
        optimizer.synchronize()
    return "accepted"


@call("DistributedOptimizer(named_parameters): no pairs")
def _() -> Any:
    model = plain()
    hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=list(model.parameters()))
    return "accepted"


@call("DistributedOptimizer(named_parameters): a name twice")
def _() -> Any:
    model = plain()
    names = [("same", param) for param in model.parameters()]
    hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=names)
    return "accepted"


@call("DistributedOptimizer(named_parameters): one left out")
def _() -> Any:
    model = plain()
    names = names_of(model)[1:]
    hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=names)
    return "accepted"


@call("DistributedOptimizer(named_parameters): more than the optimizer has")
def _() -> Any:
    model = plain()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(list(model.parameters())[:1], lr=0.25), named_parameters=names_of(model)
    )
    back(model)
    optimizer.step()
    return list(model.parameters())[:1]


@call("DistributedOptimizer(gradient_predivide_factor): with Sum")
def _() -> Any:
    wrapped(gradient_predivide_factor=2.0, op=hvd.Sum)
    return "accepted"


@call("DistributedOptimizer(op): Adasum in a process set")
def _() -> Any:
    wrapped(op=hvd.Adasum, process_set=members())
    return "accepted"


@call("DistributedOptimizer(op): Adasum")
def _() -> Any:
    model, optimizer = wrapped(op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        back(model)
        optimizer.step()
    return list(model.parameters())


call("DistributedOptimizer(process_set): the own one")(lambda: steps(*wrapped(process_set=members())))


@call("DistributedOptimizer(process_set): of even ranks, on all")
def _() -> Any:
    if hvd.size() == 1:
        return None
    model, optimizer = wrapped(process_set=SETS[0])
    optimizer.zero_grad()
    back(model)
    optimizer.step()
    return list(model.parameters())


@call("DistributedOptimizer(sparse_as_dense): of an embedding")
def _() -> Any:
    model = torch.nn.Embedding(5, 2, sparse=True)
    with torch.no_grad():
        model.weight.copy_(torch.arange(10.0).reshape(5, 2))
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=names_of(model), sparse_as_dense=True
    )
    model(torch.tensor([hvd.rank(), 4])).sum().backward()
    optimizer.step()
    return model.weight


@call("DistributedOptimizer(sparse_as_dense): False, of an embedding")
def _() -> Any:
    model = torch.nn.Embedding(5, 2, sparse=True)
    with torch.no_grad():
        model.weight.copy_(torch.arange(10.0).reshape(5, 2))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=names_of(model))
    model(torch.tensor([hvd.rank(), 4])).sum().backward()
    optimizer.step()
    return model.weight


@call("DistributedOptimizer(optimizer): a parameter that not all ranks use")
def _() -> Any:
    model, optimizer = wrapped()
    optimizer.zero_grad()
    if hvd.rank() == 0:
        back(model)
    else:
        model[0](own()).sum().backward()
    optimizer.step()
    return list(model.parameters())


@call("DistributedOptimizer(optimizer): parameters of integers and booleans beside")
def _() -> Any:
    model = plain()
    whole = torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    flag = torch.nn.Parameter(torch.tensor([True]), requires_grad=False)
    params = [*names_of(model), ("whole", whole), ("flag", flag)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([param for _, param in params], lr=0.25), named_parameters=params
    )
    back(model)
    optimizer.step()
    return [param for _, param in params]


@call("DistributedOptimizer(optimizer): mixed precision, with clipping")
def _() -> Any:
    model, optimizer = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(own()).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return list(model.parameters())


@call("DistributedOptimizer(optimizer): a scheduler of it")
def _() -> Any:
    model, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        back(model)
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr(), optimizer.param_groups[0]["lr"], list(model.parameters())


@call("DistributedOptimizer(optimizer): its class")
def _() -> Any:
    _, optimizer = wrapped()
    return isinstance(optimizer, torch.optim.Optimizer), isinstance(optimizer, torch.optim.SGD)


@call("DistributedOptimizer(optimizer): several groups of parameters")
def _() -> Any:
    model, optimizer = wrapped(
        lambda params: torch.optim.SGD([{"params": [param], "lr": 0.5} for param in params], lr=1.0), names=False
    )
    return steps(model, optimizer)


@call("DistributedOptimizer.zero_grad(): what it leaves")
def _() -> Any:
    model, optimizer = wrapped()
    back(model)
    optimizer.step()
    optimizer.zero_grad()
    return [param.grad is None for param in model.parameters()]


@call("DistributedOptimizer.zero_grad(): before step")
def _() -> Any:
    model, optimizer = wrapped()
    back(model)
    try:
        optimizer.zero_grad()
    finally:
        optimizer.step()
    return "accepted"


@call("DistributedOptimizer.step(): without any gradient")
def _() -> Any:
    model, optimizer = wrapped()
    optimizer.step()
    return list(model.parameters())


@call("DistributedOptimizer.step(closure): given")
def _() -> Any:
    model, optimizer = wrapped()
    back(model)
    result = optimizer.step(lambda: 5.0)
    return result, list(model.parameters())


@call("DistributedOptimizer.step(): after synchronize")
def _() -> Any:
    model, optimizer = wrapped()
    back(model)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    said = [(each.category.__name__, str(each.message)) for each in caught if "synchronize" in str(each.message)]
    return said, list(model.parameters())


@call("DistributedOptimizer.synchronize(): twice")
def _() -> Any:
    model, optimizer = wrapped()
    back(model)
    optimizer.synchronize()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    return list(model.parameters())


@call("DistributedOptimizer.skip_synchronize(): with Adasum")
def _() -> Any:
    model, optimizer = wrapped(op=hvd.Adasum)
    back(model)
    try:
        with optimizer.skip_synchronize():
            optimizer.step()
    except AssertionError:
        optimizer.step()
        raise
    return "accepted"


@call("DistributedOptimizer.set_backward_passes_per_step(passes): 2")
def _() -> Any:
    model, optimizer = wrapped()
    optimizer.set_backward_passes_per_step(2)
    return steps(model, optimizer, passes=2), optimizer.backward_passes_per_step


@call("DistributedOptimizer.state_dict(): with momentum")
def _() -> Any:
    model, optimizer = wrapped(lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5))
    steps(model, optimizer)
    return state_of(optimizer)


@call("DistributedOptimizer.load_state_dict(state_dict): with momentum")
def _() -> Any:
    model, optimizer = wrapped(lambda params: torch.optim.SGD(params, lr=0.25, momentum=0.5))
    steps(model, optimizer)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.125
    optimizer.load_state_dict(state)
    return steps(model, optimizer)


@call("DistributedOptimizer.add_param_group(param_group): given")
def _() -> Any:
    _, optimizer = wrapped()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    return [group["lr"] for group in optimizer.param_groups]


@call("DistributedOptimizer(optimizer): attributes that programs look at")
def _() -> Any:
    model, optimizer = wrapped(backward_passes_per_step=2)
    names = {param: name for name, param in names_of(model)}
    before = len(optimizer._handles)
    back(model)
    back(model)
    optimizer.synchronize()
    return [
        before,
        len(optimizer._handles),
        [optimizer._parameter_names[param] == name for param, name in names.items()],
        sorted(names[param].split()[-1] for param in optimizer._requires_update),
        optimizer.backward_passes_per_step,
        optimizer.op == hvd.Average,
        optimizer.gradient_predivide_factor,
        optimizer.sparse_as_dense,
        optimizer.process_set is hvd.global_process_set,
        optimizer._should_synchronize,
        optimizer._synchronized,
    ]


# --- compressions

for _dtype in (torch.float16, torch.float32, torch.float64, torch.int32):
    for _kind in ("none", "fp16"):

        @call(f"Compression.{_kind}(): {_dtype}")
        def _(dtype: torch.dtype = _dtype, kind: str = _kind) -> Any:
            compression = getattr(hvd.Compression, kind)
            wire, ctx = compression.compress(own(dtype))
            return wire, str(ctx), compression.decompress(wire, ctx)


# --- basics


@call("rank(): and its kin")
def _() -> Any:
    return [
        hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
        hvd.is_initialized(),
    ]  # fmt: skip


call("init(): a second time")(hvd.init)


@call("mpi_built(): and its kin")
def _() -> Any:
    return [hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.gloo_enabled(), bool(hvd.gloo_built()), hvd.ddl_built(),
            hvd.ccl_built(), hvd.rocm_built()]  # fmt: skip


call("SyncBatchNorm(num_features): on a CPU")(lambda: hvd.SyncBatchNorm(3)(own()))


# --- what leaves ranks with other numbers of operations: last, since Horovod counts on each what has no name


@call("join(): after another number of sums on each rank")
def _() -> Any:
    results = [hvd.allreduce(own(), name=f"joined {turn}", op=hvd.Sum) for turn in range(hvd.rank() + 1)]
    return results, hvd.join()


@call("join(): after another number of averages on each rank")
def _() -> Any:
    results = [hvd.allreduce(own(), name=f"joined {turn}") for turn in range(hvd.rank() + 1)]
    return results, hvd.join()


@call("join(): after another number of averages of integers on each rank")
def _() -> Any:
    results = [hvd.allreduce(own(torch.int64), name=f"joined {turn}") for turn in range(hvd.rank() + 1)]
    return results, hvd.join()


@call("join(device): given")
def _() -> Any:
    # The result depends on which rank comes last.
    return 0 <= hvd.join(-1) < hvd.size()


def encode(value: Any) -> Any:
    """Converts a value to JSON that can be compared."""
    if isinstance(value, torch.Tensor):
        values = (value.detach().to_dense() if value.is_sparse else value.detach()).flatten().tolist()
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return {kind: [int(each) if each == int(each) else each for each in values]}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *[encode(each) for each in value]]
    if isinstance(value, dict):
        return {str(key): encode(each) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, value]
    return type(value).__name__


def outcome(name: str, function: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = function()
        told = [str(each.message) for each in caught if each.category is DeprecationWarning]
        # Of the other warnings, some come from Horovod's own gradients and from PyTorch.
        return {"gives": encode(value), **({"deprecates": told} if "(average)" in name else {})}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the call comes to
        return {
            "raises": sorted(name for name, kind in CAUGHT_AS.items() if isinstance(error, kind)),
            "of": type(error).__name__,
            "says": str(error)[:90],
        }


SETS: list[hvd.ProcessSet] = []


def main() -> None:
    path, word = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    early = {
        name: outcome(name, getattr(hvd, name)) for name in ("rank", "size", "local_rank", "local_size", "cross_rank")
    }
    early["allreduce"] = outcome("", lambda: hvd.allreduce(torch.ones(2)))
    early["is_initialized"] = outcome("", hvd.is_initialized)
    # The size is not known before init(): the launcher's variable has it.
    size = int(os.environ["HOROVOD_SIZE"])
    if size > 1:
        SETS.extend([hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))])
    hvd.init(process_sets=SETS)
    outcomes = {f"{name}(): before init": each for name, each in early.items()}
    for name, function in CALLS.items():
        if word in name:
            print(name, file=sys.stderr, flush=True)
            outcomes[name] = outcome(name, function)
            DONE.append(name)
    with open(f"{path}.{hvd.rank()}", "w") as file:
        json.dump(outcomes, file)


if __name__ == "__main__":
    main()
