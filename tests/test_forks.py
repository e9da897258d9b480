"""A forked child of a rank has its own gradients, is refused what only ranks can do, and disturbs nobody."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import in_child
from worlds import run_worlds

import hvdlite as hvd
from hvdlite import forks
from hvdlite.comm.recorder import OPERATIONS
from hvdlite.optim.optimizer import DistributedOptimizer
from hvdlite.runtime.world import current_world

REFUSED = r"^{what}: this process \(pid \d+\) is a forked child of rank {rank} \(pid \d+\), such as a worker of a DataL"


def make_model() -> torch.nn.Linear:
    # Without random numbers, which threads draw from one generator.
    model = torch.nn.Linear(4, 3)
    for param in model.parameters():
        param.data = torch.arange(param.numel(), dtype=torch.float32).view_as(param)
    return model


def wrapped(model: torch.nn.Module, **options: Any) -> DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **options)


def backward(model: torch.nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(2, 4)).sum() * scale).backward()


def values(tensors: Any) -> list[float]:
    return [number for tensor in tensors for number in tensor.detach().flatten().tolist()]


def gradients(model: torch.nn.Module) -> list[float]:
    return values(param.grad for param in model.parameters())


# -- gradients


@pytest.mark.parametrize("engine", ["shared memory", "gloo"])
@pytest.mark.parametrize("when", ["before backward", "before step", "after step"])
def test_what_a_child_writes_into_gradients_stays_in_the_child(engine, when):
    def rank(own: int) -> list[list[float]]:
        model = make_model()
        optimizer = wrapped(model)
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

        def child() -> None:
            before = gradients(model)
            backward(model, 7.0)
            assert gradients(model) == [b + 14 * (i < 12) + 14 * (i >= 12) for i, b in enumerate(before)]
            for param in model.parameters():
                param.grad.fill_(9)
            optimizer.zero_grad(set_to_none=False)
            assert not any(gradients(model))
            optimizer.zero_grad()
            assert model.weight.grad is None
            backward(model, 7.0)

        def have_child(at: str) -> None:
            if at == when:
                before = gradients(model)
                in_child(child)
                assert gradients(model) == before

        have_child("before backward")
        backward(model, own + 1.0)
        have_child("before step")
        optimizer.step()
        have_child("after step")
        return [gradients(model), values(model.parameters())]

    first, second = run_worlds(2, rank, engine=engine)
    assert first == second
    assert first[0] == [3.0] * 15  # the average of 2 and 4


@pytest.mark.parametrize("engine", ["shared memory", "gloo"])
@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Adasum},
        {"backward_passes_per_step": 2},
        {"compression": hvd.Compression.fp16},
        {"step_on_arrival": True},
        {"max_norm": 1.0},
        {"outer": hvd.LocalSGD(2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_backward_in_a_child_calls_no_hook_whatever_the_optimizer_does_with_gradients(engine, options):
    def rank(own: int) -> list[float]:
        model = make_model()
        optimizer = wrapped(model, **options)

        def child() -> list[float]:
            optimizer.zero_grad()
            for _ in range(3):
                backward(model)
            with pytest.raises(hvd.NotInitializedError, match=r"^optimizer\.step\(\): this process"):
                optimizer.step()
            return gradients(model)

        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(options.get("backward_passes_per_step", 1)):
                backward(model, own + 1.0)
                assert in_child(child) == [6.0] * 15
            optimizer.step()
        return values(model.parameters())

    first, second = run_worlds(2, rank, engine=engine)
    assert first == second


def test_backward_goes_on_in_a_child_that_a_hook_of_the_program_has_forked():
    def rank(own: int) -> list[float]:
        model = make_model()
        children: list[int] = []
        # Before the optimizer's, which autograd calls next for this parameter.
        forks_now = False

        def fork(param: torch.Tensor) -> None:
            if forks_now:
                children.append(os.fork())

        hook = model.weight.register_post_accumulate_grad_hook(fork)
        optimizer = wrapped(model)
        backward(model)
        optimizer.step()  # in the first step buckets are not sent within backward
        optimizer.zero_grad()
        forks_now = True
        status = 1
        try:
            backward(model, own + 1.0)
            # The other gradient was on its way to the other rank at the fork.
            status = 0 if values([model.weight.grad]) == [2.0 * (own + 1)] * 12 or children != [0] else 2
        finally:
            if children == [0]:
                os._exit(status)
        assert os.waitpid(children[0], 0)[1] == 0
        hook.remove()
        optimizer.step()
        return gradients(model)

    assert run_worlds(2, rank, engine="shared memory") == [[3.0] * 15] * 2


def test_a_child_can_copy_and_save_an_optimizer_and_read_its_groups():
    def rank(own: int) -> None:
        model = make_model()
        optimizer = wrapped(model)
        backward(model)
        optimizer.step()
        expected = optimizer.state_dict()["param_groups"]

        def child() -> None:
            assert optimizer.state_dict()["param_groups"] == expected
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.param_groups[0]["lr"] == 0.1
            copied = copy.deepcopy(optimizer)
            copied.param_groups[0]["params"][0].sum().backward()
            with pytest.raises(hvd.NotInitializedError):
                copied.step()
            optimizer.close()

        backward(model)
        in_child(child)
        optimizer.step()

    run_worlds(2, rank, engine="shared memory")


# -- what is refused

CALLS: dict[str, Callable[[Any], Any]] = {
    "allgather": lambda of: hvd.allgather(torch.ones(1)),
    "allgather_async": lambda of: hvd.allgather_async(torch.ones(1)),
    "allgather_object": lambda of: hvd.allgather_object(1),
    "allreduce": lambda of: hvd.allreduce(torch.ones(1)),
    "allreduce_": lambda of: hvd.allreduce_(torch.ones(1)),
    "allreduce_async": lambda of: hvd.allreduce_async(torch.ones(1)),
    "allreduce_async_": lambda of: hvd.allreduce_async_(torch.ones(1)),
    "alltoall": lambda of: hvd.alltoall(torch.ones(2)),
    "alltoall_async": lambda of: hvd.alltoall_async(torch.ones(2)),
    "barrier": lambda of: hvd.barrier(),
    "broadcast": lambda of: hvd.broadcast(torch.ones(1), 0),
    "broadcast_": lambda of: hvd.broadcast_(torch.ones(1), 0),
    "broadcast_async": lambda of: hvd.broadcast_async(torch.ones(1), 0),
    "broadcast_async_": lambda of: hvd.broadcast_async_(torch.ones(1), 0),
    "broadcast_object": lambda of: hvd.broadcast_object(1, 0),
    "broadcast_optimizer_state": lambda of: hvd.broadcast_optimizer_state(of, 0),
    "broadcast_parameters": lambda of: hvd.broadcast_parameters(make_model().state_dict(), 0),
    "grouped_allgather": lambda of: hvd.grouped_allgather([torch.ones(1)]),
    "grouped_allgather_async": lambda of: hvd.grouped_allgather_async([torch.ones(1)]),
    "grouped_allreduce": lambda of: hvd.grouped_allreduce([torch.ones(1)]),
    "grouped_allreduce_": lambda of: hvd.grouped_allreduce_([torch.ones(1)]),
    "grouped_allreduce_async": lambda of: hvd.grouped_allreduce_async([torch.ones(1)]),
    "grouped_allreduce_async_": lambda of: hvd.grouped_allreduce_async_([torch.ones(1)]),
    "grouped_reducescatter": lambda of: hvd.grouped_reducescatter([torch.ones(2)]),
    "grouped_reducescatter_async": lambda of: hvd.grouped_reducescatter_async([torch.ones(2)]),
    "load_checkpoint": lambda of: hvd.load_checkpoint("none", model=make_model()),
    "save_checkpoint": lambda of: hvd.save_checkpoint("never/there", model=make_model()),
    "join": lambda of: hvd.join(),
    "reducescatter": lambda of: hvd.reducescatter(torch.ones(2)),
    "reducescatter_async": lambda of: hvd.reducescatter_async(torch.ones(2)),
    "sparse_allreduce_async": lambda of: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", hvd.Sum),
    "SyncBatchNorm": lambda of: hvd.SyncBatchNorm(2)(torch.ones(4, 2)),
    "add_process_set": lambda of: hvd.add_process_set([0]),
    "start_timeline": lambda of: hvd.start_timeline("never"),
    "stop_timeline": lambda of: hvd.stop_timeline(),
    "DistributedOptimizer": lambda of: wrapped(make_model()),
    "elastic.TorchState.commit": lambda of: hvd.elastic.TorchState(model=make_model()).commit(),
    "elastic.TorchState.sync": lambda of: hvd.elastic.TorchState(model=make_model()).sync(),
    "optimizer.step": lambda of: of.step(),
    "optimizer.synchronize": lambda of: of.synchronize(),
    "optimizer.consolidate_state_dict": lambda of: of.consolidate_state_dict(),
    "optimizer.add_param_group": lambda of: of.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
}

# What does not communicate, or is no function.
ALLOWED = {
    *("Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum"),
    *("Codec", "Compression", "Compressor", "DiLoCo", "Exchange", "ExchangeWork", "Gradients", "Handle", "Links"),
    *("BalancedBatchSampler", "JobLog", "LocalSGD", "ProcessSet", "RankPace", "global_process_set", "elastic"),
    *(name for name in hvd.__all__ if name.endswith(("Error", "_built", "_enabled", "_supported", "rank", "size"))),
    *("init", "is_homogeneous", "is_initialized", "shutdown", "stragglers", "save_on_signal", "log_to"),
    "run",  # starts a job of its own
    *("poll", "synchronize", "remove_process_set"),  # see the tests below
}


def test_every_public_name_is_known_to_these_tests():
    assert set(hvd.__all__) - ALLOWED - set(CALLS) == set()


@pytest.mark.parametrize("size", [1, 2])
def test_a_child_is_refused_all_that_only_ranks_can_do_in_words(size):
    def rank(own: int) -> None:
        model = make_model()
        optimizer = wrapped(model)
        backward(model)
        optimizer.step()

        def child() -> None:
            for name, call in CALLS.items():
                if (name, size) == ("SyncBatchNorm", 1):
                    continue  # it needs no other ranks
                words = f"{name} was not refused"
                try:
                    call(optimizer)
                except hvd.NotInitializedError as error:
                    words = str(error)
                assert re.search(rf" is a forked child of rank {own} .* in the rank's own process", words), words
            assert hvd.is_initialized()
            assert (hvd.rank(), hvd.size()) == (own, size)
            hvd.init()
            assert hvd.stragglers() == []

        in_child(child)
        hvd.barrier()

    run_worlds(size, rank, engine="shared memory")


def test_an_operation_that_has_not_ended_before_the_fork_does_not_end_in_the_child():
    def rank(own: int) -> None:
        ended = hvd.allreduce_async(torch.ones(1), name="ended", op=hvd.Sum)
        hvd.synchronize(ended)
        ranks = hvd.add_process_set([0])
        hvd.barrier()
        pending = hvd.allreduce_async(torch.ones(1), name="pending", op=hvd.Sum) if own == 0 else None

        def child() -> None:
            assert hvd.poll(ended)
            assert hvd.synchronize(ended).item() == 2
            refused = REFUSED.format(what="allreduce of 'pending'", rank=0)
            for call in () if pending is None else (pending.wait, lambda: hvd.poll(pending)):
                with pytest.raises(hvd.NotInitializedError, match=refused):
                    call()
            with pytest.raises(hvd.NotInitializedError, match=REFUSED.format(what="remove_process_set", rank=own)):
                hvd.remove_process_set(ranks)

        in_child(child)
        assert hvd.synchronize(pending or hvd.allreduce_async(torch.ones(1), name="pending", op=hvd.Sum)).item() == 2

    run_worlds(2, rank)


def test_a_child_that_shuts_down_forgets_the_world_and_its_sets_and_the_parent_keeps_them():
    def rank(own: int) -> None:
        both = hvd.add_process_set([0])

        def child() -> None:
            hvd.shutdown()
            assert not hvd.is_initialized()
            assert both.process_set_id is None
            for call in (hvd.rank, hvd.barrier):
                with pytest.raises(hvd.NotInitializedError, match=r"use hvd\.init\(\)"):
                    call()
            hvd.shutdown()

        in_child(child)
        hvd.barrier()
        assert both.process_set_id == 1

    run_worlds(2, rank)


def test_a_child_of_a_child_is_told_of_the_rank():
    def rank(own: int) -> None:
        def child() -> None:
            in_child(grandchild)

        def grandchild() -> None:
            with pytest.raises(hvd.NotInitializedError, match=REFUSED.format(what="barrier", rank=own)):
                hvd.barrier()

        in_child(child)
        hvd.barrier()

    run_worlds(2, rank)


def test_a_child_of_a_process_that_is_no_rank_is_refused_nothing():
    def child() -> None:
        assert forks.parent is None
        forks.require_rank("anything")

    in_child(child)


# -- what a child inherits


def test_a_lock_of_the_process_is_free_in_a_child_whoever_held_it():
    lock = forks.lock_of_process()
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        assert in_child(lambda: lock.acquire(blocking=False))
        assert not lock.acquire(blocking=False)
    finally:
        is_over.set()
        thread.join()


def test_all_that_is_inherited_is_left_to_the_parent_even_if_one_fails():
    left: list[str] = []

    class Thing:
        def __init__(self, fails: bool) -> None:
            self.fails = fails
            forks.when_forked(self)

        def leave_to_parent(self) -> None:
            left.append("left")
            if self.fails:
                raise ValueError

    things = [Thing(fails=True), Thing(fails=False), Thing(fails=True)]
    assert in_child(lambda: len(left)) == len(things)
    assert left == []


def test_what_is_kept_for_ever_is_not_destroyed():
    class Thing:
        def __del__(self) -> None:
            destroyed.append("destroyed")

    destroyed: list[str] = []

    def child() -> list[str]:
        thing = Thing()
        forks.keep_for_ever(thing)
        del thing
        return destroyed

    assert in_child(child) == []


def test_a_child_does_not_write_to_the_timeline_of_its_parent(tmp_path):
    def rank(own: int) -> None:
        hvd.start_timeline(tmp_path / "timeline.json")
        recorder = current_world().generation.recorder
        with recorder.span(OPERATIONS, "of the parent"):
            pass

        def child() -> None:
            with recorder.span(OPERATIONS, "of the child"):
                pass
            with pytest.raises(hvd.NotInitializedError):
                hvd.stop_timeline()
            recorder.forget()

        in_child(child)
        hvd.stop_timeline()

    run_worlds(2, rank)
    written = (tmp_path / "timeline.json").read_text()
    assert written.count("of the parent") == 2
    assert "of the child" not in written
