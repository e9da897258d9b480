"""``optimizer.weighted(loss, n)``: the gradients are those of one process on all samples, however they are spread."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import FEATURES, Branches, MixedTypes, Plain, adamw, build, sgd
from ranks import attempt_ranks, counting, run_ranks, set_of
from torch import Tensor, nn
from training import wrap
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.buckets.flags import MOST_PER_STEP, ParticipantCount, RankAndSize, Weights
from hvdlite.comm.group import Group

# Rows of each rank, for each backward pass of each step.
ROWS = {
    1: [[[3]], [[5]], [[2]]],
    2: [[[1, 7]], [[4, 4]], [[0, 5]], [[6, 1]]],
    3: [[[1, 2, 9]], [[0, 0, 3]], [[5, 5, 5]]],
}
# Two passes per step.
ACCUMULATED = {2: [[[1, 7], [3, 0]], [[0, 2], [0, 6]], [[4, 4], [1, 2]]], 1: [[[1], [6]], [[2], [3]]]}


def parts_of(step: int, micro: int, rows: list[int], classes: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Returns each rank's inputs and classes."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(sum(rows), FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (sum(rows),), generator=generator)
    return list(zip(x.split(rows), y.split(rows), strict=True))


def alone(model: nn.Module, make: Any, schedule: list[list[list[int]]]) -> nn.Module:
    """One process, whose loss is the mean over all rows of all ranks and passes."""
    model = copy.deepcopy(model)
    optimizer = make(list(model.parameters()))
    for step, passes in enumerate(schedule):
        optimizer.zero_grad()
        losses = [
            nn.functional.cross_entropy(model(x, part), y, reduction="sum")
            for micro, rows in enumerate(passes)
            for part, (x, y) in enumerate(parts_of(step, micro, rows))
            if len(x)
        ]
        (sum(losses) / sum(map(sum, passes))).backward()
        optimizer.step()
    return model


def on_rank(group: Group, model: nn.Module, make: Any, schedule: list[list[list[int]]], **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        make(list(model.parameters())),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=len(schedule[0]),
        process_set=set_of(group),
        **{"bucket_cap_mb": 0.0002, **options},
    )
    for step, passes in enumerate(schedule):
        for micro, rows in enumerate(passes):
            x, y = parts_of(step, micro, rows)[group.rank]
            # NaN for no rows
            loss = optimizer.weighted(nn.functional.cross_entropy(model(x, group.rank), y), len(x))
            if micro == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    optimizer.close()
    return model


def assert_close(models: list[nn.Module], expected: nn.Module, tolerance: float = 1e-12) -> None:
    for model in models:
        for (name, got), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            torch.testing.assert_close(got, other[1], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("kind", [Plain, Branches])
def test_ranks_with_uneven_batches_match_one_process_on_the_whole_batch(kind, make, size):
    model = build(kind)
    # A rank without rows uses no parameter.
    models = run_ranks(size, lambda group: on_rank(group, model, make, ROWS[size]))
    assert_close(models, alone(model, make, ROWS[size]))


@pytest.mark.parametrize("size", [1, 2])
def test_the_rows_of_several_passes_add_up(size):
    model = build(Plain)
    models = run_ranks(size, lambda group: on_rank(group, model, sgd, ACCUMULATED[size]))
    assert_close(models, alone(model, sgd, ACCUMULATED[size]))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"gradient_predivide_factor": 2.0}, 1e-12),
        ({"step_on_arrival": True}, 1e-12),
        ({"groups": 1}, 1e-12),
        ({"compression": hvd.Compression.fp16}, 2e-3),
        ({"compression": hvd.Compression.bf16}, 2e-2),
        ({"compression": hvd.Compression.int8}, 2e-2),
    ],
    ids=str,
)
def test_so_they_match_however_gradients_are_sent(options, tolerance):
    model = build(Plain)

    def rank(group: Group):
        group.hosts = ("a", "b")
        return on_rank(group, model, sgd, ROWS[2], **options)

    models = run_ranks(2, rank)
    assert_close(models, alone(model, sgd, ROWS[2]), tolerance)
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own, other)


def test_buckets_of_several_dtypes_are_all_corrected():
    model = build(MixedTypes)
    models = run_ranks(2, lambda group: on_rank(group, model, sgd, ROWS[2]))
    assert_close(models, alone(model, sgd, ROWS[2]), 2e-2)
    for got, expected in zip(models[0].wide.parameters(), models[1].wide.parameters(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_sparse_gradients_are_weighted_too(size, sparse_as_dense):
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)).double()
    words = [torch.tensor([1, 2, 2]), torch.tensor([2, 5, 6, 7, 7])][:size]
    whole = copy.deepcopy(model)
    whole(torch.cat(words)).square().sum(1).mean().backward()

    def rank(group: Group):
        own = copy.deepcopy(model)
        optimizer = wrap(group, own.parameters(), sparse_as_dense=sparse_as_dense)
        mine = words[group.rank]
        for _ in range(2):  # the first step finds out that the gradient is sparse
            optimizer.zero_grad()
            optimizer.weighted(own(mine).square().sum(1).mean(), len(mine)).backward()
            optimizer.synchronize()
        return [param.grad for param in own.parameters()]

    for grads in run_ranks(size, rank):
        assert grads[0].is_sparse
        for grad, param in zip(grads, whole.parameters(), strict=True):
            torch.testing.assert_close(grad.to_dense(), param.grad.to_dense(), rtol=0, atol=1e-12)


def step_of(group: Group, rows: list[int | None], **options: Any) -> Any:
    """One step in which rank r has ``rows[r]`` rows of value r + 1, or does not weigh its loss if None."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = wrap(group, [param], [("w", param)], **options)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (param * (1.0 + group.rank)).sum()
        n = rows[group.rank]
        (loss if n is None else optimizer.weighted(loss, n)).backward()
        optimizer.synchronize()
    return param.grad.tolist()


@pytest.mark.parametrize("n", [1, 255, 256, 257, 65535, 2**31 + 1, MOST_PER_STEP], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str
)
def test_n_is_sent_exactly_in_any_dtype(n, dtype):
    ranks = [Weights(RankAndSize(rank, 3)) for rank in range(3)]
    numbers = [n, 0, 7]
    slots = torch.zeros(3 * 5, dtype=dtype)
    for weights, number in zip(ranks, numbers, strict=True):
        weights.add(number)
        part = torch.empty_like(slots)
        weights.write(part)
        slots += part
    for weights in ranks:
        weights.read(slots, ParticipantCount.of_all(3), str)
        assert weights.correction == 3 * 1024.0 / (n + 7)
        assert weights.state.reference == (n + 7) / 3


def test_equal_numbers_leave_the_averages_as_they_are():
    """From the second step on: nothing is multiplied, and the bits are those of a plain average."""

    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2))
        optimizer = wrap(group, [param])
        grads = []
        for weighs in (True, True, False):
            optimizer.zero_grad()
            loss = (param * torch.tensor([0.1, 0.3 + group.rank])).sum()
            loss = optimizer.weighted(loss, 7) if weighs else loss
            loss.backward()
            optimizer.step()
            grads.append(param.grad.clone())
        return grads

    for _, second, plain in run_ranks(2, rank):
        assert torch.equal(second, plain)


@pytest.mark.parametrize("n", [torch.tensor(3), torch.tensor([3], dtype=torch.int32), torch.tensor(3.0), 3.0, True + 2])
def test_n_may_be_a_tensor(n):
    assert run_ranks(2, lambda group: step_of(group, [n, 1])) == [[1.25, 1.25]] * 2


def test_it_takes_no_collective():
    def rank(group: Group):
        calls = []
        for weighs in (False, True):
            param = nn.Parameter(torch.zeros(2))
            optimizer = wrap(group, [param])
            optimizer._reducer.connect()
            group.engine.calls.clear()
            for _ in range(3):
                optimizer.zero_grad()
                loss = param.sum()
                (optimizer.weighted(loss, 1 + group.rank) if weighs else loss).backward()
                optimizer.step()
            calls.append(list(group.engine.calls))
            optimizer.close()
        return calls

    for plain, weighted in run_ranks(2, rank, counting):
        assert plain == weighted != []


@pytest.mark.parametrize("rows", [[3, None, 2], [None, 4, None]], ids=str)
def test_ranks_that_do_not_weigh_beside_those_that_do_are_named_on_every_rank(rows):
    for error in attempt_ranks(3, lambda group: step_of(group, rows)):
        assert isinstance(error, hvd.MismatchError)
        called, others = str(error).split("and not on")
        for rank, n in enumerate(rows):
            assert f"rank {rank}" in (others if n is None else called)
            assert f"rank {rank}" not in (called if n is None else others)


def test_a_rank_without_a_backward_pass_neither_counts_nor_is_an_error():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = wrap(group, [param])
        if group.rank != 1:
            optimizer.weighted((param * (1.0 + group.rank)).sum(), 3 - group.rank).backward()
        optimizer.synchronize()
        return param.grad.tolist()

    for grad in run_ranks(3, rank):
        assert grad == pytest.approx([(3 * 1 + 1 * 3) / 4] * 2)


def test_no_samples_on_any_rank_leave_no_gradient():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2))
        optimizer = wrap(group, [param])
        optimizer.weighted(param[:0].mean(), 0).backward()
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[0.0, 0.0]] * 2


def test_numbers_of_a_pass_that_zero_grad_drops_are_dropped():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = wrap(group, [param], backward_passes_per_step=2)
        optimizer.weighted((param * 100.0).sum(), 50 * group.rank).backward()
        loss = optimizer.weighted((param * (1.0 + group.rank)).sum(), 1 + 2 * group.rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return param.grad.tolist()

    for grad in run_ranks(2, rank):
        assert grad == pytest.approx([(1 * 1 + 3 * 2) / 4] * 2)


@pytest.mark.parametrize("then", [[], [5]])
@pytest.mark.parametrize("between", ["add_param_group", "consolidate_state_dict"])
@pytest.mark.parametrize("first", [(1, 3), (0, 2)], ids=str)
def test_passes_before_a_change_between_the_passes_of_a_step_keep_their_number_of_samples(first, between, then):
    """``first`` has each rank's n of the first pass, ``then`` the n of later ones."""

    def rank(group: Group) -> list[float]:
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = wrap(group, [param], backward_passes_per_step=3)
        samples = [first[group.rank], *then]
        for number, n in enumerate(samples):
            optimizer.weighted((param * (1.0 + group.rank)).sum(), n).backward()
            if number == 0 and between == "add_param_group":
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1, dtype=torch.float64))]})
            elif number == 0:
                optimizer.consolidate_state_dict()
        optimizer.step()
        found = param.grad[0].item()
        # What zero_grad drops counts no more.
        optimizer.weighted(param.sum(), 7).backward()
        optimizer.zero_grad()
        optimizer.weighted((param * (1.0 + group.rank)).sum(), 1 + 2 * group.rank).backward()
        optimizer.step()
        return [found, param.grad[0].item()]

    all_samples = [sum([first[rank], *then]) for rank in range(2)]
    expected = [(all_samples[0] + 2 * all_samples[1]) / sum(all_samples), (1 + 3 * 2) / 4]
    for found in run_ranks(2, rank):
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("average", ["all", "active"])
def test_a_rank_that_has_joined_counts_as_no_samples(average):
    def rank(number: int):
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
        grads = []
        for batch in range(2 + number):
            optimizer.zero_grad()
            optimizer.weighted((param * (1.0 + number)).sum(), 1 + batch + number).backward()
            optimizer.step()
            grads.append(param.grad[0].item())
        hvd.join(average=average)
        return grads

    expected = [(1 * 1 + 2 * 2 + 3 * 3) / 6, (2 * 1 + 3 * 2 + 4 * 3) / 9, (4 * 2 + 5 * 3) / 9, 3.0]
    for number, grads in enumerate(run_worlds(3, rank)):
        assert grads == pytest.approx(expected[: 2 + number], abs=1e-12)


def test_ranks_of_a_process_set_and_one_outside_it():
    def rank(number: int):
        half = hvd.add_process_set([0, 1])
        param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), process_set=half)
        optimizer.weighted((param * (1.0 + number)).sum(), 1 + 2 * number).backward()
        optimizer.step()
        return param.grad[0].item()

    assert run_worlds(3, rank) == pytest.approx([(1 + 3 * 2) / 4] * 2 + [3.0], abs=1e-12)


class Nothing(hvd.Exchange):
    """An exchange of one's own."""

    def begin(self, gradients: Any, links: Any) -> Any:
        return hvd.ExchangeWork(gradients)


@pytest.mark.parametrize(
    ("n", "options", "words"),
    [
        (-1, {}, "n=-1 is not a number of samples"),
        (0.5, {}, r"n=0\.5 is not a number of samples"),
        (True, {}, "n=True is not a number"),
        (MOST_PER_STEP + 1, {}, "is not a number of samples"),
        (1, {"op": hvd.Sum}, "does not work with op=hvd.Sum"),
        (1, {"op": hvd.Adasum}, "does not work with op=hvd.Adasum"),
        (1, {"exchange": Nothing}, "may compute something else"),
        (1, {"outer": hvd.LocalSGD(sync_every=2)}, "averages hosts with equal weights"),
    ],
    ids=str,
)
def test_what_has_no_weighted_average_is_refused(n, options, words):
    def rank(number: int):
        param = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), **options)
        with pytest.raises(ValueError, match=words):
            optimizer.weighted(param.sum(), n)

    assert not [outcome for outcome in attempt_worlds(1, rank) if outcome]
