"""Integer and boolean parameters beside others: they are broadcast, and all other functions leave them as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import take_steps
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd

WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]


class Quantized(nn.Module):
    """A table of integers of each kind before, between and after the trained parameters."""

    def __init__(self, value: int = 1, *, sparse: bool = False) -> None:
        super().__init__()
        self.codes = nn.ParameterList(
            nn.Parameter(torch.full((3,), value).to(dtype), requires_grad=False) for dtype in WHOLE
        )
        self.rows = nn.Embedding(4, 2, sparse=sparse)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.head = nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.tensor(value), requires_grad=False)
        nn.init.constant_(self.rows.weight, 0.5)
        nn.init.constant_(self.head.weight, 0.25)
        nn.init.zeros_(self.head.bias)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.rows(numbers) * self.mask * self.frozen) * self.scale

    def whole(self) -> list[nn.Parameter]:
        return [param for param in self.parameters() if param.dtype in WHOLE]


def trained(own: int, *, sparse: bool = False, passes: int = 1, steps: int = 3, **options: Any) -> list[Tensor]:
    model = Quantized(sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.pop("groups", None) is not None:
        options["groups"] = [list(model.parameters())[:4], model.whole()[5:]]
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes, **options)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(wrapped)
    for number in range(steps):
        wrapped.zero_grad()
        for _ in range(passes):
            model(torch.tensor([own, number % 2])).sum().backward()
        wrapped.step()
        assert all(param.grad is None for param in model.whole())
    return [param.detach().clone() for param in model.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lists of groups": {"groups": "lists"},
    "Adasum": {"op": hvd.Adasum},
    "Adasum, passes": {"op": hvd.Adasum, "passes": 2},
    "sum": {"op": hvd.Sum},
    "step on arrival": {"step_on_arrival": True},
    "passes": {"passes": 2},
    "autotune": {"autotune": True},
    "sparse": {"sparse": True},
    "sparse as dense": {"sparse": True, "sparse_as_dense": True},
    "a bucket for each": {"bucket_cap_mb": 1e-6},
    "half": {"compression": hvd.Compression.fp16},
    "predivided": {"gradient_predivide_factor": 2.0},
}


@pytest.mark.night(but=20)
@pytest.mark.slow(but=8)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("option", OPTIONS)
def test_they_stay_what_they_are_and_the_others_are_trained(option, size):
    outcomes = run_worlds(size, lambda own: trained(own, **copy.deepcopy(OPTIONS[option])))
    start = [param.detach() for param in Quantized().parameters()]
    for outcome in outcomes:
        for got, first, before in zip(outcome, outcomes[0], start, strict=True):
            assert got.dtype == before.dtype
            assert torch.equal(got, first)
            if got.dtype in WHOLE:
                assert torch.equal(got, before)
    assert any(not torch.equal(got, before) for got, before in zip(outcomes[0], start, strict=True))


@pytest.mark.parametrize("count", [1, 2, 30])
def test_a_number_of_groups_counts_what_there_is(count):
    def rank(own: int) -> list[Tensor]:
        model = Quantized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=count)
        model(torch.tensor([own])).sum().backward()
        wrapped.step()
        return [param.detach() for param in model.parameters()]

    first, second = run_worlds(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_in_a_process_set_too():
    def rank(own: int) -> list[Tensor]:
        pair = hvd.add_process_set([0, 2])
        return trained_in(own, pair)

    def trained_in(own: int, pair: hvd.ProcessSet) -> list[Tensor]:
        model = Quantized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=pair)
        model(torch.tensor([own % 4])).sum().backward()
        wrapped.step()
        hvd.barrier()
        return [param.detach() for param in model.parameters()]

    first, other, last = run_worlds(3, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_optimizer_of_nothing_else_steps():
    def rank(own: int) -> list[int]:
        param = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        for options in ({}, {"op": hvd.Adasum}, {"step_on_arrival": True}):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.1), **options)
            optimizer.step()
            optimizer.zero_grad()
        return param.tolist()

    assert run_worlds(2, rank) == [[1, 2], [1, 2]]


def test_a_group_of_them_can_be_added():
    def rank(own: int) -> list[float]:
        weight, code = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor([3]), requires_grad=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        optimizer.add_param_group({"params": [code]})
        (weight * (own + 1)).sum().backward()
        optimizer.step()
        return weight.tolist()

    assert run_worlds(2, rank) == [[-1.5, -1.5]] * 2


@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "list", "list of pairs"])
def test_they_are_broadcast_in_every_form(form):
    def rank(own: int) -> list[list[Any]]:
        model = Quantized(value=own + 2)
        forms = {
            "state_dict": model.state_dict(),
            "named_parameters": model.named_parameters(),
            "list": list(model.parameters()),
            "list of pairs": list(model.named_parameters()),
        }
        hvd.broadcast_parameters(forms[form], root_rank=1)
        return [param.tolist() for param in model.whole()]

    wanted = [param.tolist() for param in Quantized(value=3).whole()]
    assert run_worlds(3, rank) == [wanted] * 3


@pytest.mark.parametrize("wraps", [False, True])
def test_an_optimizers_state_for_them_is_broadcast(wraps):
    def rank(own: int) -> list[Any]:
        param = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
        optimizer = torch.optim.SGD([param, nn.Parameter(torch.ones(1))], lr=0.1)
        if own == 1:
            optimizer.state[param] = {"scale": torch.tensor(0.5), "zero": torch.tensor(3, dtype=torch.int32)}
        hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer) if wraps else optimizer, root_rank=1)
        return [(value.dtype, value.item()) for value in optimizer.state[param].values()]

    assert run_worlds(2, rank) == [[(torch.float32, 0.5), (torch.int32, 3)]] * 2


def test_ranks_that_differ_in_them_are_told():
    def rank(own: int) -> None:
        param = nn.Parameter(torch.zeros(2 + own, dtype=torch.int32), requires_grad=False)
        hvd.DistributedOptimizer(torch.optim.SGD([param, nn.Parameter(torch.ones(1))], lr=0.1)).step()

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "torch.int32" in str(outcome)


def test_ranks_that_have_joined_stand_in():
    def rank(own: int) -> list[Tensor]:
        model = Quantized()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        take_steps(wrapped, lambda _: model(torch.tensor([own])).sum(), range(own + 1))
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), last)
        return [param.detach() for param in model.parameters()]

    first, second = run_worlds(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
