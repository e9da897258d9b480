"""What all forms between hosts have in common: sparse gradients, other ranks in a new world, equal parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_hosts import on
from ranks import run_ranks, set_of
from torch import Tensor, nn
from training import wrap_numbered
from worlds import run_generations

import hvdlite as hvd
from hvdlite.comm.group import Group

FORMS = {
    "int8": hvd.Compression.int8,
    "int4": hvd.Compression.int4,
    "topk": hvd.Compression.topk(0.1),
    "powersgd": hvd.Compression.powersgd(2, 0, 1.5),
}
each_form = pytest.mark.parametrize("name", FORMS)


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


@each_form
@pytest.mark.parametrize("size", [2, 3])
def test_sparse_gradients_go_round_it(name, size):
    def rank(group: Group) -> list[Tensor]:
        # Alone in its bucket, which is then empty.
        words = nn.Embedding(30, 20, sparse=True)
        words.weight.data.zero_()
        dense = nn.Parameter(torch.zeros(30, 20))
        named = [("words", words.weight), ("dense", dense)]
        inner = torch.optim.SGD([param for _, param in named], lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, named, compression=FORMS[name], process_set=set_of(group), bucket_cap_mb=0.001
        )
        for step in range(3):
            optimizer.zero_grad()
            picked = words(torch.tensor([group.rank, 5]))
            (picked.sum() + (dense * gradient(group.rank, step, (30, 20))).sum()).backward()
            optimizer.step()
        return [words.weight.detach(), dense.detach()]

    first, *others = run_ranks(size, rank)
    expected = torch.zeros(30, 20)
    expected[5] = -3.0
    for number in range(size):
        expected[number] = -3.0 / size
    assert torch.allclose(first[0], expected)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


@pytest.mark.night(but=6)
@pytest.mark.slow(but=2)
@each_form
@pytest.mark.parametrize("place", ["2 hosts", "2 hosts of 2", "3 hosts of 2"])
def test_what_was_kept_is_sent_once_after_a_neighbour_in_the_bucket_has_become_sparse(name, place):
    shapes = [(40, 30), (20, 10), (30, 20)]

    def rank(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0),
            [(f"p{number}", param) for number, param in enumerate(params)],
            compression=FORMS[name],
            process_set=set_of(group),
            # p1 comes first in its bucket.
            groups=[[params[1], params[0]], [params[2]]],
        )
        # What was to be sent of p0 and p2, and was not.
        missing = [torch.zeros(shape) for shape in shapes]
        for step in range(5):
            optimizer.zero_grad()
            for number in (0, 2):
                params[number].grad = gradient(group.rank, 10 * step + number, shapes[number])
                missing[number] += params[number].grad
            dense = gradient(group.rank, 10 * step + 1, shapes[1])
            params[1].grad = dense if step < 2 else dense.to_sparse()
            optimizer.synchronize()
            for number in (0, 2):
                missing[number] -= params[number].grad
        residuals = optimizer.state_dict()["hvdlite"]["exchange"]["residuals"]
        kept = [torch.zeros(shape) for shape in shapes]
        for number in (0, 2):
            for start, _, values in residuals.get(f"p{number}", {}).values():
                kept[number].view(-1)[start : start + len(values)] += values
        return missing, kept

    found = on(place, rank)
    for number in (0, 2):
        missing = torch.stack([missing[number] for missing, _ in found]).sum(0)
        kept = torch.stack([kept[number] for _, kept in found]).sum(0)
        assert missing.abs().max() > 1e-3
        assert torch.allclose(kept, missing, atol=1e-4)


@each_form
def test_accumulated_gradients_get_the_residual_once(name):
    def rank(group: Group) -> list[Tensor]:
        found = []
        for passes in (1, 2):
            param = nn.Parameter(torch.zeros(40, 30))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([param], lr=1.0),
                [("p0", param)],
                compression=FORMS[name],
                process_set=set_of(group),
                backward_passes_per_step=passes,
            )
            for step in range(3):
                for _ in range(passes):
                    (param * gradient(group.rank, step, (40, 30)) / passes).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(param.detach())
        return found

    for once, twice in on("2 hosts", rank):
        assert torch.equal(once, twice)


def kept_of(optimizer: hvd.DistributedOptimizer) -> Tensor:
    """All that a rank has kept of a gradient of 40 × 30."""
    state = optimizer.state_dict().get("hvdlite", {}).get("exchange", {})
    total = torch.zeros(1200)
    for start, _, values in state.get("residuals", {}).get("p0", {}).values():
        total[start : start + len(values)] += values
    return total.view(40, 30)


@pytest.mark.night(but=6)
@pytest.mark.slow(but=2)
@each_form
@pytest.mark.parametrize("sizes", [[2, 3], [3, 2], [2, 1, 2]])
def test_other_ranks_in_a_new_world_go_on_with_what_those_that_stay_have_kept(name, sizes):
    def rank(generations: Iterator[int]) -> Any:
        param, optimizer, found = nn.Parameter(torch.zeros(40, 30)), None, []
        for generation in generations:
            hvd.broadcast_parameters({"p0": param.data}, root_rank=0)
            if optimizer is None:
                inner = torch.optim.SGD([param], lr=1.0)
                optimizer = hvd.DistributedOptimizer(inner, [("p0", param)], compression=FORMS[name])
            before = param.detach().clone(), kept_of(optimizer)
            for step in range(3):
                optimizer.zero_grad()
                param.grad = gradient(hvd.rank(), 10 * generation + step, (40, 30))
                optimizer.step()
            found.append((generation, *before, param.detach().clone(), kept_of(optimizer)))
        return found

    ranks = run_generations(sizes, rank)
    for generation, size in enumerate(sizes):
        own = [next(each for each in found if each[0] == generation) for found in ranks[:size]]
        for each in own:
            assert torch.equal(each[3], own[0][3])
        # What has not come into the parameters, of these ranks' gradients and of what they had kept before, is kept.
        given = sum(gradient(number, 10 * generation + step, (40, 30)) for number in range(size) for step in range(3))
        before, after = sum(each[2] for each in own), sum(each[4] for each in own)
        assert torch.allclose((own[0][1] - own[0][3]) * size + after, given + before, atol=1e-3)


@each_form
def test_a_single_rank_can_load_the_state_of_several_and_keeps_it(name):
    saved: list[Any] = []

    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(40, 30))
        inner = torch.optim.SGD([param], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, [("p0", param)], compression=FORMS[name], process_set=set_of(group))
        if saved:
            optimizer.load_state_dict(saved[0])
        before = kept_of(optimizer)
        param.grad = gradient(group.rank, 0, (40, 30))
        optimizer.step()
        if group.size == 1:
            assert torch.equal(param, -gradient(0, 0, (40, 30)))
            assert before.any()
            assert torch.equal(kept_of(optimizer), before)
        optimizer.consolidate_state_dict()
        if group.rank == 0:
            saved.append(optimizer.state_dict())

    run_ranks(3, rank)
    run_ranks(1, rank)


@each_form
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("other", "shape", "words"),
    [
        ("p9", (40, 30), "no such parameter"),
        ("p0", (3, 4), "one of 12 numbers"),
        ("p0", (50, 30), "one of 1500 numbers"),
    ],
)
def test_a_state_of_another_model_is_refused(name, is_whole, other, shape, words):
    def rank(group: Group) -> None:
        def wrap(called: str, shape: tuple[int, ...]) -> tuple[nn.Parameter, hvd.DistributedOptimizer]:
            param = nn.Parameter(torch.zeros(shape))
            named = [(called, param)]
            inner = torch.optim.SGD([param], lr=1.0)
            return param, hvd.DistributedOptimizer(inner, named, compression=FORMS[name], process_set=set_of(group))

        param, optimizer = wrap("p0", (40, 30))
        param.grad = gradient(group.rank, 0, (40, 30))
        optimizer.step()
        again = wrap("p0", (40, 30))[1]
        again.load_state_dict(optimizer.state_dict())
        if is_whole:
            again.consolidate_state_dict()
            if group.rank != 0:
                return
        state = again.state_dict()
        with pytest.raises(ValueError, match=f"for 'p0', of 1200 numbers, and the optimizer has {words}"):
            wrap(other, shape)[1].load_state_dict(state)

    run_ranks(2, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("name", ["int8", "powersgd"])
@pytest.mark.parametrize("place", ["2 hosts", "3 hosts of 2"])
def test_gradients_of_other_dtypes_are_averaged(place, name, dtype):
    product = torch.outer(torch.linspace(0.5, 1, 40), torch.linspace(-1, 1, 30))

    def rank(group: Group) -> Tensor:
        param = nn.Parameter(torch.zeros(40, 30, dtype=dtype))
        optimizer = wrap_numbered(group, [param], FORMS[name])
        param.grad = product.to(dtype) * (group.rank + 1)
        optimizer.synchronize()
        return param.grad

    first, *others = on(place, rank)
    assert all(torch.equal(other, first) for other in others)
    mean = (product * (len(others) + 2) / 2).to(torch.complex128)
    assert torch.allclose(first.to(torch.complex128), mean, atol={"int8": 0.03, "powersgd": 0.05}[name])


@each_form
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": hvd.Adasum}, " does not work with op=hvd.Adasum"),
        ({"autotune": True}, ", which compression={} replaces"),
        ({"exchange": hvd.Exchange}, "leave out compression"),
    ],
)
def test_what_does_not_go_together_is_refused(name, options, words):
    def rank(group: Group) -> None:
        with pytest.raises(ValueError, match=re.escape(words.format(repr(FORMS[name])))):
            wrap_numbered(group, [nn.Parameter(torch.zeros(3))], FORMS[name], **options)

    run_ranks(1, rank)


@pytest.mark.parametrize(
    "forms",
    [
        (hvd.Compression.int8, hvd.Compression.int4),
        (hvd.Compression.topk(0.1), hvd.Compression.topk(0.2)),
        (hvd.Compression.powersgd(1, 0, 1.5), hvd.Compression.powersgd(2, 0, 1.5)),
    ],
)
def test_ranks_with_different_forms_are_told_and_so_is_a_state_of_another(forms):
    first, second = (re.escape(repr(form)) for form in forms)

    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(40, 30))
        with pytest.raises(hvd.MismatchError, match=f": compression is {first} on .*{second}"):
            wrap_numbered(group, [param], forms[group.rank]).step()
        optimizer = wrap_numbered(group, [param], forms[0])
        param.grad = gradient(group.rank, 0, (40, 30))
        optimizer.step()
        with pytest.raises(ValueError, match=f"has the state of {first}, .* has compression={second}"):
            wrap_numbered(group, [param], forms[1]).load_state_dict(optimizer.state_dict())

    run_ranks(2, rank)
