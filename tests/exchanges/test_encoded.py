"""Codecs between hosts: all ranks get the same bits, those of the scheme in one process; residuals are kept by name."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from equal_states import assert_same
from fake_hosts import PLACES, on
from ranks import run_ranks
from torch import Tensor, nn
from training import wrap, wrap_numbered
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.compression.codecs import wire_bytes
from hvdlite.optim.arguments import check_codec

CODECS = {"int8": hvd.Compression.int8, "int4": hvd.Compression.int4}

FORMS = {**CODECS, "topk": hvd.Compression.topk(0.05)}

everywhere = pytest.mark.parametrize("place", PLACES)
both = pytest.mark.parametrize("name", CODECS)

each_form = pytest.mark.parametrize("name", FORMS)

NUMEL = 1000


def residuals_of(optimizer: hvd.DistributedOptimizer) -> Any:
    """By name and kind: (first element, scale, values)."""
    return optimizer.state_dict()["hvdlite"]["exchange"]["residuals"]


def gradient(rank: int, step: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step))


def through(codec: Any, values: Tensor, residual: Tensor) -> Tensor:
    """What a wire holds of these values and their residual, which is changed."""
    wire = torch.empty(wire_bytes(codec, values.numel()), dtype=torch.uint8)
    codec.encode_all(values, wire, residual)
    out = torch.empty_like(values)
    codec.add_decoded([wire], out)
    return out


def bounds_of(numel: int, parts: int, multiple: int) -> list[int]:
    each = -(-numel // (parts * multiple)) * multiple
    return [min(part * each, numel) for part in range(parts + 1)]


def in_one_process(place: str, codec: Any, steps: int) -> list[Tensor]:
    """The averages of each step, by the scheme's own description, for one bucket of NUMEL gradients."""
    hosts = PLACES[place]
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    lanes = list(members.values()) if len({len(ranks) for ranks in members.values()}) == 1 else [[r] for r in range(3)]
    padded = -(-NUMEL // 16) * 16
    residuals = {rank: torch.zeros(padded) for rank in range(len(hosts))}
    of_sums = torch.zeros(padded)
    found = []
    for step in range(steps):
        totals = []
        for ranks in lanes:
            total = torch.zeros(padded)
            for rank in ranks:
                total[:NUMEL] += gradient(rank, step)
            totals.append(total)
        result = torch.zeros(padded)
        for local, (start, stop) in enumerate(pairwise(bounds_of(padded, len(lanes[0]), 16))):
            shards = [total[start:stop] for total in totals]
            kept = [residuals[ranks[local]][start:stop] for ranks in lanes]
            parts = [(0, stop - start)]
            if len(lanes) > 2:
                parts = list(pairwise(bounds_of(stop - start, len(lanes), codec.block)))
            for begin, end in parts:
                terms = [through(codec, s[begin:end], k[begin:end]) for s, k in zip(shards, kept, strict=True)]
                total = sum(terms[1:], terms[0])
                if len(lanes) > 2:
                    total = through(codec, total, of_sums[start + begin : start + end])
                result[start + begin : start + end] = total
        found.append(result[:NUMEL] / len(hosts))
    return found


@both
@everywhere
def test_every_rank_gets_the_bits_that_the_scheme_has_in_one_process(place, name):
    codec = CODECS[name]

    def rank(group: Group) -> list[Tensor]:
        param = nn.Parameter(torch.zeros(NUMEL))
        optimizer = wrap_numbered(group, [param], codec)
        found = []
        for step in range(4):
            param.grad = gradient(group.rank, step)
            optimizer.synchronize()
            found.append(param.grad.clone())
            optimizer.zero_grad()
        optimizer.close()
        return found

    expected = in_one_process(place, codec, 4)
    for own in on(place, rank):
        for mine, theirs in zip(own, expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.night(but=9)
@pytest.mark.slow(but=3)
@both
@pytest.mark.parametrize(
    ("place", "options"),
    [
        *[(place, {"bucket_cap_mb": 0.002}) for place in PLACES],
        ("2 hosts of 2", {}),
        ("3 hosts", {"step_on_arrival": True}),
        ("2 hosts", {"op": hvd.Sum}),
    ],
)
def test_many_buckets_train_to_the_same_bits_on_all_ranks_close_to_uncompressed(place, name, options):
    def rank(group: Group) -> Any:
        torch.manual_seed(0)
        found = []
        for codec in (CODECS[name], hvd.Compression.none):
            model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4))
            for number, param in enumerate(model.parameters()):
                param.data = gradient(99, number, param.numel()).view_as(param) * 0.1
            optimizer = wrap(group, model, lr=0.05, compression=codec, **options)
            for step in range(10):
                optimizer.zero_grad()
                model(gradient(group.rank, step, 64).view(4, 16)).square().sum().mul(0.1).backward()
                optimizer.step()
            optimizer.close()
            found.append(torch.cat([param.detach().view(-1) for param in model.parameters()]))
        return found

    (first, plain), *others = on(place, rank)
    assert all(torch.equal(other, first) for other, _ in others)
    assert not torch.equal(first, plain)
    assert torch.allclose(first, plain, atol={"int8": 3e-3, "int4": 5e-2}[name])


@pytest.mark.night(but=12)
@pytest.mark.slow(but=4)
@everywhere
@pytest.mark.parametrize(
    "form", [*CODECS.values(), hvd.Compression.topk(1.0), hvd.Compression.powersgd(start_step=1, min_ratio=1.0)]
)
def test_a_bucket_may_have_fewer_gradients_than_a_host_has_ranks(place, form):
    def rank(group: Group) -> list[Tensor]:
        params = [nn.Parameter(torch.zeros(shape)) for shape in ((1,), (2, 1), (3,))]
        optimizer = wrap_numbered(group, params, form, bucket_cap_mb=1e-6)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            for param in params:
                param.grad = torch.full_like(param, group.rank + 1.0)
            optimizer.step()
            found += [param.grad.clone() for param in params]
        optimizer.close()
        return found

    first, *others = on(place, rank)
    for number, grad in enumerate(first):
        assert all(torch.equal(other[number], grad) for other in others)
        assert torch.allclose(grad, torch.tensor((len(others) + 2) / 2), rtol=0.1)


@both
def test_on_one_host_gradients_are_those_of_no_compression(name):
    def rank(group: Group) -> list[Tensor]:
        group.hosts = ("a", "a")
        found = []
        for codec in (CODECS[name], hvd.Compression.none):
            param = nn.Parameter(torch.zeros(NUMEL))
            optimizer = wrap_numbered(group, [param], codec)
            param.grad = gradient(group.rank, 0)
            optimizer.synchronize()
            found.append(param.grad)
            assert "hvdlite" not in optimizer.state_dict()
        return found

    for encoded, plain in run_ranks(2, rank):
        assert torch.equal(encoded, plain)


@everywhere
@pytest.mark.parametrize("name", ["int4", "topk"])
def test_a_gradient_that_no_rank_has_is_zero_and_keeps_its_residuals(place, name):
    def rank(group: Group) -> Any:
        one, two = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(300))
        optimizer = wrap_numbered(group, [one, two], FORMS[name])

        def residuals() -> dict[str, Tensor]:
            return {kind: values.clone() for kind, (_, _, values) in residuals_of(optimizer).get("p1", {}).items()}

        one.grad, two.grad = gradient(group.rank, 0, 300), gradient(group.rank, 1, 300)
        optimizer.step()
        optimizer.zero_grad()
        before = residuals()
        one.grad = gradient(group.rank, 2, 300)
        optimizer.synchronize()
        return before, residuals(), two.grad

    results = on(place, rank)
    kinds = {kind for before, _, _ in results for kind, values in before.items() if values.any()}
    assert kinds == ({"own"} if place.startswith("2 hosts") or name == "topk" else {"own", "sum"})
    for before, after, grad in results:
        assert_same(before, after)
        assert grad is None


@pytest.mark.slow
@each_form
@pytest.mark.parametrize("place", ["2 hosts", "3 hosts of 2"])
def test_ten_steps_a_checkpoint_and_ten_more_equal_twenty(place, name):
    def rank(group: Group) -> None:
        def train(optimizer: hvd.DistributedOptimizer, param: nn.Parameter, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                param.grad = gradient(group.rank, step)
                optimizer.step()

        whole = nn.Parameter(torch.zeros(NUMEL))
        straight = wrap_numbered(group, [whole], FORMS[name])
        train(straight, whole, range(10))
        part = nn.Parameter(whole.detach().clone())
        again = wrap_numbered(group, [part], FORMS[name])
        saved = copy.deepcopy(straight.state_dict())
        again.load_state_dict(saved)
        assert residuals_of(straight)["p0"]["own"][2].any()
        assert residuals_of(again)["p0"].keys() == residuals_of(straight)["p0"].keys()
        train(straight, whole, range(10, 20))
        train(again, part, range(10, 20))
        assert torch.equal(whole, part)
        # Without the residuals it goes another way.
        third = nn.Parameter(whole.detach().clone())
        bare = wrap_numbered(group, [third], FORMS[name])
        train(straight, whole, range(20, 25))
        train(bare, third, range(20, 25))
        assert not torch.equal(whole, third)

    on(place, rank)


@pytest.mark.night(but=9)
@pytest.mark.slow
@each_form
@everywhere
def test_a_consolidated_state_resumes_at_any_number_of_ranks_and_changes_no_training(place, name):
    saved: list[Any] = []
    parts: list[Tensor] = []

    def rank(group: Group) -> None:
        models = [[nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(NUMEL))] for _ in range(2)]
        optimizers = [wrap_numbered(group, model, FORMS[name]) for model in models]

        def step(number: int) -> None:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                for param in model:
                    param.grad = gradient(group.rank, number, param.numel())
                optimizer.step()

        for number in range(3):
            step(number)
        local = copy.deepcopy(optimizers[0].state_dict())
        parts.append(kept_of(optimizers[0], "p1"))
        optimizers[0].consolidate_state_dict(to=1)
        if group.rank == 1:
            saved.append(copy.deepcopy(optimizers[0].state_dict()))
        else:
            assert_same(optimizers[0].state_dict(), local)
        step(3)
        for left, right in zip(*models, strict=True):
            assert torch.equal(left, right)
        # Now it is local again.
        assert "mean" not in residuals_of(optimizers[0]).get("p1", {})

    ranks = len(on(place, rank))
    (kind, (start, scale, mean)), *others = saved[0]["hvdlite"]["exchange"]["residuals"]["p1"].items()
    assert (kind, start, scale, len(mean), others) == ("mean", 0, 1.0, NUMEL, [])
    assert torch.allclose(mean, torch.stack(parts).sum(0) / ranks, atol=1e-6)

    def elsewhere(group: Group) -> tuple[Tensor, Tensor]:
        model = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(NUMEL))]
        optimizer = wrap_numbered(group, model, FORMS[name])
        optimizer.load_state_dict(copy.deepcopy(saved[0]))
        # Consolidated again it is the same.
        optimizer.consolidate_state_dict()
        if group.rank == 0:
            assert torch.allclose(residuals_of(optimizer)["p1"]["mean"][2], mean, atol=1e-6)
        for param in model:
            param.grad = torch.zeros_like(param)
        optimizer.synchronize()
        assert model[1].grad is not None
        return model[1].grad, kept_of(optimizer, "p1")

    for other in PLACES:
        shares = on(other, elsewhere)
        total = shares[0][0] + torch.stack([kept for _, kept in shares]).sum(0) / len(shares)
        assert torch.allclose(total, mean, atol=1e-6)


@both
@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "c", "d"], ["b", "a", "c"]])
def test_the_files_of_three_hosts_resume_on_others_and_all_that_was_kept_is_sent(hosts, name):
    def save(group: Group) -> Any:
        params = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(NUMEL))]
        optimizer = wrap_numbered(group, params, CODECS[name])
        for param in params:
            param.grad = gradient(group.rank, 0, param.numel())
        optimizer.step()
        assert any("sum" in kinds for kinds in residuals_of(optimizer).values())
        return copy.deepcopy(optimizer.state_dict()), kept_of(optimizer, "p1")

    saved = on("3 hosts", save)

    def load(group: Group) -> Any:
        params = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(NUMEL))]
        optimizer = wrap_numbered(group, params, CODECS[name])
        # Ranks in another order have other parts of the sum.
        loaded = (group.rank + (hosts[0] == "b")) % 3
        if group.rank < 3:
            optimizer.load_state_dict(copy.deepcopy(saved[loaded][0]))
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.synchronize()
        kinds = {kind for kinds in residuals_of(optimizer).values() for kind in kinds}
        assert len(hosts) > 2 or "sum" not in kinds
        before = saved[loaded][1] if group.rank < 3 else torch.zeros(NUMEL)
        return params[1].grad, kept_of(optimizer, "p1"), before

    found = on(hosts, load)
    sent = found[0][0] * len(hosts)
    kept, before = (sum(each[place] for each in found) for place in (1, 2))
    assert torch.allclose(sent + kept, before, atol=1e-5)


def kept_of(optimizer: hvd.DistributedOptimizer, name: str) -> Tensor:
    """All that a rank has kept of a gradient of NUMEL elements."""
    total = torch.zeros(NUMEL)
    for start, _, values in residuals_of(optimizer).get(name, {}).values():
        total[start : start + len(values)] += values
    return total


def test_broadcast_optimizer_state_leaves_residuals_alone():
    def rank(own: int) -> None:
        param = nn.Parameter(torch.zeros(NUMEL))
        inner = torch.optim.SGD([param], lr=1.0, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, [("p0", param)], compression=hvd.Compression.int4)
        param.grad = gradient(own, 0)
        optimizer.step()
        before = copy.deepcopy(residuals_of(optimizer))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert_same(residuals_of(optimizer), before)
        others = hvd.allgather(before["p0"]["own"][2].unsqueeze(0))
        assert not torch.equal(others[0], others[1])

    run_worlds(2, rank)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("codec", [*FORMS.values(), hvd.Compression.powersgd(1, 1)], ids=repr)
@pytest.mark.parametrize("drops", ["zero_grad", "None, and another pass"])
def test_of_gradients_that_all_ranks_drop_nothing_is_kept_for_the_next_step(steps, codec, drops):
    """They are those that a pass for another optimizer has left."""

    def rank(group: Group) -> None:
        other, param = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(20, 20))
        of_other, optimizer = wrap(group, [other]), wrap_numbered(group, [param], compression=codec)
        for step in range(steps):
            param.grad = gradient(group.rank, step, 400).view(20, 20)
            optimizer.step()
        before = copy.deepcopy(optimizer.state_dict().get("hvdlite"))
        optimizer.zero_grad()
        (other.sum() + (param * 1000.0 * gradient(group.rank, 9, 400).view(20, 20)).sum()).backward()
        of_other.step()
        if drops == "zero_grad":
            optimizer.zero_grad()
        else:
            param.grad = None
            (param * 0.0).sum().backward()
        assert_same(optimizer.state_dict().get("hvdlite"), before)
        optimizer.step()

    on("2 hosts", rank)


def test_a_rank_that_is_not_the_optimizers_cannot_have_the_state():
    def rank(group: Group) -> None:
        optimizer = wrap_numbered(group, [nn.Parameter(torch.zeros(3))], hvd.Compression.int8)
        with pytest.raises(ValueError, match=r"to=2 is not one of the optimizer's ranks: 0, 1"):
            optimizer.consolidate_state_dict(to=2)

    run_ranks(2, rank)


def test_infinities_reach_every_rank_and_leave_no_trace():
    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(NUMEL))
        optimizer = wrap_numbered(group, [param], hvd.Compression.int4)
        for step in range(3):
            optimizer.zero_grad()
            param.grad = gradient(group.rank, step)
            if step == 1 and group.rank == 0:
                param.grad[7] = float("inf")
            optimizer.synchronize()
            assert bool(param.grad.isfinite().all()) == (step != 1)
        for _, _, values in residuals_of(optimizer)["p0"].values():
            assert values.isfinite().all()

    for place in ("2 hosts", "3 hosts"):
        on(place, rank)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_a_host_keeps_stays_in_its_own_blocks_with_infinities_and_other_hosts_keep_what_they_round(name):
    codec = getattr(hvd.Compression, name)

    def kept_of(optimizer: hvd.DistributedOptimizer) -> Tensor:
        _, _, values = residuals_of(optimizer)["p0"]["own"]
        return values.clone()

    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(NUMEL))
        optimizer = wrap_numbered(group, [param], codec)
        param.grad = gradient(group.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = kept_of(optimizer)
        param.grad = gradient(group.rank, 1)
        expected = before.clone()
        wire = torch.empty(wire_bytes(codec, NUMEL), dtype=torch.uint8)
        if group.rank == 0:
            param.grad[300] = math.inf
        codec.encode_all(param.grad.clone(), wire, expected)
        optimizer.synchronize()
        block = slice(codec.block, 2 * codec.block)
        assert not param.grad[block].isfinite().any()
        assert param.grad[: codec.block].isfinite().all()
        after = kept_of(optimizer)
        assert torch.equal(after, expected)
        assert torch.equal(after[block], before[block]) == (group.rank == 0)
        assert not torch.equal(after[: codec.block], before[: codec.block])

    on("2 hosts", rank)


@pytest.mark.night(but=9)
@pytest.mark.slow(but=3)
@each_form
@everywhere
def test_after_a_step_with_infinities_the_next_is_finite_again(place, name):
    # Both numbers of elements leave gaps in the bucket, which codecs encode together with gradients.
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.zeros(numel)) for numel in (301, 77)]
        optimizer = wrap_numbered(group, params, FORMS[name])
        for factor in (1.0, math.inf, 1.0):
            for number, param in enumerate(params):
                param.grad = gradient(group.rank, number, param.numel()) * factor
            optimizer.synchronize()
            # Of the largest alone, those in one parameter are enough for a GradScaler.
            assert all(param.grad.isfinite().all() for param in params) == math.isfinite(factor)
            optimizer.zero_grad()

    on(place, rank)


def test_ones_own_codec_is_a_class_of_two_methods():
    class Signs(hvd.Codec):
        block = 8

        def nbytes(self, numel: int) -> int:
            return numel

        def encode(self, values: Tensor, out: Tensor) -> None:
            out.copy_(values > 0)

        def decode(self, wire: Tensor, out: Tensor) -> None:
            out.copy_(wire).mul_(2.0).sub_(1.0)

    def rank(group: Group) -> Tensor:
        param = nn.Parameter(torch.zeros(5))
        optimizer = wrap_numbered(group, [param], Signs())
        param.grad = torch.tensor([3.0, -1.0, 0.5, -0.1, 2.0])
        optimizer.synchronize()
        assert residuals_of(optimizer)["p0"]["own"][2].tolist() == pytest.approx([2.0, 0.0, -0.5, 0.9, 1.0])
        return param.grad

    for grad in on("2 hosts", rank):
        assert grad.tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]


class OfBits(hvd.Codec):
    """A codec of one's own whose wires depend on the numbers that it is made with."""

    def __init__(self, bits: int, block: int = 8) -> None:
        self.bits = bits
        self.block = block

    def nbytes(self, numel: int) -> int:
        return numel * self.bits // 8

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.zero_()

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.zero_()


@pytest.mark.parametrize("is_outer", [False, True])
def test_ranks_with_different_instances_of_ones_own_codec_are_told(is_outer):
    def rank(group: Group) -> None:
        codec = OfBits([4, 8][group.rank])
        options = {"outer": hvd.DiLoCo(2, compression=codec)} if is_outer else {}
        param = nn.Parameter(torch.zeros(3))
        words = r"OfBits \(blocks of 8 numbers in 4 bytes, with error feedback\).*in 8 bytes"
        with pytest.raises(hvd.MismatchError, match=words):
            wrap_numbered(group, [param], hvd.Compression.none if is_outer else codec, **options).step()

    run_ranks(2, rank)


def test_a_codec_without_whole_blocks_is_refused():
    for refuse in (lambda codec: hvd.DiLoCo(2, compression=codec), lambda codec: check_codec(codec, hvd.Average)):
        for codec in (OfBits(4, block=0), OfBits(4, block=4)):
            with pytest.raises(ValueError, match="its block must be a positive number of elements"):
                refuse(codec)


def test_a_rank_that_has_joined_gives_zeros():
    def rank(own: int) -> float:
        param = nn.Parameter(torch.zeros(NUMEL))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), compression=hvd.Compression.int8)
        if own == 0:
            param.grad = torch.ones(NUMEL)
            optimizer.step()
        hvd.join()
        return param[0].item()

    assert run_worlds(2, rank)[0] == pytest.approx(-0.5)


def test_collectives_refuse_what_cannot_be_summed():
    def rank(own: int) -> None:
        with pytest.raises(ValueError, match=r"Compression\.int8 makes wires that cannot be summed"):
            hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8)

    run_worlds(1, rank)
