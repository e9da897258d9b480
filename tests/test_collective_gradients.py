"""Gradients of the collectives: those of one process that has all ranks' tensors and sums up all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.world import current_world

SHAPE = (5, 2)
OPTIONS = {"prescale_factor": 0.5, "postscale_factor": 3.0}


def start(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, generator=generator, dtype=dtype).requires_grad_()


def loss_of(result: Tensor, rank: int) -> Tensor:
    """One that tells ranks, places and powers apart."""
    weights = torch.arange(1, result.numel() + 1, dtype=torch.float64).reshape(result.shape) * (rank + 2)
    return (weights * result.abs() ** 2).sum()


def average(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def spread(rows: int, size: int) -> list[int]:
    return [len(range(rank, rows, size)) for rank in range(size)]


def splits_of(rank: int, size: int) -> list[int]:
    """One row is left over on all ranks but the first."""
    return [rank % 2 + 1 if target == 0 else 1 for target in range(size)]


# What a rank calls, and what one process would make of all ranks' tensors for each rank.
Case = tuple[Callable[[Tensor, int, int], Tensor], Callable[[Sequence[Tensor], int], Tensor]]
CASES: dict[str, Case] = {
    "sum": (lambda x, rank, size: hvd.allreduce(x, op=hvd.Sum), lambda xs, rank: sum(xs)),
    "average": (lambda x, rank, size: hvd.allreduce(x), lambda xs, rank: average(xs)),
    "scaled": (lambda x, rank, size: hvd.allreduce(x, **OPTIONS), lambda xs, rank: average(xs) * 1.5),
    "max": (
        lambda x, rank, size: hvd.allreduce(x, op=hvd.Max, **OPTIONS),
        lambda xs, rank: torch.stack(list(xs)).amax(0) * 1.5,
    ),
    "min": (
        lambda x, rank, size: hvd.allreduce(x, op=hvd.Min, prescale_factor=-2.0),
        lambda xs, rank: torch.stack(list(xs)).mul(-2).amin(0),
    ),
    "product": (
        lambda x, rank, size: hvd.allreduce(x, op=hvd.Product, **OPTIONS),
        lambda xs, rank: torch.stack(list(xs)).mul(0.5).prod(0) * 3,
    ),
    "allgather": (
        lambda x, rank, size: hvd.allgather(x[: rank + 1]),
        lambda xs, rank: torch.cat([x[: i + 1] for i, x in enumerate(xs)]),
    ),
    "allgather of scalars": (
        lambda x, rank, size: hvd.allgather(x[0, 0]),
        lambda xs, rank: torch.stack([x[0, 0] for x in xs]),
    ),
    "broadcast": (lambda x, rank, size: hvd.broadcast(x, size - 1), lambda xs, rank: xs[-1]),
    "alltoall": (
        lambda x, rank, size: hvd.alltoall(x, splits=splits_of(rank, size))[0],
        lambda xs, rank: torch.cat([x[: sum(s := splits_of(i, len(xs)))].split(s)[rank] for i, x in enumerate(xs)]),
    ),
    "even alltoall": (
        lambda x, rank, size: hvd.alltoall(x[:1].expand(size, 2)),
        lambda xs, rank: torch.cat([x[:1] for x in xs]),
    ),
    "reducescatter": (
        lambda x, rank, size: hvd.reducescatter(x, **OPTIONS),
        lambda xs, rank: average(xs).split(spread(len(xs[0]), len(xs)))[rank] * 1.5,
    ),
    "grouped": (
        lambda x, rank, size: torch.cat(
            [part.reshape(-1) for part in hvd.grouped_allreduce([x[:1], torch.tensor(rank), x[1:]], op=hvd.Sum)]
        ),
        lambda xs, rank: torch.cat([sum(xs)[:1].reshape(-1), torch.zeros(1), sum(xs)[1:].reshape(-1)]),
    ),
    "grouped reducescatter": (
        lambda x, rank, size: torch.cat(hvd.grouped_reducescatter([x, x * x], op=hvd.Sum)),
        lambda xs, rank: torch.cat(
            [total.split(spread(5, len(xs)))[rank] for total in (sum(xs), sum(x * x for x in xs))]
        ),
    ),
    "grouped allgather": (
        lambda x, rank, size: torch.cat(hvd.grouped_allgather([x[:rank], x[1:] ** 2])),
        lambda xs, rank: torch.cat([*[x[:i] for i, x in enumerate(xs)], *[x[1:] ** 2 for x in xs]]),
    ),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process_that_sums_up_all_losses(size):
    def rank(number):
        grads = {}
        for name, (call, _) in CASES.items():
            x = start(number)
            loss_of(call(x, number, size), number).backward()
            grads[name] = x.grad
        return grads

    by_rank = run_worlds(size, rank)
    for name, (_, model) in CASES.items():
        xs = [start(number) for number in range(size)]
        sum(loss_of(model(xs, number), number) for number in range(size)).backward()
        for number, x in enumerate(xs):
            wanted = torch.zeros(SHAPE, dtype=torch.float64) if x.grad is None else x.grad
            torch.testing.assert_close(by_rank[number][name], wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("op", [hvd.Average, hvd.Product])
def test_complex_gradients_follow_torchs_convention(op):
    def rank(number):
        x = start(number, torch.complex128)
        loss_of(hvd.allreduce(x, op=op), number).backward()
        return x.grad

    xs = [start(number, torch.complex128) for number in range(3)]
    combined = average(xs) if op is hvd.Average else torch.stack(xs).prod(0)
    sum(loss_of(combined, number) for number in range(3)).backward()
    for got, x in zip(run_worlds(3, rank), xs, strict=True):
        torch.testing.assert_close(got, x.grad)


def test_a_minimum_that_several_ranks_have_shares_its_gradient():
    def rank(number):
        x = torch.tensor([1.0, number], requires_grad=True)
        hvd.allreduce(x, op=hvd.Min).sum().backward()
        return x.grad.tolist()

    assert run_worlds(2, rank) == [[1.0, 2.0], [1.0, 0.0]]


def test_a_product_with_zeros_has_the_gradient_of_the_others():
    def rank(number):
        x = torch.tensor([0.0, 2.0, 0.0][number], requires_grad=True)
        y = torch.tensor([0.0, 2.0, 3.0][number], requires_grad=True)
        sum(hvd.grouped_allreduce([x, y], op=hvd.Product)).backward()
        return x.grad.item(), y.grad.item()

    assert run_worlds(3, rank) == [(0.0, 18.0), (0.0, 0.0), (0.0, 0.0)]


def test_gradients_can_be_differentiated_again():
    def rank(number):
        x = torch.tensor(number + 1.0, requires_grad=True)
        (grad,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum) ** 3, x, create_graph=True)
        (second,) = torch.autograd.grad(grad, x)
        return grad.item(), second.item()

    # Both ranks' losses are s³ with s = 3: 2 * 3 s², then the sum of both ranks' 2 * 6 s.
    assert run_worlds(2, rank) == [(54.0, 72.0)] * 2


def test_what_backward_asks_for_has_the_forwards_name(monkeypatch):
    asked = []

    def rank(number):
        conductor = current_world().conductor
        submit = conductor.submit

        def noting(group, request, body):
            asked.append((request.kind, request.name))
            return submit(group, request, body)

        monkeypatch.setattr(conductor, "submit", noting)
        x = torch.ones(1, requires_grad=True)
        hvd.allgather(x, "b").sum().backward()
        hvd.broadcast(x, 0, "c").sum().backward()
        hvd.allreduce(x).sum().backward()

    run_worlds(1, rank)
    assert asked == [
        ("allgather", "b"),
        ("reducescatter", "b.gradient"),
        ("broadcast", "c"),
        ("allreduce", "c.gradient"),
        ("allreduce", None),
        ("allreduce", None),
    ]


def test_where_no_gradient_is_wanted_none_is_computed():
    def rank(number):
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.allgather(torch.ones(2)).requires_grad
        assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad

    run_worlds(2, rank)


@pytest.mark.parametrize(
    "overwrite",
    [lambda y: hvd.allreduce_(y, op=hvd.Sum), lambda y: hvd.broadcast_(y, 0)],
    ids=["allreduce_", "broadcast_"],
)
def test_autograd_notices_that_a_tensor_it_needs_has_been_overwritten(overwrite):
    def rank(number):
        y = torch.ones(2, requires_grad=True).exp()
        overwrite(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_worlds(1, rank)


def test_adasum_says_that_it_has_no_gradient():
    x = torch.ones(2, requires_grad=True)
    (outcome,) = attempt_worlds(1, lambda rank: hvd.allreduce(x, name="loss", op=hvd.Adasum).sum().backward())
    with pytest.raises(hvd.GradientError, match=r"allreduce of 'loss': op=hvd\.Adasum has no gradient"):
        raise outcome
