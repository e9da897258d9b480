"""``master=True``: parameters of half precision are updated in float32 by the rank that has them, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import attempt_ranks, run_ranks, set_of
from torch import Tensor, nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    # Its steps are lost in half precision.
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-4),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}
SHAPES = [(33, 70), (5, 70), (40, 3)]


def model_of(dtype: torch.dtype) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(*shape, generator=generator).to(dtype) for shape in SHAPES]
    # One parameter of float32, as those of norms often are.
    return nn.ParameterList([*params, torch.randn(8, 6, generator=generator)])


def gradients(step: int) -> list[Tensor]:
    """Gradients whose average is exact, whatever the number of ranks that all have them."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(-4, 5, shape, generator=generator).float() for shape in [*SHAPES, (8, 6)]]


def backward(model: nn.ParameterList, step: int) -> None:
    torch.stack(
        [(param * grad.to(param.dtype)).sum() for param, grad in zip(model, gradients(step), strict=True)]
    ).sum().backward()


class Truth:
    """One process with a float32 copy of all parameters, which the others are rounded from."""

    def __init__(self, make: Make, dtype: torch.dtype) -> None:
        self.model = model_of(dtype)
        self.masters = [nn.Parameter(param.detach().float()) for param in self.model]
        self.optimizer = make(self.masters)

    def step(self, number: int, max_norm: float | None = None) -> None:
        for master, grad in zip(self.masters, gradients(number), strict=True):
            master.grad = grad
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model, self.masters, strict=True):
                param.copy_(master)


def wrapped(group: Group, make: Make, model: nn.ParameterList, **options: Any) -> hvd.DistributedOptimizer:
    options = {"shard": "world", "master": True} | options
    return hvd.DistributedOptimizer(make(list(model)), process_set=set_of(group), bucket_cap_mb=0.003, **options)


def take_step(model: nn.ParameterList, optimizer: hvd.DistributedOptimizer, number: int) -> None:
    optimizer.zero_grad()
    backward(model, number)
    optimizer.step()


def assert_equal(model: nn.ParameterList, truth: nn.ParameterList) -> None:
    for param, expected in zip(model, truth, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.slow(but=12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_one_process_that_has_a_float32_copy_of_them(name, size, dtype):
    def train(group: Group) -> list[int]:
        model, truth = model_of(dtype), Truth(OPTIMIZERS[name], dtype)
        optimizer = wrapped(group, OPTIMIZERS[name], model)
        for number in range(4):
            take_step(model, optimizer, number)
            truth.step(number)
            assert_equal(model, truth.model)
        dtypes = {v.dtype for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)}
        assert dtypes <= {torch.float32}
        return [param.data_ptr() for param in model]

    run_ranks(size, train, engine="shared memory")


@pytest.mark.parametrize("shard", ["world", "host"])
def test_ranks_of_several_hosts_have_the_same_parameters(shard):
    def train(group: Group) -> None:
        model, truth = model_of(torch.bfloat16), Truth(torch.optim.AdamW, torch.bfloat16)
        optimizer = wrapped(group, torch.optim.AdamW, model, shard=shard)
        for number in range(3):
            take_step(model, optimizer, number)
            truth.step(number)
            assert_equal(model, truth.model)

    for outcome in attempt_ranks(4, train, hosts="aabb"):
        assert outcome is None, outcome


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Muon"])
def test_a_checkpoint_has_the_masters_and_any_number_of_ranks_goes_on_from_it(name):
    truth = Truth(OPTIMIZERS[name], torch.bfloat16)
    for number in range(6):
        truth.step(number)

    def save(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        model = model_of(torch.bfloat16)
        optimizer = wrapped(group, OPTIMIZERS[name], model)
        for number in range(3):
            take_step(model, optimizer, number)
        optimizer.consolidate_state_dict()
        return model.state_dict(), copy.deepcopy(optimizer.state_dict())

    def load(group: Group, saved: tuple[dict[str, Any], dict[str, Any]], shard: str) -> None:
        model = model_of(torch.bfloat16)
        optimizer = wrapped(group, OPTIMIZERS[name], model, shard=shard)
        before = copy.deepcopy(saved[1])
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        for number in range(3, 6):
            take_step(model, optimizer, number)
        assert_equal(model, truth.model)
        for key, state in before["state"].items():
            assert all(
                torch.equal(torch.as_tensor(saved[1]["state"][key][each]), torch.as_tensor(state[each]))
                for each in state
            )

    for saving in (1, 3):
        saved = run_ranks(saving, save, engine="shared memory")[0]
        assert saved[1]["state"][0]["master"].dtype == torch.float32
        assert "master" not in saved[1]["state"].get(3, {}), "it is in float32 already"
        for loading in (1, 2):
            for shard in ("world", "host"):
                run_ranks(
                    loading, lambda group, saved=saved, shard=shard: load(group, saved, shard), engine="shared memory"
                )


def test_each_rank_goes_on_from_the_part_that_it_has_saved_itself():
    truth = Truth(OPTIMIZERS["SGD"], torch.bfloat16)
    for number in range(4):
        truth.step(number)

    def train(group: Group) -> None:
        model = model_of(torch.bfloat16)
        optimizer = wrapped(group, OPTIMIZERS["SGD"], model)
        for number in range(2):
            take_step(model, optimizer, number)
        saved = copy.deepcopy(optimizer.state_dict())
        other = model_of(torch.bfloat16)
        later = wrapped(group, OPTIMIZERS["SGD"], other)
        later.load_state_dict(saved)
        other.load_state_dict(model.state_dict())
        for number in range(2, 4):
            take_step(other, later, number)
        assert_equal(other, truth.model)

    run_ranks(2, train, engine="shared memory")


@pytest.mark.parametrize("size", [1, 2])
def test_masters_follow_parameters_that_the_program_writes_itself(size):
    def train(group: Group) -> None:
        model, truth = model_of(torch.bfloat16), Truth(torch.optim.AdamW, torch.bfloat16)
        optimizer = wrapped(group, torch.optim.AdamW, model)
        for number in range(2):
            take_step(model, optimizer, number)
            truth.step(number)
        with torch.no_grad():
            for param, expected, master in zip(model, truth.model, truth.masters, strict=True):
                # Half of the elements are other ones, which PyTorch does not count as a change.
                param.data.view(-1)[::2] += 1
                expected.view(-1)[::2] += 1
                master.view(-1)[::2] = expected.view(-1)[::2].float()
        for number in range(2, 4):
            take_step(model, optimizer, number)
            truth.step(number)
            assert_equal(model, truth.model)

    run_ranks(size, train, engine="shared memory")


def test_parameters_that_come_and_other_buckets_keep_the_masters():
    def train(group: Group) -> None:
        model, truth = model_of(torch.bfloat16), Truth(OPTIMIZERS["SGD"], torch.bfloat16)
        optimizer = wrapped(group, OPTIMIZERS["SGD"], model)
        for number in range(2):
            take_step(model, optimizer, number)
            truth.step(number)
        late = nn.Parameter(torch.ones(50, 9, dtype=torch.bfloat16))
        optimizer.add_param_group({"params": [late]})
        for number in range(2, 4):
            optimizer.zero_grad()
            backward(model, number)
            (late * 2).sum().backward()
            optimizer.step()
            truth.step(number)
            assert_equal(model, truth.model)

    run_ranks(2, train, engine="shared memory")


def test_gradients_are_clipped_in_float32():
    def train(group: Group) -> None:
        model, truth = model_of(torch.bfloat16), Truth(OPTIMIZERS["SGD momentum"], torch.bfloat16)
        optimizer = wrapped(group, OPTIMIZERS["SGD momentum"], model, max_norm=1.0)
        take_step(model, optimizer, 0)
        truth.step(0, max_norm=1.0)
        assert optimizer.grad_norm.dtype == torch.float32
        for param, expected in zip(model, truth.model, strict=True):
            torch.testing.assert_close(param, expected)

    run_ranks(2, train, engine="shared memory")


def test_an_elastic_state_goes_back_to_the_masters_of_its_commit():
    def train(rank: int) -> None:
        model, truth = model_of(torch.bfloat16), Truth(OPTIMIZERS["SGD"], torch.bfloat16)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](list(model)), shard="world", master=True)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
        for number in range(2):
            take_step(model, optimizer, number)
            truth.step(number)
        state.commit()
        take_step(model, optimizer, 7)
        state.restore()
        for number in range(2, 4):
            take_step(model, optimizer, number)
            truth.step(number)
            assert_equal(model, truth.model)

    run_worlds(2, train)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": None}, "master=True works with shard= alone"),
        ({"master": 1}, "master=1 is neither True nor False"),
        ({"dtype": torch.float32}, "no parameter of float16 or bfloat16"),
    ],
)
def test_what_cannot_have_masters_is_refused(options, said):
    def train(group: Group) -> None:
        model = model_of(options.get("dtype", torch.bfloat16))
        with pytest.raises(ValueError, match=said):
            wrapped(group, torch.optim.AdamW, model, **{key: options[key] for key in options if key != "dtype"})

    run_ranks(1, train)


def test_ranks_of_which_one_alone_has_masters_are_told():
    def train(group: Group) -> None:
        model = model_of(torch.bfloat16)
        take_step(model, wrapped(group, torch.optim.AdamW, model, master=group.rank == 1), 0)

    for outcome in attempt_ranks(2, train):
        assert "with masters" in str(outcome)


def test_a_parameter_that_was_not_updated_has_no_state_in_a_checkpoint_as_without_masters():
    def train(group: Group) -> None:
        model = model_of(torch.bfloat16)
        optimizer = wrapped(group, torch.optim.AdamW, model)
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=None)
        state = optimizer.state_dict()
        assert state["state"].keys() == {0}
        plain = torch.optim.AdamW(list(model))
        plain.load_state_dict(copy.deepcopy(state))
        backward(model, 0)
        plain.step()

    for size in (1, 2):
        run_ranks(size, train, engine="shared memory")


def test_a_world_that_is_entered_again_finds_the_state_of_its_one_rank():
    model, truth = model_of(torch.bfloat16), Truth(OPTIMIZERS["SGD momentum"], torch.bfloat16)
    hvd.init()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD momentum"](list(model)), shard="world", master=True)
    for number in range(4):
        if number == 2:
            hvd.shutdown()
            hvd.init()
        take_step(model, optimizer, number)
        truth.step(number)
        assert_equal(model, truth.model)
