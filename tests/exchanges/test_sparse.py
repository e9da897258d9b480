"""Sparse gradients of embeddings: gathered row by row, or averaged as dense gradients."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from ranks import counting, run_ranks, set_of
from torch import nn
from training import wrap

import hvdlite as hvd
from hvdlite.comm.group import Group

ROWS = 7


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).mean(1))


def part_loss(model: nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    if part == 1 and step == 1:
        # This rank looks up no row in this step.
        return model.head.weight.square().mean()
    words = torch.arange(4).reshape(2, 2) * (part + 1 + step) % ROWS
    return model(words).square().mean()


def make(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if kind == "SparseAdam":
        return [
            torch.optim.SparseAdam(list(model.table.parameters()), lr=0.1),
            torch.optim.SGD(model.head.parameters(), lr=0.1),
        ]
    return [getattr(torch.optim, kind)(model.parameters(), lr=0.1)]


def train(model: nn.Module, kind: str, parts: int, group: Group | None, **options) -> nn.Module:
    model = copy.deepcopy(model)
    optimizers = make(kind, model)
    if group is not None:
        optimizers = [hvd.DistributedOptimizer(o, process_set=set_of(group), **options) for o in optimizers]
    passes = options.get("backward_passes_per_step", 1)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(passes):
            mine = range(parts) if group is None else [group.rank]
            torch.stack([part_loss(model, step, part, parts) for part in mine]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert model.table.weight.grad.is_sparse
    return model


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_sparse_gradients_match_one_process(size, kind, as_dense, passes):
    torch.manual_seed(0)
    model = Words().double()
    options = {"sparse_as_dense": as_dense, "backward_passes_per_step": passes}
    alone = copy.deepcopy(model)
    optimizers = make(kind, alone)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(passes):
            torch.stack([part_loss(alone, step, part, size) for part in range(size)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    trained = run_ranks(size, lambda group: train(model, kind, size, group, **options))
    for one in trained:
        for got, expected in zip(one.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert all(torch.equal(one.table.weight, trained[0].table.weight) for one in trained)


def test_once_known_to_be_sparse_a_table_is_in_no_bucket_any_more():
    torch.manual_seed(0)
    model = Words()

    def rank(group: Group):
        own = copy.deepcopy(model)
        optimizer = wrap(group, own.parameters(), lr=0.1)
        per_step = []
        for _ in range(2):
            group.engine.calls.clear()
            optimizer.zero_grad()
            part_loss(own, 0, group.rank, 2).backward()
            optimizer.step()
            per_step.append(sum(numel for name, numel in group.engine.calls if name == "allreduce"))
        return per_step

    for first, second in run_ranks(2, rank, counting):
        assert second < first


class Tables(nn.Module):
    """Embeddings of different widths: rank 1 uses only the first, rank 0 all but the last."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(ROWS, width, sparse=True) for width in range(1, count + 1)])
        self.head = nn.Linear(1, 1)

    def loss(self, rank: int) -> torch.Tensor:
        used = self.tables[:1] if rank else self.tables[:-1]
        rows = [table(torch.tensor([rank, 2])).sum() for table in used]
        return self.head(torch.stack(rows).sum().view(1, 1)).sum()


def gathers_of_a_step(group: Group, model: Tables, cap_mb: float) -> tuple[int, list[torch.Tensor | None]]:
    """Returns the all-gathers of the second step, and the gradients of the tables after it."""
    model = copy.deepcopy(model)
    optimizer = wrap(group, model.parameters(), lr=0.1, bucket_cap_mb=cap_mb)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(group.rank).backward()
        group.engine.calls.clear()
        optimizer.synchronize()
        calls = list(group.engine.calls)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.close()
    return sum(name == "allgather" for name, _ in calls), [table.weight.grad for table in model.tables]


def test_the_sparse_gradients_of_a_step_cost_two_collectives_however_many_there_are():
    for model in (Tables(2), Tables(6)):
        for gathers, _ in run_ranks(2, lambda group, model=model: gathers_of_a_step(group, model, 25), counting):
            assert gathers == 2


def test_sparse_gradients_that_fill_more_than_a_bucket_travel_apart_with_the_same_averages():
    model = Tables(5)

    def rank(group: Group):
        # Four tables are used.
        apart, grads = gathers_of_a_step(group, model, 1e-5)
        assert apart == 1 + 4
        _, together = gathers_of_a_step(group, model, 25)
        assert together[-1] is grads[-1] is None
        for got, expected in zip(grads[:-1], together[:-1], strict=True):
            assert torch.equal(got.to_dense(), expected.to_dense())
        return [grad.to_dense() for grad in together[:-1]]

    for mine, theirs in zip(*run_ranks(2, rank, counting), strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another_is_an_error():
    def rank(group: Group):
        table = nn.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, sparse=group.rank == 0)
        optimizer = wrap(group, table, lr=0.1)
        table(torch.tensor([1])).sum().backward()
        if group.rank == 1:
            optimizer.step()
            return
        with pytest.raises(hvd.MismatchError, match="'weight' has a sparse gradient on some ranks"):
            optimizer.step()

    run_ranks(2, rank)


class WithSparseGradient(torch.autograd.Function):
    """The sum of a matrix, whose gradient has this many sparse dimensions."""

    @staticmethod
    def forward(ctx, matrix: torch.Tensor, sparse_dim: int) -> torch.Tensor:
        ctx.shape, ctx.sparse_dim = matrix.shape, sparse_dim
        return matrix.sum()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad * torch.ones(ctx.shape)).to_sparse(ctx.sparse_dim), None


def test_gradients_of_different_sparse_dimensions_are_an_error_on_all_ranks_that_tells_the_way_out():
    message = (
        "parameter 'matrix' has gradients with 1 and 2 sparse dimensions on different ranks: compute them in the same "
        "way on every rank, or wrap the optimizer with sparse_as_dense=True"
    )

    def rank(group: Group) -> None:
        matrix = nn.Parameter(torch.ones(4, 2))
        optimizer = wrap(group, [matrix], [("matrix", matrix)], lr=0.1)
        WithSparseGradient.apply(matrix, group.rank + 1).backward()
        with pytest.raises(hvd.MismatchError, match=f"^{re.escape(message)}$"):
            optimizer.step()
        optimizer.close()

    run_ranks(2, rank)


def test_sparse_gradients_of_several_passes_are_complete_after_the_last_and_a_pass_too_many_is_an_error():
    def rank(group: Group) -> list[list[float]]:
        table = nn.Embedding.from_pretrained(torch.zeros(3, 1), freeze=False, sparse=True)
        optimizer = wrap(group, table.parameters(), backward_passes_per_step=2)
        for _ in range(3):
            optimizer.zero_grad()
            assert list(optimizer._allreduce_delay.values()) == [2]
            for passes_left in (1, 0):
                table(torch.tensor([group.rank, 2])).sum().backward()
                assert list(optimizer._allreduce_delay.values()) == [passes_left]
            optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            table(torch.tensor([0])).sum().backward()
        with pytest.raises(hvd.GradientError, match="more than backward_passes_per_step times"):
            table(torch.tensor([0])).sum().backward()
        return table.weight.flatten().tolist()

    assert run_ranks(2, rank) == [[-3.0, -3.0, -6.0]] * 2


def drop(grad: torch.Tensor, param: nn.Parameter) -> None:
    param.grad = None


def replace(grad: torch.Tensor, param: nn.Parameter) -> None:
    param.grad = grad.clone()


def scale(grad: torch.Tensor, param: nn.Parameter) -> None:
    grad.mul_(0.5)


@pytest.mark.parametrize("change", [drop, replace, scale])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_sparse_gradient_that_is_changed_before_it_is_averaged_is_an_error_as_a_dense_one_is(size, as_dense, change):
    def rank(group: Group) -> None:
        table = nn.Embedding.from_pretrained(torch.zeros(3, 1), freeze=False, sparse=True)
        optimizer = wrap(group, table.parameters(), sparse_as_dense=as_dense)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([group.rank])).sum().backward()
            optimizer.synchronize()
            # Averages may be changed.
            table.weight.grad.mul_(2.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        table(torch.tensor([group.rank])).sum().backward()
        change(table.weight.grad, table.weight)
        with pytest.raises(hvd.GradientError, match=r"was .* while it was being averaged"):
            optimizer.step()

    run_ranks(size, rank)
