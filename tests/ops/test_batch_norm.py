"""SyncBatchNorm on several ranks gives what one process computes on the whole batch: output, gradients and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import take_steps
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.environment import Environment
from hvdlite.ops.batch_norm import measure, merge

SHAPES = {2: (), 3: (5,), 4: (3, 4), 5: (2, 3, 2)}
# The number of samples of each rank.
BATCHES = {1: [7], 2: [3, 5], 3: [4, 0, 2], 4: [1, 6, 0, 3]}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def one_process(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Returns the output, the gradients of input, weight and bias, and the buffers of a layer on a whole batch."""
    x = x.detach().requires_grad_(True)
    y = layer(x)
    y.backward(grad)
    params = [p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *params, *(b.clone() for b in layer.buffers())]


def together(size: int, layer: nn.Module, x: Tensor, grad: Tensor, steps: int = 1) -> list[Tensor]:
    """Returns the same from ranks that have a part of the batch each; the gradients of parameters are summed."""

    def rank(own: int) -> list[Tensor]:
        mine = copy.deepcopy(layer)
        for _ in range(steps):
            mine.zero_grad()
            result = one_process(mine, x.split(BATCHES[size])[own], grad.split(BATCHES[size])[own])
        return result

    outputs, inputs, *others = zip(*run_worlds(size, rank), strict=True)
    params = len(list(layer.parameters()))
    for buffer in others[params:]:
        assert all(torch.equal(each, buffer[0]) for each in buffer)
    summed = [torch.stack(grads).sum(0) for grads in others[:params]]
    return [torch.cat(outputs), torch.cat(inputs), *summed, *(buffer[0] for buffer in others[params:])]


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def sample(size: int, dims: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(dims)
    shape = (sum(BATCHES[size]), channels, *SHAPES[dims])
    return torch.randn(shape) * 2 + 1, torch.randn(shape)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_ranks_with_unequal_batches_are_one_process_on_the_whole(size, dims):
    x, grad = sample(size, dims)
    plain, ours = PLAIN[dims](3), hvd.SyncBatchNorm(3)
    for layer in (plain, ours):
        nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(1))
    assert_same(together(size, ours, x, grad), one_process(plain, x, grad), 1e-6)
    assert_same(
        together(size, ours.double(), x.double(), grad.double()),
        one_process(copy.deepcopy(plain).double().apply(lambda m: m.reset_running_stats()), x.double(), grad.double()),
        1e-12,
    )


def test_more_dimensions_than_torchs_layers_know_are_as_many_values():
    x, grad = sample(2, 4)
    folded = (sum(BATCHES[2]), 3, *SHAPES[4][:1], 1, *SHAPES[4][1:], 1)
    plain, ours, same = PLAIN[4](3), hvd.SyncBatchNorm(3), hvd.SyncBatchNorm(3)
    wanted = together(2, ours, x, grad)
    got = together(2, same, x.view(folded), grad.view(folded))
    assert_same([one.reshape(other.shape) for one, other in zip(got, wanted, strict=True)], wanted, 1e-6)
    assert_same(wanted, one_process(plain, x, grad), 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_every_option_of_batch_norm_means_the_same(options):
    x, grad = sample(3, 4)
    plain = nn.BatchNorm2d(3, **options)
    for _ in range(3):
        plain.zero_grad()
        wanted = one_process(plain, x, grad)
    assert_same(together(3, hvd.SyncBatchNorm(3, **options), x, grad, steps=3), wanted, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half_layer", [False, True])
def test_half_inputs_are_computed_in_float32(dtype, half_layer):
    x, grad = (tensor.to(dtype) for tensor in sample(3, 4))
    ours = hvd.SyncBatchNorm(3)
    wanted = one_process(nn.BatchNorm2d(3), x.float(), grad.float())
    got = together(3, ours.to(dtype) if half_layer else ours, x, grad)
    assert got[0].dtype == got[1].dtype == dtype
    assert got[2].dtype == (dtype if half_layer else torch.float32)
    one_rounding = torch.finfo(dtype).eps
    assert_same(got[:2], wanted[:2], one_rounding)
    # On each rank, a sum of float16 values is rounded once.
    assert_same(got[2:], wanted[2:], 3 * one_rounding if half_layer else 1e-5)


def test_values_far_from_zero_lose_no_more_than_in_one_process():
    x, grad = sample(4, 4)
    x = x.mul(0.01).add(1000)
    exact = one_process(nn.BatchNorm2d(3).double(), x.double(), grad.double())
    alone = one_process(nn.BatchNorm2d(3), x, grad)
    got = together(4, hvd.SyncBatchNorm(3), x, grad)
    for ours, theirs, wanted in zip(got, alone, exact, strict=True):
        assert (ours - wanted).abs().max() <= 1.5 * (theirs - wanted).abs().max() + 1e-6


def test_moments_of_parts_merge_to_those_of_the_whole_however_far_apart_they_are():
    parts = [torch.randn(n, 2, 3, dtype=torch.float64) + offset for n, offset in ((4, 1e6), (0, 0), (9, -1e6), (1, 0))]
    whole, merged = torch.cat(parts), merge([measure(part) for part in parts])
    assert merged.count == whole.numel() // 2
    torch.testing.assert_close(merged.mean, whole.mean([0, 2]), rtol=1e-14, atol=0)
    torch.testing.assert_close(merged.unbiased_variance, whole.var([0, 2]), rtol=1e-14, atol=0)


def test_layouts_are_kept_and_gradients_of_any_layout_are_taken():
    def rank(own: int) -> Any:
        layer = hvd.SyncBatchNorm(3)
        x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(True)
        y = layer(x)
        y.sum().backward()  # a gradient without strides
        expected = one_process(layer, x.detach(), torch.ones_like(y))[1]
        strided = torch.randn(3, 2, 4, 5).transpose(0, 1)
        return (
            y.is_contiguous(memory_format=torch.channels_last),
            x.grad.is_contiguous(memory_format=torch.channels_last),
            torch.allclose(x.grad, expected, atol=1e-6),
            torch.allclose(layer(strided), layer(strided.contiguous()), atol=1e-6),
        )

    assert run_worlds(2, rank) == [(True,) * 4] * 2


def test_frozen_inputs_get_no_gradient_and_cost_no_operation():
    def rank(own: int) -> Any:
        layer = hvd.SyncBatchNorm(3)
        y = layer(torch.randn(2 + own, 3))
        if own == 0:
            # The other rank has no backward pass at all.
            y.square().sum().backward()
            assert layer.weight.grad is not None
        hvd.barrier()
        layer.weight.requires_grad_(False)
        x = torch.randn(2, 3, requires_grad=True)
        layer(x).square().sum().backward()
        return x.grad is not None and layer.bias.grad is not None

    assert run_worlds(2, rank) == [True, True]


def test_in_evaluation_it_is_plain_batch_norm_and_waits_for_nobody():
    def rank(own: int) -> Any:
        layer = hvd.SyncBatchNorm(3)
        layer.running_mean.fill_(0.5)
        plain = nn.BatchNorm1d(3)
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(4, 3)
        layer.eval(), plain.eval()
        return own == 0 or torch.equal(layer(x), plain(x))

    assert run_worlds(2, rank) == [True, True]


def test_a_batch_without_any_sample_changes_nothing_and_one_value_is_not_enough():
    def rank(own: int) -> Any:
        layer = hvd.SyncBatchNorm(3)
        before = copy.deepcopy(layer.state_dict())
        x = torch.empty(0, 3, 4, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == x.shape
        assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(torch.randn(own, 3))
        return layer(torch.randn(1, 3)).shape

    assert run_worlds(2, rank) == [torch.Size([1, 3])] * 2


def test_backward_passes_pair_up_with_their_forwards_in_whatever_order():
    """One layer is called twice; gradients are requested separately, in another order than the calls."""
    xs = [torch.randn(6, 3, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    wanted = [one_process(nn.BatchNorm1d(3), x, x.square())[1] for x in xs]

    def rank(own: int) -> Any:
        layer = hvd.SyncBatchNorm(3)
        parts = [x.chunk(2)[own].clone().requires_grad_(True) for x in xs]
        outputs = [layer(part) for part in parts]
        for part, y in zip(parts, outputs, strict=True):
            y.backward(part.detach().square())
        return [part.grad for part in parts]

    for number, grads in enumerate(zip(*run_worlds(2, rank), strict=True)):
        torch.testing.assert_close(torch.cat(grads), wanted[number], rtol=1e-6, atol=1e-6)


def test_a_rank_may_have_built_more_layers_than_others():
    def rank(own: int) -> Any:
        extra = [hvd.SyncBatchNorm(5) for _ in range(own)]
        layer = hvd.SyncBatchNorm(3)
        for each in extra:
            each.eval()(torch.randn(2, 5))
        return layer(torch.full((1, 3), float(own))).mean().item()

    assert sum(run_worlds(3, rank)) == pytest.approx(0, abs=1e-6)


def test_only_the_process_set_synchronizes_and_others_normalize_their_own():
    x = torch.randn(9, 3)

    def rank(own: int) -> Any:
        process_set = hvd.add_process_set([0, 2])
        layer = hvd.SyncBatchNorm(3, process_set=process_set)
        # A copy uses the same process set.
        return copy.deepcopy(layer)(x.chunk(3)[own])

    outer, middle, last = run_worlds(3, rank)
    wanted = nn.BatchNorm1d(3)(torch.cat([x[:3], x[6:]]))
    torch.testing.assert_close(torch.cat([outer, last]), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(middle, nn.BatchNorm1d(3)(x[3:6]), rtol=1e-6, atol=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.1, momentum=None), nn.Identity())
        self.again = self.norm
        self.flat = nn.ModuleDict({"a": nn.BatchNorm1d(5, affine=False), "b": nn.SyncBatchNorm(6)})


def test_converting_keeps_parameters_buffers_flags_hooks_and_shared_layers():
    net = Net()
    net.norm.weight.requires_grad_(False)
    net.body[1].eval()
    seen: list[int] = []
    remover = net.norm.register_forward_hook(lambda *_: seen.append(1))
    params, buffers, keys = list(net.parameters()), list(net.buffers()), list(net.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(net)
    assert converted is net
    layers = [net.norm, net.body[1], net.flat["a"], net.flat["b"]]
    assert all(type(layer) is hvd.SyncBatchNorm for layer in layers)
    assert all(a is b for a, b in zip(params, net.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, net.buffers(), strict=True))
    assert list(net.state_dict()) == keys
    assert net.again is net.norm
    assert [layer.training for layer in layers] == [True, False, True, True]
    assert (net.body[1].eps, net.body[1].momentum, net.norm.weight.requires_grad) == (0.1, None, False)
    assert [layer.name for layer in layers] == ["norm", "body.1", "flat.a", "flat.b"]
    hvd.init()
    net.norm(torch.randn(2, 3, 1, 1))
    remover.remove()
    net.norm(torch.randn(2, 3, 1, 1))
    assert seen == [1]
    lone = nn.BatchNorm1d(2)
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(lone).weight is lone.weight
    hvd.shutdown()


def test_layers_that_would_lose_something_are_not_converted():
    class WithActivation(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    with pytest.raises(ValueError, match="'1' is a WithActivation, which overrides forward"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Identity(), WithActivation(2)))
    with pytest.raises(ValueError, match="the module is a LazyBatchNorm1d without initialized parameters"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match=r"process_set=\[0\] is not a hvd\.ProcessSet"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2), [0])


def test_a_converted_network_trains_as_one_process_on_the_whole_batch():
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)
    )
    x = torch.randn(3, 8, 2, 4, 4)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> dict[str, Tensor]:
        take_steps(optimizer, lambda batch: net(batch).pow(3).mean(), batches)
        return net.state_dict()

    whole = copy.deepcopy(first)
    wanted = train(whole, torch.optim.SGD(whole.parameters(), lr=0.1), x)

    def rank(own: int) -> Any:
        net = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(first))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        state = train(net, optimizer, x.chunk(2, 1)[own])
        optimizer.close()
        return state

    for state in run_worlds(2, rank):
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, "Mismatched data types"),
        ({"layer": {"num_features": 4}, "x": torch.zeros(2, 4)}, "Mismatched num features"),
        ({"layer": {"eps": 0.5}}, "Mismatched eps"),
        ({"x": torch.zeros(2, 3).requires_grad_(True)}, "Mismatched input requires grad"),
    ],
    ids=["dtype", "num_features", "eps", "requires_grad"],
)
def test_ranks_that_normalize_different_things_are_told(change, words):
    def rank(own: int) -> Any:
        changed = change if own == 1 else {}
        layer = hvd.SyncBatchNorm(**{"num_features": 3, "name": "stem", **changed.get("layer", {})})
        with pytest.raises(hvd.MismatchError, match=rf"{words}.*sync_batch_norm of 'stem'.*rank 1 \(node1\)"):
            layer(changed.get("x", torch.zeros(2, 3)))

    run_worlds(2, rank)


def test_without_the_check_ranks_normalize_together_all_the_same():
    def rank(own: int) -> Any:
        x = torch.full((1 + own, 3), float(own)).requires_grad_(True)
        y = hvd.SyncBatchNorm(3)(x)
        y.pow(3).sum().backward()
        return torch.cat([y.detach(), x.grad])

    environments = [Environment(stall_check=False, check=check) for check in (True, False)]
    checked, unchecked = (run_worlds(2, rank, environment) for environment in environments)
    assert all(torch.equal(one, other) for one, other in zip(checked, unchecked, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_layers_that_wait_for_each_other_are_told_by_name(backward):
    def rank(own: int) -> Any:
        layers = [hvd.SyncBatchNorm(3, name=name) for name in ("left", "right")]
        if not backward:
            layers[own](torch.zeros(2, 3))
        outputs = [layer(torch.zeros(2, 3, requires_grad=True)) for layer in layers]
        outputs[own].sum().backward()

    for outcome in attempt_worlds(2, rank):
        assert isinstance(outcome, hvd.MismatchError)
        assert "'left" in str(outcome)
        assert "'right" in str(outcome)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(3), "expected at least 2D input .got 1D input."),
        (torch.zeros(2, 4), r"'stem': expected 3 channels.*shape \(2, 4\)"),
    ],
)
def test_inputs_that_do_not_fit_the_layer_are_named(x, words):
    with pytest.raises(ValueError, match=words):
        hvd.SyncBatchNorm(3, name="stem")(x)
