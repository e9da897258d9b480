"""A DistributedOptimizer does all that the wrapped optimizer does, with averaged gradients."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from models import CLASSES, FEATURES, Plain, batches, build, part_loss, sgd, train_alone
from ranks import attempt_ranks, counting, run_ranks, set_of
from torch import nn
from training import take_steps, wrap

import hvdlite as hvd
from hvdlite.calls.generation import Reducers
from hvdlite.comm import deferred_close
from hvdlite.comm.group import Group


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def backward(param: nn.Parameter, value: float) -> None:
    (param * value).sum().backward()


def test_gradients_are_views_of_one_buffer_and_stay_so_over_steps_and_zero_grad():
    def rank(group: Group) -> list[int]:
        a, b = weight(), weight()
        optimizer = wrap(group, [a, b])
        places = []
        for step in range(3):
            (a.sum() + b.sum()).backward()
            assert a.grad.untyped_storage().data_ptr() == b.grad.untyped_storage().data_ptr()
            places.append(a.grad.data_ptr())
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
            assert (a.grad is None) == (step != 1)
        return places

    for places in run_ranks(2, rank):
        assert len(set(places)) == 1


# The collectives of an optimizer's first step besides its buckets: the comparison of parameters.
COMPARISON = 1


def gan_step(generator, discriminator, optimizers, rank: int, drop) -> None:
    """One step of each. The generator's pass leaves gradients in the discriminator, until ``drop`` is called."""
    of_generator, of_discriminator = optimizers
    (discriminator(torch.tensor([0, rank + 1])).sum() * (rank + 1.0)).backward()
    of_discriminator.step()
    of_discriminator.zero_grad()
    (discriminator(torch.tensor([0])).sum() * 100.0 * (rank + 1) + generator.sum()).backward()
    of_generator.step()
    of_generator.zero_grad()
    drop()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16], ids=["", "fp16"])
def test_a_pass_that_adds_to_what_another_optimizers_pass_has_left_is_an_error(size, sparse, compression):
    """The sum would depend on how far its average was."""

    def rank(group: Group) -> list[float]:
        table = nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=sparse)
        generator = weight()
        optimizers = [wrap(group, params, compression=compression) for params in ([generator], table.parameters())]
        for drop in (table.zero_grad, optimizers[1].zero_grad, lambda: None):
            gan_step(generator, table, optimizers, group.rank, drop)
        words = r"was added to gradients that another optimizer's backward pass .* call zero_grad\(\)"
        with pytest.raises(hvd.GradientError, match=words):
            table(torch.tensor([0])).sum().backward()
        optimizers[1].zero_grad()
        gan_step(generator, table, optimizers, group.rank, optimizers[1].zero_grad)
        return table.weight[0].tolist()

    # Four steps of the discriminator, each with the average of (rank + 1) for its row 0.
    mean = 1.0 if size == 1 else 1.5
    assert run_ranks(size, rank) == [[-4 * mean] * 2] * size


def test_gradients_of_another_optimizers_pass_that_were_dropped_cost_no_gradient_that_it_did_not_have():
    """The first gradient of the discriminator's own pass is one that the generator's pass has not left there."""

    def rank(group: Group) -> list[list[float]]:
        generator, left, other = weight(), weight(), weight()
        optimizers = [wrap(group, [generator]), wrap(group, [left, other])]
        for _ in range(3):
            (generator.sum() + left.sum() * 100.0).backward()
            optimizers[0].step()
            generator.grad = left.grad = None
            ((left.sum() + other.sum()) * (group.rank + 1)).backward()
            optimizers[1].step()
            left.grad = other.grad = None
        return [left.tolist(), other.tolist()]

    assert run_ranks(2, rank) == [[[-4.5, -4.5]] * 2] * 2


@pytest.mark.parametrize("adds_to", ["what is dropped", "the averages"])
def test_averages_of_the_last_step_stay_where_gradients_of_another_optimizers_pass_are_dropped(adds_to):
    """As without the other optimizer, those that were not set to zero count in the next step."""

    def rank(group: Group) -> list[float]:
        other, averaged, dropped = weight(), weight(), weight()
        of_other, optimizer = wrap(group, [other]), wrap(group, [averaged, dropped])
        (averaged.sum() * (group.rank + 1.0)).backward()
        optimizer.step()
        (other.sum() + dropped.sum() * 100.0).backward()
        of_other.step()
        dropped.grad = None
        if adds_to == "the averages":
            dropped.grad = torch.ones_like(dropped)
        (dropped if adds_to == "what is dropped" else averaged).sum().backward()
        optimizer.step()
        return [averaged.grad[0].item(), dropped.grad[0].item()]

    averages = {"what is dropped": [1.5, 1.0], "the averages": [2.5, 1.0]}[adds_to]
    assert run_ranks(2, rank) == [averages] * 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("replaces", [True, False])
def test_a_pass_after_only_some_of_what_another_optimizers_pass_has_left_were_dropped_is_an_error(op, replaces):
    """Those that stay may be averages by now, and would be averaged again."""

    def rank(group: Group) -> list[float]:
        other, kept, dropped = weight(), weight(), weight()
        of_other, optimizer = wrap(group, [other]), wrap(group, [kept, dropped], op=op)
        (other.sum() + kept.sum() + dropped.sum()).backward()
        of_other.step()
        dropped.grad = torch.ones_like(dropped) if replaces else None
        with pytest.raises(hvd.GradientError, match=r"others not \(the first: .*\): call zero_grad\(\)"):
            dropped.sum().backward()
        optimizer.zero_grad()
        (kept.sum() + dropped.sum()).backward()
        optimizer.step()
        return [kept.grad[0].item(), dropped.grad[0].item()]

    assert run_ranks(2, rank) == [[1.0, 1.0] if op is hvd.Average else [2.0, 2.0]] * 2


@pytest.mark.parametrize("first", ["by hand", "again"])
def test_gradients_set_by_hand_stay_where_those_of_another_optimizers_pass_are_dropped(first):
    """What the program sets, and the pass adds to, belongs to the next step, whichever hook drops the others."""

    def rank(group: Group) -> list[float]:
        other, again, by_hand = weight(), weight(), weight()
        of_other, optimizer = wrap(group, [other]), wrap(group, [again, by_hand])
        (other.sum() + again.sum() * 100.0).backward()
        of_other.step()
        other.grad = again.grad = None
        by_hand.grad = torch.full_like(by_hand, group.rank + 1.0)
        # Autograd comes first to what is used last.
        losses = [by_hand.sum() * 10.0]
        if group.rank == 1:
            losses.insert(1 if first == "again" else 0, again.sum() * 4.0)
        sum(losses).backward()
        optimizer.synchronize()
        return [again.grad[0].item(), by_hand.grad[0].item()]

    assert run_ranks(2, rank) == [[2.0, 11.5]] * 2


def test_gradients_of_another_optimizers_pass_may_be_replaced_where_ranks_then_use_different_parameters():
    def rank(group: Group) -> list[list[float]]:
        generator, replaced, other = weight(), weight(), weight()
        optimizers = [wrap(group, [generator]), wrap(group, [replaced, other])]
        for _ in range(3):
            (generator.sum() + replaced.sum() * 100.0).backward()
            optimizers[0].step()
            generator.grad = None
            replaced.grad = torch.full((2,), 4.0 * group.rank)
            loss = replaced.sum() * (group.rank + 1)
            (loss + other.sum() * 8.0 if group.rank == 0 else loss).backward()
            optimizers[1].step()
            replaced.grad = other.grad = None
        return [replaced.tolist(), other.tolist()]

    # The averages of 1 and 2 + 4, and of 8 and nothing.
    assert run_ranks(2, rank) == [[[-10.5, -10.5], [-12.0, -12.0]]] * 2


def test_gradients_of_another_optimizers_pass_that_were_set_to_zeros_in_place_are_not_added_to():
    def rank(group: Group) -> None:
        generator, table = weight(), nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False)
        optimizers = [wrap(group, params) for params in ([generator], table.parameters())]
        gan_step(generator, table, optimizers, group.rank, lambda: table.zero_grad(set_to_none=False))
        with pytest.raises(hvd.GradientError, match="call zero_grad"):
            table(torch.tensor([0])).sum().backward()

    run_ranks(2, rank)


def test_a_step_is_one_all_reduce_per_bucket_and_after_the_first_nothing_else():
    model, (x, y) = build(Plain), batches(3, 1, 8)

    def rank(group: Group):
        own = copy.deepcopy(model)
        optimizer = wrap(group, own.parameters())
        optimizer._reducer.connect()
        group.engine.calls.clear()
        per_step = []
        for step in range(3):
            optimizer.zero_grad()
            part_loss(own, x[step, 0], y[step, 0], group.rank, group.size).backward()
            optimizer.step()
            per_step.append([name for name, _ in group.engine.calls])
            group.engine.calls.clear()
        return per_step

    for first, *others in run_ranks(2, rank, counting):
        assert first == ["allreduce"] * (1 + COMPARISON)
        assert others == [["allreduce"]] * 2


def test_accumulation_communicates_once_per_step():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param], backward_passes_per_step=3)
        optimizer._reducer.connect()
        group.engine.calls.clear()
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                backward(param, 1.0 + group.rank)
            optimizer.step()
        return len(group.engine.calls), param.tolist()

    # Each step subtracts 3 × (1 + 2) / 2.
    assert run_ranks(2, rank, counting) == [(2 + COMPARISON, [-9.0, -9.0])] * 2


def test_an_epoch_whose_length_is_no_multiple_of_the_accumulation_steps_with_what_there_is():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param], backward_passes_per_step=3)
        for batch in range(1, 6):
            backward(param, 1.0 + group.rank)
            if batch in (3, 5):
                optimizer.step()
                optimizer.zero_grad()
        return param.tolist()

    assert run_ranks(2, rank) == [[-7.5, -7.5]] * 2


def test_no_sync_only_adds_and_the_next_backward_averages_the_sum():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        optimizer._reducer.connect()
        group.engine.calls.clear()
        with optimizer.no_sync():
            backward(param, 1.0 + group.rank)
            backward(param, 1.0 + group.rank)
        counted = len(group.engine.calls)
        backward(param, 1.0 + group.rank)
        optimizer.step()
        return counted, len(group.engine.calls), param.tolist()

    assert run_ranks(2, rank, counting) == [(0, 1 + COMPARISON, [-4.5, -4.5])] * 2


def test_no_sync_ends_with_its_block_also_when_an_exception_does():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        with pytest.raises(RuntimeError, match="inside"), optimizer.no_sync():
            raise RuntimeError("inside")
        backward(param, 1.0 + group.rank)
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.5, -1.5]] * 2


def test_clipping_between_synchronize_and_step_clips_the_average_and_reduces_once():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        optimizer._reducer.connect()
        group.engine.calls.clear()
        for _ in range(2):
            optimizer.zero_grad()
            backward(param, 3.0 + 2 * group.rank)
            optimizer.synchronize()
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_([param], 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        return norm.item(), len(group.engine.calls), param.tolist()

    expected = -2 / 2**0.5
    for norm, calls, value in run_ranks(2, rank, counting):
        assert calls == 2 + COMPARISON
        assert norm == pytest.approx(4 * 2**0.5)
        assert value == pytest.approx([expected, expected], rel=1e-5)


def test_a_step_after_synchronize_does_not_reduce_again_even_without_skip_synchronize():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        optimizer._reducer.connect()
        group.engine.calls.clear()
        backward(param, 1.0 + group.rank)
        optimizer.synchronize()
        optimizer.step()
        return len(group.engine.calls), param.tolist()

    assert run_ranks(2, rank, counting) == [(1 + COMPARISON, [-1.5, -1.5])] * 2


def test_clipping_by_parameter_group_needs_synchronize_as_all_clipping_does():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        backward(param, 3.0 + 2 * group.rank)
        optimizer.synchronize()
        norms = [nn.utils.clip_grad_norm_(entry["params"], 1.0).item() for entry in optimizer.param_groups]
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        backward(param, 1.0)
        for entry in optimizer.param_groups:
            nn.utils.clip_grad_norm_(entry["params"], 1.0)
        with pytest.raises(hvd.GradientError, match=r"changed while it was being averaged.*call optimizer.synchronize"):
            optimizer.step()
        return norms

    for norms in run_ranks(2, rank):
        assert norms == pytest.approx([4 * 2**0.5])


@pytest.mark.parametrize("recipe", ["plain", "unscale and clip", "as for Horovod"])
def test_grad_scaler_and_autocast_skip_the_same_steps_on_every_rank(recipe):
    """In the third of four steps, the gradients of one rank overflow: no rank may step."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    x = torch.randn(8, FEATURES)

    def rank(group: Group):
        own = copy.deepcopy(model)
        optimizer = wrap(group, own.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        history = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = own(x.chunk(group.size)[group.rank]).float().square().mean()
            if step == 2 and group.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if recipe == "unscale and clip":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(own.parameters(), 1e6)
                scaler.step(optimizer)
            elif recipe == "as for Horovod":
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            history.append((scaler.get_scale(), own.weight.detach().clone()))
        return history

    first, second = run_ranks(2, rank)
    assert [scale for scale, _ in first] == [scale for scale, _ in second] == [1024.0, 1024.0, 512.0, 512.0]
    for (_, a), (_, b) in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first[1][1], first[2][1]), "the step that overflowed was skipped"
    assert not torch.equal(first[2][1], first[3][1])


def test_a_fused_optimizer_under_grad_scaler_steps_with_unscaled_averages():
    def rank(group: Group):
        param = weight()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0, fused=True), process_set=set_of(group))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale((param * (1.0 + group.rank)).sum()).backward()
        scaler.step(optimizer)
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.5, -1.5]] * 2


@pytest.mark.parametrize("style", ["optimizer.zero_grad", "model.zero_grad"])
def test_a_gan_of_two_optimizers_trains_as_in_one_process(style):
    torch.manual_seed(0)
    start_g, start_d = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    noise, real = torch.randn(5, 8, 3, dtype=torch.float64), torch.randn(5, 8, 4, dtype=torch.float64)

    def train(make, rank: int, size: int):
        g, d = copy.deepcopy(start_g), copy.deepcopy(start_d)
        optimizer_g = make(torch.optim.SGD(g.parameters(), lr=0.1))
        optimizer_d = make(torch.optim.SGD(d.parameters(), lr=0.1))
        for step in range(5):
            z, sample = noise[step].chunk(size)[rank], real[step].chunk(size)[rank]
            (optimizer_d if style == "optimizer.zero_grad" else d).zero_grad()
            (d(g(z).detach()).mean() - d(sample).mean() + d.weight.square().sum()).backward()
            optimizer_d.step()
            (optimizer_g if style == "optimizer.zero_grad" else g).zero_grad()
            # Passes through the discriminator, whose gradients are not used.
            (-d(g(z)).mean()).backward()
            optimizer_g.step()
        return [p.detach() for p in [*g.parameters(), *d.parameters()]]

    expected = train(lambda optimizer: optimizer, 0, 1)

    def rank(group: Group):
        return train(lambda o: hvd.DistributedOptimizer(o, process_set=set_of(group)), group.rank, group.size)

    for got in run_ranks(2, rank):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_backward_for_two_optimizers_serves_both():
    def rank(group: Group):
        a, b = weight(), weight()
        first, second = wrap(group, [a]), wrap(group, [b], lr=2.0)
        for _ in range(2):
            first.zero_grad()
            second.zero_grad()
            ((a + b) * (1.0 + group.rank)).sum().backward()
            first.step()
            second.step()
        return a.tolist(), b.tolist()

    assert run_ranks(2, rank) == [([-3.0, -3.0], [-6.0, -6.0])] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(size):
    model = build(Plain)
    model.layers[0].requires_grad_(False)
    x, y = batches(6, 1, 4 * size)

    def train(rank: int | None, group: Group | None):
        own = copy.deepcopy(model)
        optimizer = sgd(list(own.parameters()))
        if group is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, own.named_parameters(), process_set=set_of(group))
        for step in range(6):
            # A layer is frozen at first and thawed at step 2; the other is frozen at 3 and thawed at 5.
            own.layers[0].requires_grad_(step >= 2)
            own.layers[2].requires_grad_(step not in (3, 4))
            optimizer.zero_grad()
            parts = range(size) if group is None else [group.rank]
            losses = [part_loss(own, x[step, 0], y[step, 0], part, size) for part in parts]
            torch.stack(losses).mean().backward()
            optimizer.step()
        return [p.detach() for p in own.parameters()]

    expected = train(None, None)
    for got in run_ranks(size, lambda group: train(group.rank, group)):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_frozen_parameters_take_no_memory_and_one_number_of_traffic():
    def rank(group: Group):
        frozen, trained = nn.Parameter(torch.zeros(1000), requires_grad=False), weight()
        optimizer = wrap(group, [frozen, trained])
        optimizer._reducer.connect()
        group.engine.calls.clear()
        backward(trained, 1.0)
        optimizer.step()
        return group.engine.calls, frozen.grad

    for calls, grad in run_ranks(2, rank, counting):
        assert len(calls) == 2 + COMPARISON
        assert max(numel for _, numel in calls) < 100
        # Whether a gradient has come after all.
        assert calls[1] == ("allreduce", 1)
        assert grad is None


def test_a_parameter_unfrozen_on_one_rank_alone_is_averaged_on_all():
    def rank(group: Group):
        frozen, trained = nn.Parameter(torch.zeros(2), requires_grad=False), weight()
        optimizer = wrap(group, [frozen, trained])
        frozen.requires_grad_(group.rank == 1)
        (frozen.sum() + trained.sum()).backward()
        optimizer.step()
        return frozen.tolist()

    assert run_ranks(2, rank) == [[-0.5, -0.5]] * 2


def test_ranks_whose_gradients_arrive_in_different_orders_still_agree():
    def rank(group: Group):
        params = [weight() for _ in range(6)]
        optimizer = wrap(group, params, bucket_cap_mb=1e-6)
        order = params if group.rank else params[::-1]
        for number, param in enumerate(order):
            index = number if group.rank else 5 - number
            backward(param, 10.0**index * (1 + group.rank))
        optimizer.step()
        return [p[0].item() for p in params]

    expected = [-1.5 * 10.0**i for i in range(6)]
    for got in run_ranks(2, rank):
        assert got == pytest.approx(expected)


def test_a_rank_without_any_gradient_takes_part_in_the_step():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        for _ in range(2):
            optimizer.zero_grad()
            if group.rank == 0:
                backward(param, 2.0)
            optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-2.0, -2.0]] * 2


def test_a_parameter_that_no_rank_used_keeps_no_gradient_and_is_not_stepped():
    def rank(group: Group):
        unused, used = nn.Parameter(torch.ones(2)), weight()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([unused, used], lr=1.0, weight_decay=0.5), process_set=set_of(group)
        )
        backward(used, 1.0)
        optimizer.step()
        return unused.grad, unused.tolist()

    assert run_ranks(2, rank) == [(None, [1.0, 1.0])] * 2


def test_a_closure_is_called_once_and_its_gradients_are_averaged():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        calls = []

        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = (param * (1.0 + group.rank)).sum() + group.rank
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(2)]
        return len(calls), losses, param.tolist()

    assert run_ranks(2, rank) == [(2, [0.0, -3.0], [-3.0, -3.0]), (2, [1.0, -5.0], [-3.0, -3.0])]


@pytest.mark.parametrize("made", ["before", "after"])
def test_lr_schedulers_made_before_or_after_wrapping_work(made, recwarn):
    def rank(group: Group):
        param = weight()
        inner = torch.optim.SGD([param], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5) if made == "before" else None
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group))
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            backward(param, 1.0)
            optimizer.step()
            scheduler.step()
        return param.tolist(), optimizer.param_groups[0]["lr"]

    assert run_ranks(2, rank) == [([-1.75, -1.75], 0.125)] * 2
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_the_wrapped_optimizer_keeps_its_state_and_is_an_optimizer():
    def rank(group: Group):
        param = weight()
        inner = torch.optim.SGD([param], lr=1.0, momentum=0.5)
        backward(param, 1.0)
        inner.step()
        optimizer = hvd.DistributedOptimizer(inner, process_set=set_of(group))
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.state is inner.state
        assert optimizer.defaults["momentum"] == 0.5
        assert optimizer.param_groups is inner.param_groups
        optimizer.zero_grad()
        backward(param, 1.0)
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-2.5, -2.5]] * 2


def test_state_dict_is_the_plain_optimizers_and_resumes_either_way():
    def rank(group: Group):
        results = []
        for resume_wrapped in (False, True):
            param = weight()
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam([param], lr=0.1), process_set=set_of(group))
            backward(param, 1.0 + group.rank)
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            other = nn.Parameter(param.detach().clone())
            fresh = torch.optim.Adam([other], lr=0.5)
            resumed = hvd.DistributedOptimizer(fresh, process_set=set_of(group)) if resume_wrapped else fresh
            resumed.load_state_dict(saved)
            for each, p in ((optimizer, param), (resumed, other)):
                each.zero_grad()
                backward(p, 2.0)
                each.step()
            results.append(torch.equal(param, other))
        return results

    assert run_ranks(2, rank) == [[True, True]] * 2


def test_step_hooks_registered_on_the_wrapper_see_averages():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(param.grad.tolist()))
        backward(param, 1.0 + group.rank)
        optimizer.step()
        return seen

    assert run_ranks(2, rank) == [[[1.5, 1.5]]] * 2


def test_a_parameter_group_added_later_is_averaged_too():
    def rank(group: Group):
        a, b = weight(), weight()
        optimizer = wrap(group, [a])
        optimizer.add_param_group({"params": [b], "lr": 2.0})
        (a.sum() + b.sum() * (1 + group.rank)).backward()
        optimizer.step()
        return a.tolist(), b.tolist()

    assert run_ranks(2, rank) == [([-1.0, -1.0], [-3.0, -3.0])] * 2


def test_names_that_the_optimizer_was_built_with_are_used():
    def rank(group: Group):
        model = nn.Linear(2, 2)
        optimizer = wrap(group, model.named_parameters())
        return [name for name, _ in optimizer._groups.named]

    assert run_ranks(2, rank) == [["weight", "bias"]] * 2


def test_after_close_backward_communicates_nothing_and_no_hook_remains():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        optimizer.close()
        group.engine.calls.clear()
        backward(param, 1.0)
        return len(group.engine.calls), len(param._post_accumulate_grad_hooks or {})

    assert run_ranks(2, rank, counting) == [(0, 0)] * 2


def test_after_deletion_no_hook_remains():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        hooked = len(param._post_accumulate_grad_hooks)
        del optimizer
        gc.collect()
        deferred_close.wait_until_closed()
        return hooked, len(param._post_accumulate_grad_hooks or {})

    assert run_ranks(2, rank) == [(1, 0)] * 2


def test_of_a_closed_optimizer_one_collection_frees_parameters_and_buckets():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        backward(param, 1.0)
        optimizer.step()
        optimizer.close()
        return [weakref.ref(each) for each in (param, optimizer._reducer, param.grad)]

    by_rank = run_ranks(2, rank)
    # At a moment when no rank collects garbage, because then this collection would do nothing.
    gc.collect()
    assert [[ref() for ref in refs] for refs in by_rank] == [[None] * 3] * 2


def test_an_optimizer_that_the_collector_finds_is_closed_by_no_thread_of_the_program(monkeypatch):
    own, closing = set(), []
    close = Group.close

    def close_and_tell(group: Group) -> None:
        # Those that the collector finds of earlier tests are not counted.
        if id(group) in own:
            closing.append(threading.current_thread().name)
        close(group)

    monkeypatch.setattr(Group, "close", close_and_tell)

    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        reducer = optimizer._reducer
        reducer.connect()
        own.add(id(reducer.engine.group))
        # The garbage collector runs while closing would wait for the thread.
        with reducer.engine._pinning:
            del optimizer
            assert reducer.engine.group is not None
        backward(param, 1.0)
        deferred_close.wait_until_closed()
        return reducer.engine.group, len(param._post_accumulate_grad_hooks or {}), param.grad.tolist()

    assert run_ranks(2, rank) == [(None, 0, [1.0, 1.0])] * 2
    assert closing == ["hvdlite-collected"] * 2


def test_who_leaves_while_another_thread_closes_the_same_waits_for_it():
    # Otherwise the program could end while that thread still holds the engine, and gloo would abort it.
    is_inside, may_go_on = threading.Event(), threading.Event()
    done = []

    def rank(group: Group):
        duplicate = group.duplicate()
        close = duplicate.engine.close

        def close_slowly() -> None:
            if threading.current_thread().name == "closer":
                is_inside.set()
                may_go_on.wait()
                done.append("closed")
            close()

        duplicate.engine.close = close_slowly
        closer = threading.Thread(target=duplicate.close, name="closer")
        closer.start()
        is_inside.wait()
        leaver = threading.Thread(target=lambda: (group.close(), done.append("left")))
        leaver.start()
        # Long enough to be done, if it did not wait.
        leaver.join(0.2)
        may_go_on.set()
        closer.join()
        leaver.join()
        return duplicate in group._duplicates

    assert run_ranks(1, rank) == [False]
    assert done == ["closed", "left"]


def test_what_cannot_be_closed_is_told_and_keeps_nothing_else_open(caplog):
    deferred_close.prepare()
    closed = []
    with caplog.at_level("WARNING", "hvdlite"):
        deferred_close.close_later(lambda: 1 / 0)
        deferred_close.close_later(lambda: closed.append(1))
        deferred_close.wait_until_closed()
    assert closed == [1]
    assert "could not close an object that is no longer referenced: division by zero" in caplog.text


def test_wrapping_again_after_deletion_averages_once():
    def rank(group: Group):
        param = weight()
        for _ in range(2):
            optimizer = wrap(group, [param])
            optimizer.close()
        optimizer = wrap(group, [param])
        backward(param, 1.0 + group.rank)
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.5, -1.5]] * 2


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_pickling_gives_an_optimizer_that_goes_on(how):
    hvd.init()
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
        compression=hvd.Compression.bf16,
    )
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if how == "pickle":
        model2, optimizer2 = pickle.loads(pickle.dumps((model, optimizer)))
    elif how == "deepcopy":
        model2, optimizer2 = copy.deepcopy((model, optimizer))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        model2, optimizer2 = torch.load(file, weights_only=False)
    assert isinstance(optimizer2, hvd.DistributedOptimizer)
    for m, o in ((model, optimizer), (model2, optimizer2)):
        for _ in range(2):
            m(torch.ones(1, 2)).sum().backward()
        o.step()
    assert torch.equal(model.weight, model2.weight)
    optimizer2.zero_grad()
    for _ in range(2):
        model2(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hvd.GradientError, match="backward_passes_per_step=2"):
        model2(torch.ones(1, 2)).sum().backward()


def test_pickling_keeps_each_parameters_name_whatever_the_order_of_groups():
    hvd.init()
    model = nn.Linear(2, 3)
    groups = [{"params": [model.bias]}, {"params": [model.weight], "lr": 0.5}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model.named_parameters())
    again = pickle.loads(pickle.dumps(optimizer))
    assert [(name, tuple(param.shape)) for name, param in again._groups.named] == [("weight", (3, 2)), ("bias", (3,))]


def test_an_optimizer_that_could_not_be_made_leaves_no_hook_behind(monkeypatch):
    def fail(*_: object) -> int:
        raise RuntimeError("no number")

    monkeypatch.setattr(Reducers, "take_number", fail)
    params = [weight() for _ in range(2)]
    for outcome in attempt_ranks(2, lambda group: wrap(group, [params[group.rank]])):
        assert str(outcome) == "no number"
    assert not any(param._post_accumulate_grad_hooks for param in params)


@pytest.mark.parametrize("compile_part", ["model", "layer"])
def test_compiled_models_train_as_eager_ones(compile_part):
    model, (x, y) = build(Plain), batches(3, 1, 8)
    reference = train_alone(model, sgd, x, y, 1)
    hvd.init()
    own = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(list(own.parameters())), own.named_parameters())
    forward = own
    if compile_part == "model":
        forward = torch.compile(own, backend="aot_eager")
    else:
        own.layers[0] = torch.compile(own.layers[0], backend="aot_eager")
    take_steps(optimizer, lambda step: nn.functional.cross_entropy(forward(x[step, 0], 0), y[step, 0]), range(3))
    for a, b in zip(own.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


CLASSES_OF_OPTIMIZERS = [
    name
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
]


@pytest.mark.parametrize("name", CLASSES_OF_OPTIMIZERS)
def test_every_optimizer_of_torch_trains_as_in_one_process(name):
    torch.manual_seed(0)
    start = nn.Linear(FEATURES, CLASSES, bias=False).double()
    x, y = batches(4, 1, 8)

    def make(params):
        return getattr(torch.optim, name)(params, lr=0.01)

    def train(rank: int, size: int, group: Group | None):
        own = copy.deepcopy(start)
        optimizer = make(list(own.parameters()))
        if group is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, own.named_parameters(), process_set=set_of(group))
        for step in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(x[step, 0].chunk(size)[rank]), y[step, 0].chunk(size)[rank]).backward()
            optimizer.step()
        return own.weight.detach()

    expected = train(0, 1, None)
    # Muon computes in bf16, in which the last bit of an average may be a whole bf16 step.
    tolerance = 1e-3 if name == "Muon" else 1e-10
    for got in run_ranks(2, lambda group: train(group.rank, 2, group)):
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_complex_parameters_are_averaged():
    def rank(group: Group):
        param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        optimizer = wrap(group, [param])
        (param * complex(1 + group.rank, 2)).sum().abs().backward()
        optimizer.synchronize()
        return param.grad

    (first, second) = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_gradients_assigned_by_hand_are_averaged():
    def rank(group: Group):
        param = weight()
        optimizer = wrap(group, [param])
        param.grad = torch.full((2,), 1.0 + group.rank)
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, rank) == [[-1.5, -1.5]] * 2


def test_gradients_assigned_by_hand_beside_some_that_are_missing_are_averaged():
    def rank(group: Group):
        params = [weight() for _ in range(4)]
        optimizer = wrap(group, params)
        for param in params[::2]:
            param.grad = torch.full((2,), 1.0 + group.rank)
        optimizer.step()
        return [param.tolist() for param in params]

    assert run_ranks(2, rank) == [[[-1.5, -1.5], [0.0, 0.0]] * 2] * 2


def test_before_the_first_gradient_of_a_step_a_report_counts_no_bucket_as_sent():
    def rank(group: Group) -> list[int]:
        model = nn.Linear(2, 1)
        for param in model.parameters():
            nn.init.ones_(param)
        optimizer = wrap(group, model, lr=0.0)
        sent = []
        for _ in range(2):
            sent.append(optimizer._reducer.step.plan.progress().sent)
            model(torch.ones(1, 2)).sum().backward()
            sent.append(optimizer._reducer.step.plan.progress().sent)
            optimizer.step()
            optimizer.zero_grad()
        return sent

    # The first step opens the engine, and sends nothing before.
    assert run_ranks(2, rank) == [[0, 0, 0, 1]] * 2


def test_a_report_that_reads_more_buckets_than_there_were_a_moment_before_counts_none_as_sent():
    def rank(group: Group) -> tuple[int, int]:
        optimizer = wrap(group, [param := weight()])
        param.sum().backward()
        plan = optimizer._reducer.step.plan
        plan.queue.not_sent = lambda: [*plan.layout.buckets] * 2
        told = plan.progress()
        return told.buckets, told.sent

    assert run_ranks(2, rank) == [(1, 0)] * 2
