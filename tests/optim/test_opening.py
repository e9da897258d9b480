"""An optimizer is constructed without other ranks; they meet at its first use, in whatever order ranks use several."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from worlds import PLAIN, attempt_worlds, run_generations, run_worlds

import hvdlite as hvd
from hvdlite.calls.operation import OPTIMIZER, Operation
from hvdlite.comm.group import Group
from hvdlite.environment import Environment
from hvdlite.log import log
from hvdlite.runtime import world as world_module
from hvdlite.runtime.world import current_world

CHECKS = [PLAIN, Environment(stall_check=False, check=False)]


def make(numel: int = 2, **options: Any) -> tuple[nn.Parameter, hvd.DistributedOptimizer]:
    param = nn.Parameter(torch.zeros(numel))
    return param, hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("weight", param)], **options)


def backward(param: nn.Parameter) -> None:
    (param * (1.0 + hvd.rank())).sum().backward()


def begun() -> int:
    return sum(current_world().generation.watch.begun.values())


@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
@pytest.mark.parametrize("environment", CHECKS, ids=["checked", "unchecked"])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"autotune": True}, {"step_on_arrival": True}], ids=str)
def test_it_is_made_without_a_collective_and_without_the_other_ranks(options, environment, engine):
    made = threading.Event()

    def rank(own: int) -> tuple[int, float]:
        if own == 1:
            # The other rank has not come as far.
            made.wait()
        before = begun()
        param, optimizer = make(**options)
        during = begun() - before
        made.set()
        for _ in range(3):
            optimizer.zero_grad()
            backward(param)
            optimizer.step()
        return during, param[0].item()

    results = run_worlds(2, rank, environment, engine=engine)
    assert [collectives for collectives, _ in results] == [0, 0]
    assert results[0] == results[1]
    if "op" not in options:
        assert results[0][1] == -4.5


def test_it_asks_for_no_operation_before_the_first_need():
    def rank(own: int) -> list[int]:
        asked: list[Operation] = []
        controller = current_world().controller
        submit = controller.submit

        def submit_and_tell(group: Any, operation: Operation) -> Any:
            asked.append(operation)
            return submit(group, operation)

        controller.submit = submit_and_tell
        param, optimizer = make()
        backward(param)
        counts = [len(asked)]
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            backward(param)
            counts.append(len(asked))
        assert [operation.kind for operation in asked] == [OPTIMIZER]
        optimizer.step()
        return counts

    assert run_worlds(2, rank) == [[0, 1, 1]] * 2


@pytest.mark.parametrize("environment", CHECKS, ids=["checked", "unchecked"])
def test_one_rank_goes_backward_before_a_collective_and_the_other_after_it(environment):
    def rank(own: int) -> tuple[float, float]:
        param, optimizer = make()
        if own == 0:
            backward(param)
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        if own == 1:
            backward(param)
        optimizer.step()
        return total, param[0].item()

    assert run_worlds(2, rank, environment) == [(2.0, -1.5)] * 2


@pytest.mark.parametrize("environment", CHECKS, ids=["checked", "unchecked"])
def test_ranks_go_backward_through_two_of_them_in_different_orders(environment):
    def rank(own: int) -> list[float]:
        made = [make(), make(3)]
        for param, _ in made if own else made[::-1]:
            backward(param)
        for _, optimizer in made:
            optimizer.step()
        return [param[0].item() for param, _ in made]

    assert run_worlds(2, rank, environment) == [[-1.5, -1.5]] * 2


@pytest.mark.parametrize("environment", CHECKS, ids=["checked", "unchecked"])
def test_threads_step_with_one_each_and_the_other_rank_in_the_other_order(environment):
    begins = threading.Event()

    def rank(own: int) -> list[float]:
        made = [make(), make(3)]

        def step(number: int) -> None:
            backward(made[number][0])
            begins.set()
            made[number][1].step()

        if own == 1:
            step(1)
            step(0)
        else:
            threads = [world_module._world.starts(lambda: step(0), "first")]  # type: ignore[union-attr]
            threads[0].start()
            begins.wait()
            step(1)
            threads[0].join()
        return [param[0].item() for param, _ in made]

    assert run_worlds(2, rank, environment) == [[-1.5, -1.5]] * 2


def differing_models(own: int) -> hvd.DistributedOptimizer:
    return make(2 + own)[1]


def differing_arguments(own: int) -> hvd.DistributedOptimizer:
    return make(op=(hvd.Average, hvd.Sum)[own])[1]


WORDS = {
    differing_models: r"^parameter 'weight' has shape \(2,\).* on rank 0 .* and shape \(3,\)",
    differing_arguments: (
        r"^hvd\.DistributedOptimizer: op is Average on rank 0 .* and Sum on rank 1 .*\): every rank must pass"
    ),
}
NEEDS: dict[str, Callable[[hvd.DistributedOptimizer], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "synchronize": lambda optimizer: optimizer.synchronize(),
    "join": lambda _: hvd.join(),
}


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("differing", WORDS, ids=lambda each: each.__name__)
def test_ranks_that_differ_have_one_error_at_the_first_need(differing, need):
    def rank(own: int) -> str:
        optimizer = differing(own)
        with pytest.raises(hvd.MismatchError, match=WORDS[differing]) as told:
            # While the other rank joins, this one steps.
            NEEDS["step" if own else need](optimizer)
        for _ in range(2):
            with pytest.raises(hvd.MismatchError) as again:
                optimizer.step()
            assert str(again.value) == str(told.value)
        return str(told.value)

    first, second = run_worlds(2, rank)
    assert first == second


def test_a_rank_that_joins_learns_of_an_opening_that_has_failed_before():
    """Another operation has begun it, and nobody here has waited for it."""
    has_failed = threading.Event()

    def rank(own: int) -> str:
        optimizer = differing_arguments(own)
        hvd.barrier()
        assert optimizer._reducer.engine._opening._handle.ended_within(60)
        if own == 1:
            # Not before the other one has failed, since the end of this rank would be an error there, too.
            assert has_failed.wait(60)
        with pytest.raises(hvd.MismatchError, match=WORDS[differing_arguments]) as told:
            NEEDS["step" if own else "join"](optimizer)
        has_failed.set()
        return str(told.value)

    first, second = run_worlds(2, rank)
    assert first == second


def test_one_that_differs_is_an_error_in_its_own_step_and_in_no_other():
    def rank(own: int) -> str:
        differing = make(2 + own)[1]
        param, optimizer = make()
        backward(param)
        optimizer.step()
        assert param.tolist() == [-1.5, -1.5]
        with pytest.raises(hvd.MismatchError, match="'weight' has shape") as told:
            differing.step()
        return str(told.value)

    first, second = run_worlds(2, rank)
    assert first == second


def test_one_that_only_one_rank_has_made_is_an_error_that_says_who_waits_for_it():
    def rank(own: int) -> None:
        _, optimizer = make()
        optimizer.step()
        if own == 0:
            make()[1].step()
        else:
            hvd.barrier()

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "One rank calls hvd.DistributedOptimizer, but another rank calls barrier." in str(outcome)
        assert "rank 0 (node0): hvd.DistributedOptimizer of 'optimizer 2'" in str(outcome)


def test_a_rank_without_a_batch_joins_and_sits_out_the_steps_of_all():
    def rank(own: int) -> list[float]:
        made = [make(), make(3)]
        if own == 0:
            assert hvd.join() == 1
        else:
            # It may wait for the rank that joins before it uses either of them.
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() in (1.0, 2.0)
            for param, optimizer in made[::-1] * 2:
                optimizer.zero_grad()
                backward(param)
                optimizer.step()
            hvd.join()
        return [param[0].item() for param, _ in made]

    # Half of the other rank's gradient, twice. A rank that has joined takes no step.
    assert run_worlds(2, rank) == [[0.0, 0.0], [-2.0, -2.0]]


def test_one_that_is_made_after_others_have_stepped_is_opened_for_a_rank_that_joins():
    def rank(own: int) -> list[float]:
        first = make()
        backward(first[0])
        first[1].step()
        second = make(3)
        if own == 0:
            hvd.join()
        else:
            for param, optimizer in (first, second):
                optimizer.zero_grad()
                backward(param)
                optimizer.step()
            hvd.join()
        return [param[0].item() for param, _ in (first, second)]

    assert run_worlds(2, rank) == [[-1.5, 0.0], [-2.5, -1.0]]


def test_those_that_are_gone_unused_keep_nobody_waiting():
    def rank(own: int) -> float:
        unused = [make(4) for _ in range(2)]
        if own == 0:
            del unused
            gc.collect()
        param, optimizer = make()
        backward(param)
        optimizer.step()
        return param[0].item()

    assert run_worlds(2, rank) == [-1.5] * 2


def test_in_the_next_world_ranks_may_use_them_in_different_orders_and_others_make_theirs():
    def rank(generations: Iterator[int]) -> list[float]:
        made: list[tuple[nn.Parameter, hvd.DistributedOptimizer]] = []
        for _ in generations:
            if not made:
                made = [make(), make(3)]
            for param, optimizer in made:
                optimizer.zero_grad()
                with torch.no_grad():
                    param.zero_()
            for param, _optimizer in made if hvd.rank() else made[::-1]:
                backward(param)
            for _param, optimizer in made:
                optimizer.step()
        return [param[0].item() for param, _ in made]

    assert run_generations([2, 3], rank) == [[-2.0, -2.0]] * 3


def test_parameters_that_are_added_before_the_first_step_are_compared_behind_it():
    def rank(own: int) -> tuple[str, list[float]]:
        param, optimizer = make()
        more = nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": [more]})
        backward(param)
        backward(more)
        optimizer.step()
        with pytest.raises(hvd.MismatchError) as told:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + own))]})
        return str(told.value), [param[0].item(), more[0].item()]

    first, second = run_worlds(2, rank)
    assert first == second
    assert first[1] == [-1.5, -1.5]


def test_averages_of_the_first_step_have_the_bits_of_those_of_any_other():
    def rank(own: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(own)
        grads = [torch.randn(1000, generator=generator) for _ in range(3)]
        averages = []
        for meets in (False, True):
            params = [nn.Parameter(torch.zeros(1000)) for _ in grads]
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), bucket_cap_mb=0.005)
            if meets:
                optimizer._reducer.connect()
            sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
            optimizer.step()
            averages.append(torch.cat([param.detach() for param in params]))
        return averages

    for lazily, at_once in run_worlds(2, rank, engine="shared memory"):
        assert torch.equal(lazily, at_once)


def test_one_that_another_rank_never_makes_is_told_of_with_the_ranks_that_wait_and_those_that_have_not_come():
    told = threading.Event()
    words = re.compile(
        r"stalled: hvd\.DistributedOptimizer of 'optimizer 2' in the global process set has been waiting \d+ s\. "
        r"rank 0 \(node0, pid \d+\) called it; missing: rank 1 \(node1, pid \d+\)"
    )

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words.search(record.getMessage()):
                told.set()

    def rank(own: int) -> float:
        param, optimizer = make()
        backward(param)
        optimizer.step()
        if own == 1:
            # The rank still computes.
            assert told.wait(60)
        param, optimizer = make(3)
        backward(param)
        optimizer.step()
        return param[0].item()

    look = Look()
    log.addHandler(look)
    try:
        assert run_worlds(2, rank, Environment(stall_warning_s=0.5, stall_shutdown_s=100.0)) == [-1.5] * 2
    finally:
        log.removeHandler(look)


def test_a_rank_that_is_new_and_joins_without_a_batch_is_told_of_those_that_the_others_have_kept():
    errors: list[hvd.MismatchError] = []

    def rank(generations: Iterator[int]) -> list[float]:
        made: list[tuple[nn.Parameter, hvd.DistributedOptimizer]] = []
        for number in generations:
            is_new = number == 1 and not made
            made = made or [make(), make(3)]
            if is_new:
                with pytest.raises(hvd.MismatchError) as told:
                    hvd.join()
                errors.append(told.value)
            # Optimizers that are kept are opened when they are used: all ranks have opened the first one.
            for param, optimizer in made[: 2 - number]:
                with torch.no_grad():
                    param.zero_()
                optimizer.zero_grad()
                backward(param)
                optimizer.step()
        return [param[0].item() for param, _ in made]

    assert run_generations([2, 3], rank) == [[-2.0, -1.5], [-2.0, -1.5], [-2.0, 0.0]]
    (error,) = errors
    assert "rank 2 (node2): hvd.DistributedOptimizer of 'optimizer 2'" in str(error)
    assert "ranks 0 (node0), 1 (node1): the all-reduce of the gradients of weight" in str(error)
    assert "where one rank makes a new one, all must" in str(error)


def test_a_first_step_beside_another_thread_without_the_check_is_an_error_that_says_what_to_do(monkeypatch):
    inside, refused = threading.Event(), threading.Event()
    all_gather = Group.all_gather_signed

    def slowly(group: Group, *arguments: Any, **more: Any) -> Any:
        if threading.current_thread().name == "another":
            inside.set()
            assert refused.wait(60)
        return all_gather(group, *arguments, **more)

    monkeypatch.setattr(Group, "all_gather_signed", slowly)

    def rank(own: int) -> float:
        param, optimizer = make()
        other = world_module._world.starts(lambda: hvd.allgather_object(own), "another")  # type: ignore[union-attr]
        other.start()
        if own == 0:
            assert inside.wait(60)
            with pytest.raises(RuntimeError, match=r"HVDLITE_CHECK=0: called by thread 'rank' while thread 'another' "):
                optimizer.step()
            refused.set()
        other.join()
        # What could not be opened then is opened now.
        backward(param)
        optimizer.step()
        return param[0].item()

    assert run_worlds(2, rank, CHECKS[1]) == [-1.5] * 2
