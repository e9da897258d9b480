"""Ranks with fewer batches join, and the others go on as if they had nothing more to give."""

from __future__ import annotations

import pytest
import torch
from models import Plain, batches, build, part_loss
from torch import nn
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd

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
def test_all_reduces_go_on_without_the_ranks_that_have_joined(size, average):
    def rank(own: int) -> tuple[list[torch.Tensor], int]:
        # Rank r has r + 1 batches; all of them join in order, each after the others' all-reduce.
        results = []
        for batch in range(own + 1):
            value = torch.full((2,), 1.0 + own)
            results.append(hvd.allreduce(value, name=f"average {batch}"))
            results.append(hvd.allreduce(value, name=f"sum {batch}", op=hvd.Sum))
            results.append(hvd.allreduce(value, name=f"max {batch}", op=hvd.Max))
            results += hvd.grouped_allreduce([value, value.long()], name=f"group {batch}", op=hvd.Sum)
        return results, hvd.join(average=average)

    outcomes = run_worlds(size, rank)
    for own, (results, last) in enumerate(outcomes):
        assert last == size - 1
        expected = []
        for batch in range(own + 1):
            values = [1.0 + other for other in range(size) if other >= batch]
            divisor = size if average == "all" else len(values)
            total = sum(values)
            expected += [total / divisor, total, max(values), total, int(total)]
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

    # Rank 0 has joined, or does while rank 1 waits.
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
