"""``max_norm`` clips in the step, with the bits of `torch.nn.utils.clip_grad_norm_` after `synchronize`."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from models import MODELS, Branches, Plain, batches, build, part_loss, sgd
from ranks import attempt_ranks, counting, run_ranks, set_of
from torch import nn
from training import wrap
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group

STEPS, PASSES = 3, 2


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with two parameter groups, in another order than the model's."""
    params = list(model.parameters())
    return torch.optim.SGD([{"params": params[2:]}, {"params": params[:2], "lr": 0.2}], lr=0.1, momentum=0.9)


def train(group: Group, model: nn.Module, max_norm: float, by_hand: bool, **options):
    model = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        groups_of(model),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=PASSES,
        bucket_cap_mb=0.0002,
        process_set=set_of(group),
        max_norm=None if by_hand else max_norm,
        **options,
    )
    x, y = batches(STEPS, PASSES, 8)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(PASSES):
            part_loss(model, x[step, micro], y[step, micro], group.rank, group.size).backward()
        if by_hand:
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
            norm = optimizer.grad_norm
        seen.append((norm, [None if param.grad is None else param.grad.clone() for param in model.parameters()]))
    return seen, list(model.parameters())


def assert_same_bits(got, expected) -> None:
    (seen, params), (seen_by_hand, params_by_hand) = got, expected
    for (norm, grads), (other, other_grads) in zip(seen, seen_by_hand, strict=True):
        assert norm.dtype == other.dtype
        torch.testing.assert_close(norm, other, rtol=0, atol=0, equal_nan=True)
        for grad, other_grad in zip(grads, other_grads, strict=True):
            assert (grad is None) == (other_grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, other_grad, rtol=0, atol=0, equal_nan=True)
    for param, other in zip(params, params_by_hand, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.night(but=24)
@pytest.mark.slow(but=12)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("max_norm", [0.05, 0.4, 1e6, math.inf])
@pytest.mark.parametrize("kind", MODELS)
def test_the_gradients_and_their_norm_have_the_bits_of_clip_grad_norm_after_synchronize(kind, max_norm, size):
    model = build(kind)

    def rank(group: Group):
        return [train(group, model, max_norm, by_hand) for by_hand in (False, True)]

    for got, expected in run_ranks(size, rank):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("options", [{"compression": hvd.Compression.fp16}, {"op": hvd.Sum}, {"groups": 2}], ids=str)
def test_so_they_have_however_they_are_combined(options):
    model = build(Branches)

    def rank(group: Group):
        return [train(group, model, 0.1, by_hand, **options) for by_hand in (False, True)]

    for got, expected in run_ranks(2, rank):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_does_what_it_does_in_clip_grad_norm_(value):
    def rank(group: Group):
        results = []
        for by_hand in (False, True):
            params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
            optimizer = wrap(group, params, max_norm=None if by_hand else 1.0)
            loss = (params[0] * torch.tensor([1.0, value, 2.0])).sum() + params[1].sum()
            (loss if group.rank else params[0].sum()).backward()
            if by_hand:
                optimizer.synchronize()
                norm = nn.utils.clip_grad_norm_(params, 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
                norm = optimizer.grad_norm
            results.append(([(norm, [param.grad for param in params])], params))
        return results

    for got, expected in run_ranks(2, rank):
        assert_same_bits(got, expected)


def clip_by_hand(params: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Does what `clip_grad_norm_` does, also in PyTorch 2.11, where it cannot measure sparse gradients."""
    try:
        return nn.utils.clip_grad_norm_(params, max_norm)
    except NotImplementedError:
        grads = [param.grad.coalesce().values() if param.grad.is_sparse else param.grad for param in params]
        norm = nn.utils.get_total_norm(grads)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_sparse_gradients_are_measured_and_clipped_too(size, sparse_as_dense):
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))

    def rank(group: Group):
        results = []
        for by_hand in (False, True):
            own = copy.deepcopy(model)
            optimizer = wrap(group, own, sparse_as_dense=sparse_as_dense, max_norm=None if by_hand else 0.1)
            own(torch.tensor([1, 1, 2 + group.rank])).square().sum().backward()
            if by_hand:
                optimizer.synchronize()
                norm = clip_by_hand(list(own.parameters()), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
                norm = optimizer.grad_norm
            results.append(([(norm, [param.grad for param in own.parameters()])], list(own.parameters())))
        return results

    for got, expected in run_ranks(size, rank):
        assert got[0][0][1][0].is_sparse
        (norm, (sparse, *dense)), (other, (other_sparse, *other_dense)) = got[0][0], expected[0][0]
        assert torch.equal(sparse.to_dense(), other_sparse.to_dense())
        assert_same_bits(([(norm, dense)], got[1]), ([(other, other_dense)], expected[1]))


def test_a_grad_scaler_unscales_before_and_a_step_that_it_skips_leaves_the_norm():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2))
        optimizer = wrap(group, [param], max_norm=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        norms = []
        for value in (3.0, math.inf, 0.1):
            optimizer.zero_grad()
            scaler.scale((param * torch.tensor([value, 4.0 / 3.0 * value])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            norms.append(optimizer.grad_norm.item())
        return norms, param.tolist()

    for norms, value in run_ranks(2, rank):
        assert norms == pytest.approx([5.0, 5.0, 0.5 / 3.0])
        assert value == pytest.approx([-0.6 - 0.1, -0.8 - 0.4 / 3.0], rel=1e-5)


def test_a_closure_and_a_step_after_synchronize_clip_once():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2))
        optimizer = wrap(group, [param], max_norm=1.0)
        assert optimizer.grad_norm is None

        def closure() -> float:
            optimizer.zero_grad()
            (param * torch.tensor([3.0, 4.0])).sum().backward()
            return 7.0

        assert optimizer.step(closure) == 7.0
        closure()
        optimizer.synchronize()
        assert param.grad.tolist() == [3.0, 4.0], "clipped in the step, since a GradScaler unscales before"
        with optimizer.skip_synchronize():
            optimizer.step()
        return optimizer.grad_norm.item(), param.tolist()

    for norm, value in run_ranks(2, rank):
        assert norm == 5.0
        assert value == pytest.approx([-1.2, -1.6], rel=1e-5)


def test_clipping_takes_no_collective():
    model, (x, y) = build(Plain), batches(2, 1, 8)

    def rank(group: Group):
        calls = []
        for max_norm in (None, 0.01):
            own = copy.deepcopy(model)
            optimizer = hvd.DistributedOptimizer(
                sgd(list(own.parameters())), bucket_cap_mb=0.0002, process_set=set_of(group), max_norm=max_norm
            )
            optimizer._reducer.connect()
            for step in range(2):
                optimizer.zero_grad()
                group.engine.calls.clear()
                part_loss(own, x[step, 0], y[step, 0], group.rank, group.size).backward()
                optimizer.step()
            calls.append(sorted(group.engine.calls))
            optimizer.close()
        return calls

    for plain, clipped in run_ranks(2, rank, counting):
        assert plain == clipped != []


def test_most_norms_are_measured_while_other_buckets_are_sent():
    def rank(group: Group):
        params = [nn.Parameter(torch.ones(64)) for _ in range(3)]
        optimizer = wrap(group, params, bucket_cap_mb=0.0002, max_norm=1.0)
        measured = []
        clipper = optimizer._clipper
        clip = clipper.clip
        clipper.clip = lambda params: (measured.append(len(clipper._measured)), clip(params))
        sum(param.sum() for param in params).backward()
        optimizer.step()
        return measured

    assert run_ranks(2, rank) == [[3], [3]]


def test_a_rank_outside_the_process_set_clips_its_own_gradients():
    def rank(number: int):
        half = hvd.add_process_set([0, 1])
        param = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), process_set=half, max_norm=1.0)
        (param * torch.tensor([3.0, 4.0]) * (1 + number)).sum().backward()
        optimizer.step()
        return optimizer.grad_norm.item(), param.tolist()

    for (norm, value), expected in zip(run_worlds(3, rank), [7.5, 7.5, 15.0], strict=True):
        assert norm == expected
        assert value == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_a_pickled_optimizer_still_clips():
    def rank(number: int):
        param = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), max_norm=1.0)
        again = pickle.loads(pickle.dumps(optimizer))
        (copied,) = again.param_groups[0]["params"]
        (copied * torch.tensor([3.0, 4.0])).sum().backward()
        again.step()
        return again.grad_norm.item()

    assert run_worlds(2, rank) == [5.0, 5.0]


def test_a_parameter_that_leaves_the_groups_after_backward_is_no_part_of_the_norm():
    def rank(group: Group) -> tuple[float, float]:
        stays, leaves, comes = (nn.Parameter(torch.zeros(1)) for _ in range(3))
        inner = torch.optim.SGD([stays, leaves], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group), max_norm=1.0)
        for step in range(2):
            optimizer.zero_grad()
            (3.0 * stays + 4.0 * leaves).sum().backward()
            if step == 1:
                inner.param_groups[0]["params"][1] = comes
            optimizer.step()
            if step == 0:
                assert optimizer.grad_norm.item() == 5.0
        return optimizer.grad_norm.item(), stays.item()

    assert run_ranks(2, rank) == [(3.0, pytest.approx(-0.6 - 1.0))] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 0}, "max_norm=0 is not a positive number"),
        ({"max_norm": -1.0}, r"max_norm=-1\.0 is not a positive number"),
        ({"max_norm": math.nan}, "max_norm=nan is not a positive number"),
        ({"max_norm": True}, "max_norm=True is not a positive number"),
        ({"max_norm": "1"}, "max_norm='1' is not a positive number"),
        ({"max_norm": 1.0, "step_on_arrival": True}, "does not work with step_on_arrival=True"),
        ({"max_norm": 1.0, "op": hvd.Adasum}, "does not work with op=hvd.Adasum"),
    ],
    ids=str,
)
def test_what_cannot_be_clipped_is_refused(options, words):
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2))
        with pytest.raises(ValueError, match=words):
            wrap(group, [param], **options)

    run_ranks(1, rank)


def test_ranks_with_different_norms_are_told():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2))
        optimizer = wrap(group, [param], max_norm=1.0 + group.rank)
        param.sum().backward()
        optimizer.step()

    for error in attempt_ranks(2, rank):
        assert isinstance(error, hvd.MismatchError)
        assert "max_norm" in str(error)


def test_who_clips_what_is_being_averaged_is_told_the_short_way():
    def rank(group: Group) -> None:
        model = nn.Linear(2, 1)
        for param in model.parameters():
            nn.init.ones_(param)
        optimizer = wrap(group, model, lr=0.1)
        for _ in range(2):  # in the first step nothing is sent before the step
            model(torch.ones(1, 2)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    for error in attempt_ranks(2, rank):
        assert "leave clip_grad_norm_ out, and give hvd.DistributedOptimizer(..., max_norm=...)" in str(error)
