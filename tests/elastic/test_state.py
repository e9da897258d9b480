"""States of elastic programs: what is saved, restored, made equal on all ranks, and told of hosts."""

from __future__ import annotations

import threading

import pytest
import torch
from worlds import attempt_worlds, run_generations, run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.elastic import HostsUpdatedInterrupt, HostUpdates, ObjectState, State, TorchState, torch_state
from hvdlite.runtime.world import current_world


def alone(**attributes):
    return ObjectState(lambda value: value, lambda: 0, **attributes)


def test_restoring_goes_back_to_what_was_saved_last():
    state = alone(epoch=0, seen=[])
    state.epoch = 3
    state.seen.append("a")
    state.save()
    state.epoch = 4
    state.seen.append("b")
    state.restore()
    assert (state.epoch, state.seen) == (3, ["a"])


def test_a_list_that_is_changed_after_it_was_restored_can_be_restored_again():
    state = alone(seen=[])
    for _ in range(2):
        state.seen.append("a")
        state.restore()
        assert state.seen == []


def test_ranks_get_what_rank_0_has_now_and_not_what_it_has_saved():
    def attributes(rank):
        state = TorchState(batch=0)
        state.batch = 10 + rank
        state.sync()
        state.batch = -1
        state.restore()
        return state.batch

    assert run_worlds(3, attributes) == [10, 10, 10]


def test_an_attribute_that_was_never_given_is_warned_of_once_and_kept(caplog):
    state = alone(epoch=0)
    state.best = 1
    state.best = 2
    state.restore()
    assert state.best == 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "ObjectState.best" in warning
    assert "best=..." in warning


def test_attributes_that_begin_with_an_underscore_are_the_programs_own(caplog):
    state = alone(epoch=0)
    state._own = 1
    assert caplog.records == []


def test_what_cannot_be_copied_is_an_error_that_names_the_attribute_where_it_is_given():
    with pytest.raises(TypeError, match=r"ObjectState\(lock=\.\.\.\) cannot be saved.*make the rest anew"):
        alone(lock=threading.Lock())


def test_what_cannot_be_pickled_is_an_error_on_every_rank():
    def sync(rank):
        state = TorchState(lock=None)
        if rank == 0:
            state.lock = threading.Lock()
        with pytest.raises(TypeError, match=r"TorchState\(.*lock\): an attribute cannot be sent"):
            state.sync()
        return True

    assert len(run_worlds(2, sync)) == 2


@pytest.mark.parametrize(
    ("news", "skip_sync"),
    [
        ([HostUpdates.REMOVED], True),
        ([HostUpdates.ADDED], False),
        ([HostUpdates.REMOVED, HostUpdates.ADDED], False),
        ([HostUpdates.MIXED], False),
    ],
)
def test_what_rank_0_has_heard_of_hosts_interrupts_all_ranks(news, skip_sync):
    def check(rank):
        state = TorchState(epoch=0)
        state.check_host_updates()
        if rank == 0:
            for timestamp, update in enumerate(news, 1):
                state.on_hosts_updated(timestamp, update)
        with pytest.raises(HostsUpdatedInterrupt) as raised:
            state.commit()
        state.check_host_updates()
        return raised.value.skip_sync

    assert run_worlds(2, check) == [skip_sync, skip_sync]


def test_what_only_another_rank_has_heard_counts_for_nothing():
    def check(rank):
        state = TorchState(epoch=0)
        if rank == 1:
            state.on_hosts_updated(1, HostUpdates.ADDED)
        state.commit()

    run_worlds(2, check)


def test_a_commit_that_is_interrupted_has_saved():
    state = alone(epoch=0)
    state.epoch = 5
    state.on_hosts_updated(1, HostUpdates.ADDED)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.epoch = 6
    state.restore()
    assert state.epoch == 5


def test_a_reset_calls_back_in_order():
    called = []

    class Own(State):
        def __init__(self):
            super().__init__(lambda value: value, lambda: 0)

        def reset(self):
            called.append("reset")

    state = Own()
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.on_reset()
    assert called == ["reset", 1, 2]


def test_news_that_are_forgotten_interrupt_nobody():
    state = ObjectState(lambda value: value, lambda: 0)
    state.on_hosts_updated(1, HostUpdates.ADDED)
    state.forget_news()
    state.check_host_updates()


def trained(rank):
    """A model, an optimizer with state and a scheduler, other on each rank."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(rank + 1):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def content(model, optimizer, scheduler):
    momenta = [each["momentum_buffer"] for each in optimizer.state.values()]
    tensors = [*model.state_dict().values(), *momenta]
    return [tensor.tolist() for tensor in tensors], optimizer.param_groups[0]["lr"], scheduler.last_epoch


def test_models_optimizers_and_schedulers_become_those_of_rank_0_and_stay_the_same_objects():
    def sync(rank):
        objects = trained(rank)
        state = TorchState(*objects[:2], scheduler=objects[2])
        state.sync()
        assert (state.model, state.optimizer, state.scheduler) == objects
        return content(*objects)

    first, *others = run_worlds(3, sync)
    assert others == [first, first]


def test_models_optimizers_and_schedulers_are_restored_as_often_as_one_likes():
    objects = trained(0)
    state = TorchState(*objects[:2], scheduler=objects[2])
    saved = content(*objects)
    for _ in range(2):
        objects[0](torch.randn(4, 3)).square().mean().backward()
        objects[1].step()
        objects[2].step()
        assert content(*objects) != saved
        state.restore()
        assert content(*objects) == saved


def test_a_rank_that_is_lost_while_states_are_made_equal_leaves_the_last_commit_whole(monkeypatch):
    model, optimizer, scheduler = trained(0)
    state = TorchState(model, optimizer, scheduler=scheduler, batch=1)
    saved = content(model, optimizer, scheduler)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    state.batch = 2

    def lose(self, *args):
        raise hvd.PeerLostError("rank 1 is lost")

    monkeypatch.setattr(Group, "agree", lose)  # the last that ranks do together
    hvd.init()
    with pytest.raises(hvd.PeerLostError):
        state.sync()
    hvd.shutdown()
    state.restore()
    assert (state.batch, content(model, optimizer, scheduler)) == (1, saved)


def test_no_rank_commits_parameters_on_gpus_that_a_step_which_failed_on_one_has_left(monkeypatch):
    # As on GPUs, where a wait for a lost rank ends by an abort, and the optimizer uses what that leaves.
    monkeypatch.setattr(torch_state, "_has_gpu_parameters", lambda handlers: True)

    def commits(rank):
        state = TorchState(torch.nn.Linear(1, 1), batch=1)
        state.commit()
        if rank == 1:

            def fail(what):
                raise hvd.PeerLostError(f"{what}: aborted")

            monkeypatch.setattr(current_world().group, "require_ended", fail)
        state.batch = 2
        try:
            state.commit()
        finally:
            state.restore()
            restored.append(state.batch)

    restored: list[int] = []
    for outcome in attempt_worlds(2, commits):
        assert isinstance(outcome, hvd.CommunicationError)
    assert restored == [1, 1]


def test_what_some_ranks_alone_have_trained_is_sent_to_those_with_the_same_commit_too():
    def weight(rank):
        model = torch.nn.Linear(2, 1)
        some = hvd.add_process_set([0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=some)
        state = TorchState(model, optimizer)
        state.sync()
        if some.included():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        state.commit()
        state.restore()
        state.sync()
        return model.weight.tolist()

    first, second = run_worlds(2, weight)
    assert first == second


def test_a_wrapped_optimizer_is_handled_like_a_plain_one():
    def sync(rank):
        model, optimizer, scheduler = trained(rank)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        state = TorchState(model, wrapped, scheduler=scheduler)
        state.sync()
        return content(model, wrapped, scheduler)

    first, second = run_worlds(2, sync)
    assert first == second


def test_gradients_since_the_last_commit_go_with_it():
    def rank(generations):
        state = None
        for number in generations:
            if state is None:
                param = torch.nn.Parameter(torch.zeros(2))
                state = TorchState(optimizer=hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0)))
            if number == 0 and hvd.rank() == 1:
                # Then, before its step, it hears that a rank is lost.
                param.sum().backward()
            if number == 0:
                state.restore()
            else:
                state.on_reset()
                state.sync()
                (param * float(hvd.rank())).sum().backward()
                state.optimizer.step()
        return param.tolist()

    assert run_generations([2, 2], rank) == [[-0.5, -0.5]] * 2


def test_an_optimizers_process_set_may_be_added_again_in_a_reset_callback():
    def rank(generations):
        state, few = None, hvd.ProcessSet([0, 1])
        for number in generations:
            if state is None:
                hvd.add_process_set(few)
                param = torch.nn.Parameter(torch.zeros(2))
                sgd = torch.optim.SGD([param], lr=1.0)
                state = TorchState(optimizer=hvd.DistributedOptimizer(sgd, process_set=few))
                state.register_reset_callbacks([lambda: hvd.add_process_set(few)])
            if number == 0:
                param.sum().backward()
                state.restore()
            else:
                state.on_reset()
                assert param.grad is None
                (param * float(hvd.rank())).sum().backward()
                if hvd.rank() < 2:
                    state.optimizer.step()
        return param.tolist()

    assert run_generations([3, 3], rank)[:2] == [[-0.5, -0.5]] * 2


def test_another_object_that_is_assigned_is_handled_from_then_on():
    state = TorchState(model=torch.nn.Linear(2, 2), optimizer=None)
    other = torch.nn.Linear(2, 2)
    weight = other.weight.tolist()
    state.model = other
    torch.nn.init.zeros_(other.weight)
    state.restore()
    assert other.weight.tolist() == weight


@pytest.mark.parametrize("form", ["bare", "wrapped"])
def test_a_tensor_that_the_program_holds_is_the_optimizers_and_the_states_after_restore_and_sync(form):
    def program(worlds):
        param, rate = torch.nn.Parameter(torch.ones(2)), torch.tensor(0.1)
        inner = torch.optim.Adam([param], lr=rate)
        group = inner.param_groups[0]
        data = torch.zeros(2)
        state = None
        for _ in worlds:
            if state is None:
                optimizer = hvd.DistributedOptimizer(inner) if form == "wrapped" else inner
                state = TorchState(optimizer=optimizer, rate=rate)
            else:
                rate.fill_(5)
                state.restore()
            state.sync()
            param.grad = torch.ones(2)
            inner.step()
            counted = inner.state[param]["step"]
            state.commit()
            rate.mul_(0.5)
            group["weight_decay"] = 0.5
            state.restore()
            assert inner.state[param]["step"] is counted
            assert inner.param_groups == [group]
            assert group["lr"] is state.rate is rate
            assert (rate.item(), group["weight_decay"]) == (pytest.approx(0.1), 0)
        # What was assigned later may be a part of the program's data, and is not overwritten.
        state.rate = data[0]
        state.restore()
        assert data.tolist() == [0, 0]
        return state.rate.item()

    # The third rank is new in the second world, and the others go back to their commit.
    assert run_generations([2, 3], program) == [pytest.approx(0.1)] * 3
