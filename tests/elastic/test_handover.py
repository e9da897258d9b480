"""What ranks that join get from rank 0, and what those that have the same state already do not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from worlds import attempt_worlds, run_generations, run_worlds

import hvdlite as hvd
from hvdlite.elastic import ElasticSampler, TorchState
from hvdlite.elastic.state import SAVED

ENGINES = ["gloo", "shared memory"]


def network(seed: int, inputs: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def trained(seed: int, steps: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        model(torch.randn(5, 4).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def content(state: TorchState) -> list[Any]:
    moments = [[each["step"].item(), each["exp_avg"].tolist()] for each in state.optimizer.state.values()]
    return [[each.tolist() for each in state.model.parameters()], moments]


def buffers(state: TorchState) -> list[Any]:
    return [each.tolist() for each in state.model.buffers()]


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_go_only_to_ranks_that_are_at_another_commit(engine):
    def rank(own: int) -> Any:
        model, optimizer = trained(own)
        state = TorchState(model, optimizer, epoch=own, seen=Counted(own))
        # Ranks 0 and 1 come from the same commit. That their parameters differ shows whether they were sent.
        state._saves, state._here = [(7, [SAVED, 7]), (7, [SAVED, 7]), (6, [SAVED, 6]), (None, None)][own]
        before = content(state)
        state.sync()
        optimizer.zero_grad()
        return content(state), before, buffers(state), state.epoch, state._saves, optimizer.param_groups[0]["lr"]

    first, second, third, fourth = run_worlds(4, rank, engine=engine)
    assert second[0] == second[1] != first[0]
    assert third[0] == fourth[0] == first[0] == first[1]
    # What may differ by rank, and is small, is made equal on all.
    assert first[2:] == second[2:] == third[2:] == fourth[2:]


class Counted:
    """An object of the program's own."""

    def __init__(self, count: int) -> None:
        self.count = count


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_have_left_at_the_same_point_need_nothing_and_save(engine):
    def rank(own: int) -> Any:
        model, optimizer = trained(own)
        state = TorchState(model, optimizer)
        state._saves = 3 if own < 2 else None
        state._note_kept(5)
        before = content(state)
        state.sync()
        with torch.no_grad():
            model[0].weight.zero_()
        state.restore()
        return content(state), before

    first, second, third = run_worlds(3, rank, engine=engine)
    assert second[0] == second[1] != first[0]
    assert third[0] == first[0] == first[1]


def test_after_their_first_commit_all_ranks_count_alike():
    def rank(generations: Any) -> Any:
        state, counts = None, []
        for _ in generations:
            state = state or TorchState(*trained(hvd.rank()))
            state.sync()
            state.commit()
            counts.append(state._saves)
            state._note_saved()
        return counts

    first, second, third = run_generations([2, 2, 3], rank)
    assert first == second
    assert third == first[2:]


def test_a_rank_that_has_lost_others_before_it_had_the_state_has_none_to_go_back_to():
    state = TorchState(*trained(0))
    state.restore()
    assert state._here is None


OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}


class Training:
    """What a program makes once, and a step of it."""

    def __init__(self, make: Any, seed: int) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        # Ranks are threads, which share torch's own generator.
        generator = torch.Generator().manual_seed(seed)
        for param in self.model.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 2, 5], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def step(self, number: int, rows: slice, optimizer: torch.optim.Optimizer) -> None:
        inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        optimizer.zero_grad()
        loss = (self.model(inputs[rows]) - inputs[rows].sum(1, keepdim=True)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.scheduler.step()

    def parameters(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_with_a_new_rank_as_in_one_process_on_the_whole_batches(make, engine, caplog):
    caplog.set_level(logging.INFO, "hvdlite")

    def rank(generations: Any) -> Any:
        state, training = None, None
        for number in generations:
            if state is None:
                training = Training(make, 0 if number == 0 and hvd.rank() == 0 else hvd.rank() + 5)
                wrapped = hvd.DistributedOptimizer(training.optimizer, training.model.named_parameters())
                sampler = ElasticSampler(range(96), shuffle=False)
                state = TorchState(
                    training.model,
                    wrapped,
                    scheduler=training.scheduler,
                    scaler=training.scaler,
                    sampler=sampler,
                    step=0,
                    by_class={3: (0.1, None)},
                )
            state.on_reset()
            state.sync()
            state._here = None
            share = 12 // hvd.size()
            for _ in range(4):
                training.step(state.step, slice(hvd.rank() * share, (hvd.rank() + 1) * share), wrapped)
                state.sampler.record_batch(0, share)
                state.step += 1
            state.save()
            state._note_saved()
        left = sorted(state.sampler.remaining_indices)
        return training.parameters(), training.scaler.get_scale(), training.scheduler.state_dict(), state, left

    outcomes = run_generations([2, 3], rank, engine=engine)
    alone = Training(make, 0)
    for number in range(8):
        alone.step(number, slice(0, 12), alone.optimizer)
    for parameters, scale, schedule, state, left in outcomes:
        assert torch.equal(parameters, outcomes[0][0])
        assert torch.allclose(parameters, alone.parameters(), rtol=0, atol=1e-12)
        assert scale == alone.scaler.get_scale() == 32.0
        assert schedule == alone.scheduler.state_dict()
        assert type(schedule["milestones"]) is type(alone.scheduler.milestones)
        assert (state.step, state.by_class, left) == (8, {3: (0.1, None)}, list(range(48, 96)))
    assert "pickle" not in caplog.text


def test_an_object_of_the_programs_own_is_pickled_and_rank_0_says_so(caplog):
    caplog.set_level(logging.INFO, "hvdlite")

    def rank(own: int) -> int:
        state = TorchState(seen=Counted(own + 3))
        state.sync()
        return state.seen.count

    assert run_worlds(2, rank) == [3, 3]
    (line,) = [each for each in caplog.messages if "pickles" in each]
    assert "TorchState(model, optimizer, seen): seen (Counted)" in line


def test_another_model_is_an_error_on_every_rank_that_names_its_first_tensor():
    def rank(own: int) -> None:
        TorchState(model=network(0, inputs=5 if own == 2 else 4)).sync()

    for outcome in attempt_worlds(3, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "'model.0.weight'" in str(outcome)


def test_another_optimizer_is_an_error_on_every_rank_that_names_it():
    def rank(own: int) -> None:
        make = torch.optim.SGD if own else torch.optim.Adam
        TorchState(optimizer=make(network(0).parameters(), lr=0.1)).sync()

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "TorchState(optimizer)" in str(outcome)


def test_what_a_module_keeps_beside_its_tensors_is_sent_too():
    class Keeps(nn.Linear):
        kept: Any = None

        def get_extra_state(self) -> Any:
            return self.kept

        def set_extra_state(self, state: Any) -> None:
            self.kept = state

    def rank(own: int) -> Any:
        model = Keeps(2, 2)
        model.kept = {"rank": (own, None)}
        TorchState(model=model).sync()
        return model.kept

    assert run_worlds(2, rank) == [{"rank": (0, None)}] * 2


def test_only_what_has_changed_since_the_commit_is_copied_again():
    def rank(own: int) -> Any:
        model, optimizer = trained(0)
        state = TorchState(model, optimizer)
        state.sync()
        state.commit()
        state._note_saved()
        handler = state._handlers["model"]
        before = {name: tensor.data_ptr() for name, tensor in handler._saved.items()}
        with torch.no_grad():
            model[2].weight.fill_(0.5)
        optimizer.param_groups[0]["lr"] = 0.75
        state.sync()
        after = {name: tensor.data_ptr() for name, tensor in handler._saved.items()}
        with torch.no_grad():
            model[2].weight.zero_()
        optimizer.param_groups[0]["lr"] = 0.5
        state.restore()
        assert model[2].weight.tolist() == [[0.5] * 3]
        assert optimizer.param_groups[0]["lr"] == 0.75
        return {name for name in before if before[name] != after[name]}

    # Buffers, which go to all, are written on the other ranks.
    first, second = run_worlds(2, rank)
    assert first == {"2.weight"}
    assert second == {"2.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
