"""Top-k between hosts: equal bits on all ranks, those of one process; what is not sent is kept, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from fake_hosts import PLACES, on
from ranks import set_of
from torch import Tensor, nn
from training import wrap, wrap_numbered

import hvdlite as hvd
from hvdlite.comm.group import Group
from hvdlite.compression.approximations import TopK

everywhere = pytest.mark.parametrize("place", PLACES)

NUMEL = 1024
TOP_K = hvd.Compression.topk(0.05)


def kept_of(optimizer: hvd.DistributedOptimizer, name: str = "p0") -> Tensor:
    total = torch.zeros(NUMEL)
    residuals = optimizer.state_dict()["hvdlite"]["exchange"]["residuals"]
    for start, _, values in residuals.get(name, {}).values():
        total[start : start + len(values)] += values
    return total


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * rank + step))


@everywhere
def test_all_ranks_get_the_bits_of_one_process(place):
    hosts = PLACES[place]
    members: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        members.setdefault(host, []).append(number)
    lanes = list(members.values()) if len({len(ranks) for ranks in members.values()}) == 1 else [[0], [1], [2]]
    local = len(lanes[0])

    def rank(group: Group) -> list[Tensor]:
        param = nn.Parameter(torch.zeros(NUMEL))
        optimizer = wrap_numbered(group, [param], TOP_K)
        found = []
        for step in range(4):
            param.grad = gradient(group.rank, step)
            optimizer.synchronize()
            found.append(param.grad.clone())
            optimizer.zero_grad()
        return found

    ranks = on(place, rank)
    residuals = [torch.zeros(NUMEL) for _ in lanes]
    for step in range(4):
        result = torch.zeros(NUMEL)
        for shard in range(local):
            part = slice(shard * NUMEL // local, (shard + 1) * NUMEL // local)
            for lane, residual in zip(lanes, residuals, strict=True):
                first, *others = [gradient(each, step) for each in lane]
                wanted = (residual + sum(others, first))[part]
                places = wanted.abs().topk(math.ceil(0.05 * len(wanted))).indices
                sent = torch.zeros_like(wanted)
                sent[places] = wanted[places].bfloat16().float()
                result[part] += sent
                residual[part] = wanted - sent
        for each in ranks:
            assert torch.equal(each[step], result / len(hosts))


@everywhere
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_reaches_every_rank_and_leaves_no_trace(place, bad):
    # The bad value is in the second half, which is the shard of the host's last rank; uneven hosts have no shards.
    of_host = [number for number, host in enumerate(PLACES[place]) if host == PLACES[place][0]]
    holder = 0 if place == "uneven" else of_host[-1]

    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(NUMEL))
        optimizer = wrap_numbered(group, [param], TOP_K)
        param.grad = gradient(group.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = kept_of(optimizer)
        param.grad = gradient(group.rank, 1)
        if group.rank == 0:
            param.grad[700] = bad
        optimizer.synchronize()
        assert not param.grad.isfinite().all()
        after = kept_of(optimizer)
        assert after.isfinite().all()
        # With several ranks on a host only the shard that has it stays as it was.
        if group.rank == holder:
            assert torch.equal(after, before)

    on(place, rank)


@pytest.mark.parametrize("numel", [1, 7, 1000, 100_000, 300_001])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1])
def test_a_wire_has_the_largest_and_the_rest_is_what_was_not_sent(numel, density):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3
    form = TopK(density)
    wire, places, sent = form.encode(values)
    assert len(wire) == form.nbytes(numel) == 6 * math.ceil(density * numel)
    assert sent is not None
    assert len(places.unique()) == len(places) <= form.count(numel)
    # A threshold from a sample may let somewhat fewer pass.
    assert len(places) >= form.count(numel) * 0.5
    rest = values.clone()
    rest[places] = 0
    assert rest.abs().max() <= values[places].abs().min()
    out = torch.zeros(numel)
    form.add_decoded(wire, out)
    kept = values.clone()
    kept[places] -= sent.float()
    assert torch.equal(out.double() + kept.double(), values.double())


def test_zeros_and_ties_and_numbers_too_large_for_the_wire():
    form = TopK(0.01)
    for values in (torch.zeros(100_000), torch.ones(100_000)):
        wire, places, _ = form.encode(values)
        assert len(places) == 1000
        out = torch.zeros(100_000)
        form.add_decoded(wire, out)
        assert out.sum() == 1000 * values[0]
    wire, _, sent = form.encode(torch.full((10,), torch.finfo(torch.float32).max))
    assert sent is None
    out = torch.zeros(10)
    form.add_decoded(wire, out)
    assert out.isnan().any()


@pytest.mark.parametrize("density", [0, -0.1, 1.5, math.nan, "few", None])
def test_a_density_that_is_none_is_refused(density):
    with pytest.raises(ValueError, match=r"topk: density=.* above 0, and 1 at most"):
        hvd.Compression.topk(density)


@pytest.mark.parametrize("decay", [-0.1, 1.5, math.nan, "much", None])
def test_an_error_decay_that_is_none_is_refused(decay):
    with pytest.raises(ValueError, match=r"topk: error_decay=.* from 0 to 1"):
        hvd.Compression.topk(error_decay=decay)


def test_what_was_not_sent_decays_where_that_is_asked():
    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(NUMEL))
        form = hvd.Compression.topk(0.05, error_decay=0.5)
        optimizer = wrap(group, [param], [("p0", param)], compression=form)
        param.grad = gradient(group.rank, 0)
        optimizer.step()
        before = kept_of(optimizer)
        optimizer.zero_grad()
        param.grad = torch.zeros(NUMEL)
        optimizer.step()
        wanted = before * 0.5
        places = wanted.abs().topk(math.ceil(0.05 * NUMEL)).indices
        wanted[places] -= wanted[places].bfloat16().float()
        assert torch.equal(kept_of(optimizer), wanted)

    on("2 hosts", rank)


@pytest.mark.parametrize("place", ["2 hosts", "3 hosts of 2"])
def test_what_is_kept_stays_on_all_ranks_where_one_of_them_has_an_infinity(place):
    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(NUMEL))
        inner = torch.optim.SGD([param], lr=1.0)
        form = hvd.Compression.topk(0.05, error_decay=0.9)
        optimizer = hvd.DistributedOptimizer(inner, [("p0", param)], compression=form, process_set=set_of(group))
        param.grad = gradient(group.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = kept_of(optimizer)
        assert before.any()
        param.grad = gradient(group.rank, 1)
        if group.rank == 0:
            # In the part of each of the host's ranks.
            param.grad[[7, -7]] = math.inf
        optimizer.synchronize()
        assert not param.grad.isfinite().any()
        assert torch.equal(kept_of(optimizer), before)

    on(place, rank)


def test_what_is_kept_stays_where_a_sum_is_too_large_for_the_gradients_dtype():
    def rank(group: Group) -> None:
        param = nn.Parameter(torch.zeros(NUMEL, dtype=torch.float16))
        optimizer = wrap_numbered(group, [param], TOP_K, op=hvd.Sum)
        param.grad = gradient(group.rank, 0).half()
        optimizer.step()
        optimizer.zero_grad()
        before = kept_of(optimizer)
        assert before.any()
        param.grad = gradient(group.rank, 1).half()
        # Finite on each rank, and in the wire.
        param.grad[700] = 60000.0
        optimizer.synchronize()
        assert not param.grad.isfinite().any()
        assert torch.equal(kept_of(optimizer), before)

    on("2 hosts", rank)
