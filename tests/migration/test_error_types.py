"""Errors are of the types that Horovod's are: what a program catches there, it catches here.

Those that are not among the recorded calls of `test_calls`, where each error is compared with Horovod's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worlds import attempt_worlds, run_worlds

import hvdlite.torch as hvd
from hvdlite.torch import check_comm

# The calls of each of the two ranks, by the type of the error that they raise. `HorovodInternalError` is a
# RuntimeError.
Call = Callable[[int], Any]

ONE = torch.ones(1)
FLOATS = torch.ones(4, 2)
WHOLE = torch.ones(4, dtype=torch.int64)
SPARSE = torch.eye(2).to_sparse()
COMPLEX = torch.ones(2, dtype=torch.complex64)
BYTES = torch.zeros(2, dtype=torch.float8_e4m3fn)


def weight(rows: int = 2) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows))


def wrap(param: nn.Parameter | None = None, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD([weight() if param is None else param], lr=1.0), **options)


def twice_the_same_name(rank: int) -> None:
    if rank == 0:
        handle = hvd.allreduce_async(ONE, name="same")
        try:
            hvd.allreduce_async(ONE, name="same")
        finally:
            hvd.barrier()
            hvd.synchronize(handle)
    else:
        hvd.barrier()
        hvd.allreduce(ONE, name="same")
        raise ValueError("as on the other rank, for which this one has waited")


def outside(call: Callable[..., Any]) -> Call:
    """Makes the call on rank 1 alone, which is not a member."""

    def on_both(rank: int) -> None:
        process_set = hvd.add_process_set([0])
        try:
            if rank == 0:
                raise ValueError("as on the other rank")
            call(process_set)
        finally:
            hvd.barrier()

    return on_both


def after_a_join(call: Callable[[], Any]) -> Call:
    def on_both(rank: int) -> None:
        if rank == 0:
            hvd.join()
            raise hvd.HorovodInternalError("as on the other rank")
        try:
            call()
        finally:
            hvd.join()

    return on_both


RUNTIME: dict[str, Call] = {
    "alltoall of a scalar": lambda rank: hvd.alltoall(torch.tensor(1.0)),
    "alltoall_async of a scalar": lambda rank: hvd.synchronize(hvd.alltoall_async(torch.tensor(1.0))),
    "Adasum of integers": lambda rank: hvd.allreduce(WHOLE, op=hvd.Adasum),
    "Adasum of integers in a group": lambda rank: hvd.grouped_allreduce([WHOLE], op=hvd.Adasum),
    "an op that is none": lambda rank: hvd.allreduce(ONE, op=99),
    "a factor that is no number": lambda rank: hvd.allreduce(ONE, prescale_factor=float("nan")),
    "other dtypes": lambda rank: hvd.allreduce(ONE if rank else ONE.double()),
    "other operations": lambda rank: hvd.allreduce(ONE, name="x") if rank else hvd.allgather(ONE, name="x"),
    "other ops": lambda rank: hvd.allreduce(ONE, op=hvd.Min if rank else hvd.Max),
    "other factors": lambda rank: hvd.allreduce(ONE, postscale_factor=rank + 1.0),
    "other roots of objects": lambda rank: hvd.broadcast_object(1, rank),
    "other numbers of dimensions": lambda rank: hvd.allgather(torch.ones([1] * (rank + 1))),
    "other rows to scatter": lambda rank: hvd.reducescatter(torch.ones(rank + 2)),
    "other rows to exchange": lambda rank: hvd.alltoall(torch.ones(2, rank + 1)),
    "other parameters": lambda rank: hvd.broadcast_parameters([torch.ones(rank + 1)], 0),
    "another optimizer": lambda rank: hvd.broadcast_optimizer_state(torch.optim.SGD([weight(rank + 1)], lr=1.0), 0),
    "another model": lambda rank: wrap(weight(rank + 1)).step(),
    "allgather beside a join": after_a_join(lambda: hvd.allgather(ONE)),
    "broadcast beside a join": after_a_join(lambda: hvd.broadcast(ONE, 1)),
    "alltoall beside a join": after_a_join(lambda: hvd.alltoall(torch.ones(2))),
    "reducescatter beside a join": after_a_join(lambda: hvd.reducescatter(torch.ones(2))),
}

VALUE: dict[str, Call] = {
    "a dtype": lambda rank: hvd.allreduce(BYTES),
    "a dtype in a group": lambda rank: hvd.grouped_allreduce([BYTES]),
    "a dtype to scatter": lambda rank: hvd.reducescatter(BYTES),
    "complex numbers, which have no order": lambda rank: hvd.allreduce(COMPLEX, op=hvd.Max),
    "sparse to reduce": lambda rank: hvd.allreduce(SPARSE),
    "sparse to reduce, async": lambda rank: hvd.allreduce_async(SPARSE),
    "sparse to gather": lambda rank: hvd.allgather(SPARSE),
    "sparse to broadcast": lambda rank: hvd.broadcast(SPARSE, 0),
    "sparse to exchange": lambda rank: hvd.alltoall(SPARSE),
    "sparse to scatter": lambda rank: hvd.reducescatter(SPARSE),
    "expanded, in place": lambda rank: hvd.allreduce_(torch.ones(1).expand(3)),
    "no values": lambda rank: hvd.allreduce(torch.ones(2, device="meta")),
    "a scalar to scatter": lambda rank: hvd.reducescatter(torch.tensor(1.0)),
    "no such root below": lambda rank: hvd.broadcast_(ONE.clone(), -1),
    "no such root of an object": lambda rank: hvd.broadcast_object(1, 5),
    "splits of another dtype": lambda rank: hvd.alltoall(FLOATS, splits=torch.tensor([1, 1])),
    "splits that are no numbers": lambda rank: hvd.alltoall(FLOATS, splits=["a", "b"]),
    "a name that is taken": twice_the_same_name,
    "no handle to poll": lambda rank: hvd.poll(10**9),
    "no member broadcasts an object": outside(lambda few: hvd.broadcast_object(1, 0, process_set=few)),
    "no member waits": outside(lambda few: hvd.barrier(process_set=few)),
    "a root that is no member": lambda rank: (
        hvd.broadcast(ONE, 1, process_set=hvd.add_process_set([0])) if rank == 0 else hvd.add_process_set([0]).rank()
    ),
    "a set that is there": lambda rank: hvd.add_process_set([0, 1]),
    "a set of no list": lambda rank: hvd.ProcessSet(3),
    "a communicator": lambda rank: check_comm("world", 2),
    "groups of no tensors": lambda rank: wrap(groups=[["a"]]),
    "groups that overlap in another's": lambda rank: wrap(groups=[[param := weight()], [param]]),
    "batch norm of one dimension": lambda rank: hvd.SyncBatchNorm(2)(torch.ones(2)),
}

TYPE: dict[str, Call] = {
    "an op that is no number": lambda rank: hvd.allreduce(ONE, op="sum"),
    "an op that is no number, to scatter": lambda rank: hvd.reducescatter(FLOATS, op="sum"),
    "a factor": lambda rank: hvd.allreduce(ONE, prescale_factor="2"),
    "a factor in a group": lambda rank: hvd.grouped_allreduce([ONE], postscale_factor=None),
    "a root": lambda rank: hvd.broadcast(ONE, "0"),
    "no root": lambda rank: hvd.broadcast(ONE, None),
    "a device": lambda rank: hvd.join("cpu"),
    "what is no handle to poll": lambda rank: hvd.poll("x"),
    "a set that is not registered": lambda rank: hvd.allreduce(ONE, process_set=hvd.ProcessSet([0])),
    "a set that was removed": lambda rank: hvd.allreduce(ONE, process_set=removed()),
    "an object that cannot be pickled": lambda rank: hvd.allgather_object(threading.Lock()),
}

BAD = [
    pytest.param(call, kind, id=f"{kind.__name__}: {name}")
    for kind, calls in (
        (hvd.HorovodInternalError, RUNTIME), (ValueError, VALUE), (TypeError, TYPE),
    )
    for name, call in calls.items()
]  # fmt: skip


def removed() -> hvd.ProcessSet:
    process_set = hvd.add_process_set([0])
    hvd.remove_process_set(process_set)
    return process_set


@pytest.mark.slow(but=12)
@pytest.mark.parametrize(("call", "kind"), BAD)
def test_an_error_is_of_horovods_type(call, kind):
    for outcome in attempt_worlds(2, call):
        assert isinstance(outcome, kind), repr(outcome)


BEFORE_INIT: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    **{
        name: (getattr(hvd, name), ValueError)
        for name in (
            "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "mpi_threads_supported",
            "stop_timeline",
        )
    },
    "start_timeline": (lambda: hvd.start_timeline("x"), ValueError),
    "add_process_set": (lambda: hvd.add_process_set([0]), ValueError),
    "included": (lambda: hvd.ProcessSet([0]).included(), ValueError),
    "allreduce": (lambda: hvd.allreduce(ONE), hvd.HorovodInternalError),
    "allreduce_async": (lambda: hvd.allreduce_async(ONE), hvd.HorovodInternalError),
    "grouped_allreduce": (lambda: hvd.grouped_allreduce([ONE]), hvd.HorovodInternalError),
    "allgather": (lambda: hvd.allgather(ONE), hvd.HorovodInternalError),
    "broadcast": (lambda: hvd.broadcast(ONE, 0), hvd.HorovodInternalError),
    "broadcast_parameters": (lambda: hvd.broadcast_parameters([ONE], 0), hvd.HorovodInternalError),
    "alltoall": (lambda: hvd.alltoall(ONE), hvd.HorovodInternalError),
    "reducescatter": (lambda: hvd.reducescatter(ONE), hvd.HorovodInternalError),
    "barrier": (hvd.barrier, hvd.HorovodInternalError),
    "join": (hvd.join, hvd.HorovodInternalError),
    "DistributedOptimizer": (wrap, ValueError),
    "broadcast_object": (lambda: hvd.broadcast_object(1), ValueError),
}  # fmt: skip


@pytest.mark.parametrize("name", BEFORE_INIT)
def test_before_init_too(name):
    call, kind = BEFORE_INIT[name]
    assert not hvd.is_initialized()
    with pytest.raises(kind, match=r"Horovod has not been initialized; use hvd.init\(\)"):
        call()


# -- calls that Horovod accepts


def test_groups_leave_out_tensors_of_others():
    def rank(own: int) -> list[float]:
        param, other = weight(), weight()
        optimizer = wrap(param, groups=[[other, param]])
        (param.sum() * (own + 1)).backward()
        optimizer.step()
        return param.tolist()

    assert run_worlds(2, rank) == [[-1.5, -1.5]] * 2


def test_ranks_and_passes_may_be_numpys():
    def rank(own: int) -> list[Any]:
        param, one = weight(), np.int64(1)
        optimizer = wrap(param, backward_passes_per_step=np.int32(2))
        optimizer.set_backward_passes_per_step(one)
        param.data.fill_(own)
        hvd.broadcast_parameters([param], one)
        hvd.broadcast_optimizer_state(optimizer, one)
        return [param.tolist(), hvd.broadcast(torch.tensor(own), one).item(), hvd.broadcast_object(own, one)]

    assert run_worlds(2, rank) == [[[1.0, 1.0], 1, 1]] * 2


def test_splits_may_be_floats_that_are_whole():
    def rank(own: int) -> list[float]:
        return hvd.alltoall(torch.arange(3.0), splits=[1.0, 2.0])[0].tolist()

    assert run_worlds(2, rank) == [[0.0, 0.0], [1.0, 2.0, 1.0, 2.0]]
