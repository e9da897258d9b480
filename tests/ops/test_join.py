"""Ranks with fewer batches join, and the others continue as if those had only zeros to contribute."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from models import Plain, batches, build, part_loss
from torch import nn
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.calls.generation import Reducers, SitsOut
from hvdlite.comm import deferred_close
from hvdlite.comm.group import Group
from hvdlite.optim.reducer import Reducer
from hvdlite.runtime import world as world_module

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
def test_join_returns_the_last_rank_on_all(size):
    def rank(own: int) -> list[int]:
        return [hvd.join(), hvd.join()]

    outcomes = run_worlds(size, rank)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert all(last in range(size) for last in outcomes[0])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("average", ["all", "active"])
@pytest.mark.parametrize("engine", ["gloo", "shared memory"])
def test_all_reduces_go_on_without_the_ranks_that_have_joined(size, average, engine):
    def rank(own: int) -> tuple[list[torch.Tensor], int]:
        # Rank r has r + 1 batches; all join in order, each after the others' all-reduce.
        results = []
        for batch in range(own + 1):
            value = torch.full((2,), 1.0 + own)
            results.append(hvd.allreduce(value, name=f"average {batch}"))
            results.append(hvd.allreduce(value, name=f"sum {batch}", op=hvd.Sum))
            results.append(hvd.allreduce(value, name=f"max {batch}", op=hvd.Max))
            group = [value, value.long(), torch.full((2**18,), 1.0 + own)]
            results += hvd.grouped_allreduce(group, name=f"group {batch}", op=hvd.Sum)
        return results, hvd.join(average=average)

    outcomes = run_worlds(size, rank, engine=engine)
    for own, (results, last) in enumerate(outcomes):
        assert last == size - 1
        expected = []
        for batch in range(own + 1):
            values = [1.0 + other for other in range(size) if other >= batch]
            divisor = size if average == "all" else len(values)
            total = sum(values)
            expected += [total / divisor, total, max(values), total, int(total), total]
        assert [result.flatten()[0].item() for result in results] == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("average", ["all", "active"])
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 1.5}])
def test_steps_go_on_without_the_ranks_that_have_joined(size, average, options):
    def rank(own: int) -> list[float]:
        param = nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), **options)
        seen = []
        for _ in range(2 * own + 1):
            optimizer.zero_grad()
            (param * (1.0 + own)).sum().backward()
            optimizer.step()
            seen.append(param[0].item())
        assert hvd.join(average=average) == size - 1
        assert param.grad is None
        return seen

    outcomes = run_worlds(size, rank)
    value, expected = 0.0, []
    for step in range(2 * size - 1):
        active = [1.0 + own for own in range(size) if step <= 2 * own]
        value -= sum(active) / (size if average == "all" else len(active))
        expected.append(value)
    for own, seen in enumerate(outcomes):
        assert seen == pytest.approx(expected[: 2 * own + 1], rel=1e-3)


def test_training_goes_on_after_a_join_from_the_last_ranks_parameters():
    model, (x, y) = build(Plain), batches(8, 2, 6)

    def rank(own: int) -> list[torch.Tensor]:
        mine = build(Plain)
        mine.load_state_dict(model.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters())
        for epoch in range(2):
            for step in range(2 + own):
                optimizer.zero_grad()
                part_loss(mine, x[4 * epoch + step, 0], y[4 * epoch + step, 0], own, 2).backward()
                optimizer.step()
            last = hvd.join(average="active")
            hvd.broadcast_parameters(mine.state_dict(), root_rank=last)
        return [param.detach() for param in mine.parameters()]

    first, second = run_worlds(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_after_a_join_collectives_without_a_name_go_on():
    def rank(own: int) -> list[float]:
        seen = []
        for _ in range(2):
            for _ in range(2 + own):
                seen.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
            hvd.join()
            hvd.barrier()
        return seen

    assert run_worlds(2, rank) == [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 1.0, 2.0, 2.0, 1.0]]


def test_two_optimizers_are_each_followed_however_often_they_step():
    def rank(own: int) -> list[float]:
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0)) for param in params]
        for number in [(0, 1), (0, 1, 0, 0, 1)][own]:
            optimizers[number].zero_grad()
            params[number].sum().backward()
            optimizers[number].step()
        hvd.join()
        return [param[0].item() for param in params]

    assert run_worlds(2, rank)[1] == [-2.0, -1.5]


def test_gradients_that_are_on_their_way_when_a_rank_joins_count():
    def rank(own: int) -> float:
        param = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        param.sum().backward()
        if own == 1:
            optimizer.step()
        hvd.join()
        return param[0].item()

    assert run_worlds(2, rank) == [0.0, -1.0]


@pytest.mark.parametrize("average", ["all", "active"])
def test_sparse_gradients_and_frozen_layers_are_followed_too(average):
    def rank(own: int) -> list[float]:
        table = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(table.weight)
        frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*table.parameters(), frozen], lr=1.0))
        for step in range(2 + 2 * own):
            optimizer.zero_grad()
            frozen.requires_grad_(step > 2)
            (table(torch.tensor([1])).sum() + frozen.sum()).backward()
            optimizer.step()
        hvd.join(average=average)
        return [table.weight[1, 0].item(), frozen[0].item()]

    share = 0.5 if average == "all" else 1.0
    assert run_worlds(2, rank) == [[-2.0, 0.0], [-2.0 - 2 * share, -share]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hvd.allgather(torch.ones(2)), "Allgather is not supported with Join at this time."),
        (lambda: hvd.broadcast(torch.ones(2), 0), "Broadcast is not supported with Join at this time."),
        (lambda: hvd.alltoall(torch.ones(2)), "Alltoall is not supported with Join at this time."),
        (lambda: hvd.reducescatter(torch.ones(2)), "Reducescatter is not supported with Join at this time."),
        (lambda: hvd.broadcast_parameters([torch.ones(2)]), "broadcast_parameters is not supported with Join"),
    ],
)
def test_other_collectives_raise_where_they_are_called_and_the_join_goes_on(call, words):
    def rank(own: int) -> int:
        if own == 1:
            with pytest.raises(hvd.CommunicationError, match=words.replace("(", r"\(")):
                call()
        return hvd.join()

    # Rank 0 has joined, or joins while rank 1 waits.
    assert run_worlds(2, rank) == [1, 1]


def test_ranks_that_join_to_different_averages_all_get_an_error():
    outcomes = attempt_worlds(3, lambda own: hvd.join(average="active" if own == 1 else "all"))
    assert any(isinstance(outcome, hvd.MismatchError) for outcome in outcomes)
    assert all(isinstance(outcome, hvd.CommunicationError | hvd.MismatchError) for outcome in outcomes)


def test_who_has_joined_learns_that_another_rank_has_ended():
    first, _ = attempt_worlds(2, lambda own: hvd.join() if own == 0 else None)
    with pytest.raises(hvd.CommunicationError, match=r"rank 1 \(node1\) has ended"):
        raise first


def test_arguments_that_mean_nothing_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="average='mean'"):
        run_worlds(1, lambda own: hvd.join(average="mean"))
    with pytest.raises(TypeError, match="join: device='cuda' is not the number of a GPU"):
        run_worlds(1, lambda own: hvd.join(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="join: device=2 is none of"):
        run_worlds(1, lambda own: hvd.join(device=2))


# -- optimizers that come and go: what the garbage collector has taken differs by rank


def wrap(value: torch.Tensor, **options) -> tuple[nn.Parameter, hvd.DistributedOptimizer]:
    param = nn.Parameter(value)
    return param, hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("w", param)], **options)


def take_steps(param: nn.Parameter, optimizer: hvd.DistributedOptimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        param.sum().backward()
        optimizer.step()


OPTIONS = [{}, {"op": hvd.Adasum}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("size", "keepers"), [(2, {0}), (2, {1}), (3, {0, 1}), (4, {3}), (1, {0})])
def test_an_optimizer_that_only_some_ranks_still_have_is_not_waited_for(size, keepers, options):
    def rank(own: int) -> tuple[int, float]:
        kept = [wrap(torch.zeros(2), **options) for _ in range(2)]
        for each in kept:
            take_steps(*each, 1)
        if own not in keepers:
            kept.clear()
        param, optimizer = wrap(torch.zeros(2), **options)
        take_steps(param, optimizer, own + 1)
        return hvd.join(average="active"), param[0].item()

    outcomes = run_worlds(size, rank)
    assert [last for last, _ in outcomes] == [size - 1] * size
    if not options:
        assert [value for _, value in outcomes] == [-1.0 - own for own in range(size)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", ["del", "close"])
def test_an_optimizer_that_goes_while_others_sit_out_its_steps_still_takes_the_last_one(how, options):
    stepped = threading.Barrier(2)

    def rank(own: int) -> int:
        param, optimizer = wrap(torch.zeros(2), **options)
        take_steps(param, optimizer, 1)
        if own == 1:
            # Rank 0 takes part: it has joined, and both ranks have pinned the optimizer.
            stepped.wait()
            take_steps(param, optimizer, 1)
            if how == "close":
                optimizer.close()
            del optimizer
            gc.collect()
            deferred_close.wait_until_closed()
            return hvd.join()
        stepped.wait()
        return hvd.join()

    assert run_worlds(2, rank) == [1, 1]


def test_gradients_on_their_way_in_an_optimizer_that_is_closed_meanwhile_bring_the_join_to_its_end():
    def rank(own: int) -> int:
        param, optimizer = wrap(torch.zeros(2))
        if own == 1:
            take_steps(param, optimizer, 1)
            param.sum().backward()
            optimizer.close()
        return hvd.join()

    assert run_worlds(2, rank) == [1, 1]


def test_a_join_that_is_over_keeps_no_optimizer_also_where_it_has_failed(monkeypatch):
    failed, looked = threading.Barrier(3), threading.Barrier(3)
    pin, has_failed = Reducers.pin, threading.Event()

    def pin_late(reducers: Reducers) -> dict[int, SitsOut]:
        if threading.current_thread().name == "hvdlite-listener":
            has_failed.wait()
        return pin(reducers)

    monkeypatch.setattr(Reducers, "pin", pin_late)

    def rank(own: int) -> tuple[list[int], bool]:
        param, optimizer = wrap(torch.zeros(2))
        reducer = optimizer._reducer
        # Rank 2 comes to its first step only after the join has ended, and the others wait for that.
        reducer.connect()
        if own < 2:
            # The ranks that are asked for their live optimizers, rank 2 among them, answer when the join has ended.
            with pytest.raises(hvd.MismatchError):
                hvd.join(average=("active", "all")[own])
            has_failed.set()
        failed.wait()
        # What rank 2 was told before is done by then.
        hvd.barrier()
        pins = [reducer.engine._pins]
        looked.wait()
        for _ in range(2):
            take_steps(param, optimizer, own)
            hvd.join()
            pins.append(reducer.engine._pins)
            looked.wait()
        optimizer.close()
        return pins, reducer.engine.group is None

    assert run_worlds(3, rank) == [([0, 0, 0], True)] * 3


def test_after_a_join_that_failed_while_a_step_was_sat_out_the_optimizer_says_so(monkeypatch):
    sitting = threading.Event()
    sit_out = Reducer.sit_out

    def sit_out_and_tell(reducer: Reducer, average_of_active: bool) -> bool:
        sitting.set()
        return sit_out(reducer, average_of_active)

    monkeypatch.setattr(Reducer, "sit_out", sit_out_and_tell)

    def rank(own: int) -> str:
        _, optimizer = wrap(torch.zeros(2))
        # Rank 0's join waits for that.
        optimizer._reducer.connect()
        if own == 1:
            sitting.wait()
        with pytest.raises(hvd.MismatchError):
            hvd.join(average=("active", "all")[own])
        if own == 1:
            return ""
        with pytest.raises(hvd.GradientError) as error:
            optimizer.step()
        return str(error.value)

    told, _ = run_worlds(2, rank)
    assert told.startswith("this DistributedOptimizer can take no more steps: this rank, which had joined, ")


def test_ranks_of_a_process_set_that_have_not_joined_make_optimizers_meanwhile():
    made = threading.Barrier(3)

    def rank(own: int) -> float:
        process_set = hvd.add_process_set([0, 1])
        if own == 2:
            everyone = wrap(torch.zeros(2))
            made.wait()
            assert hvd.join() == 1
            return everyone[0][0].item()
        everyone = wrap(torch.zeros(2))
        made.wait()
        # Rank 2 contributes zeros to a step: it has joined.
        take_steps(*everyone, 1)
        param, optimizer = wrap(torch.zeros(2), process_set=process_set)
        earlier = wrap(torch.zeros(2), process_set=process_set) if own else None
        if own == 0:
            wrap(torch.zeros(2), process_set=process_set)
        take_steps(param, optimizer, 1 + own)
        assert hvd.join() == 1
        del earlier
        return param[0].item()

    assert run_worlds(3, rank) == [-1.0, -1.5, 0.0]


def test_an_optimizer_is_known_to_the_others_before_any_of_them_is_through_with_making_it(monkeypatch):
    # The last moment at which a rank can be asked while it makes an optimizer: its engine is open.
    joined = threading.Event()
    asked = threading.Event()
    duplicate, pin = Group.duplicate, Reducers.pin

    def duplicate_slowly(group: Group) -> Group:
        made = duplicate(group)
        if group.rank == 1 and joined.is_set():
            asked.wait()
        return made

    def pin_and_tell(reducers: Reducers) -> dict:
        pinned = pin(reducers)
        if joined.is_set():
            asked.set()
        return pinned

    def rank(own: int) -> tuple[int, float]:
        hvd.barrier()
        if own == 0:
            joined.set()
        else:
            joined.wait()
        hvd.barrier()
        param, optimizer = wrap(torch.zeros(2))
        take_steps(param, optimizer, own)
        return hvd.join(), param[0].item()

    monkeypatch.setattr(Group, "duplicate", duplicate_slowly)
    monkeypatch.setattr(Reducers, "pin", pin_and_tell)
    assert run_worlds(2, rank) == [(1, 0.0), (1, -0.5)]


def test_two_threads_that_make_optimizers_at_once_are_an_error_that_names_both(monkeypatch):
    inside, refused, this_thread = threading.Event(), threading.Event(), threading.local()
    take_number = Reducers.take_number

    def take_number_slowly(reducers: Reducers, *arguments) -> int:
        if this_thread.rank == 0:
            inside.set()
            refused.wait()
        return take_number(reducers, *arguments)

    monkeypatch.setattr(Reducers, "take_number", take_number_slowly)

    def rank(own: int) -> str:
        told = []
        this_thread.rank = own

        def second() -> None:
            inside.wait()
            with pytest.raises(RuntimeError) as error:
                wrap(torch.zeros(1))
            told.append(str(error.value))
            refused.set()

        thread = world_module._world.starts(second, "the second")
        if own == 0:
            thread.start()
        wrap(torch.zeros(2))
        if own == 0:
            thread.join()
        return "".join(told)

    told, _ = run_worlds(2, rank)
    assert told.startswith("hvd.DistributedOptimizer: called by thread 'the second' while thread '")
