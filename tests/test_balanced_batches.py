"""`BalancedBatchSampler`: parts of a batch by the speed of ranks, and each sample once."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite import balanced_batches
from hvdlite.balanced_batches import shares_of
from hvdlite.comm.step_clock import RankPace


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 200))
def test_shares_add_up_and_nobody_has_none_or_more_than_one_off(weights, more):
    count = len(weights) + more
    shares = shares_of(count, weights)
    assert sum(shares) == count
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        # Who deserves less than 1 takes from the others.
        assert share <= max(1, weight / sum(weights) * count + 1)
    for (one, weight), (other, other_weight) in pairwise(sorted(zip(shares, weights, strict=True), key=lambda e: e[1])):
        assert one <= other + (weight == other_weight)


def pace(rank: int, seconds: float) -> RankPace:
    return RankPace(
        rank, "node", {"data": 0.25 * seconds, "forward": 0.75 * seconds, "optimizer": 9.0}, 0, 1, 1, 0, None
    )


@pytest.fixture
def clock(monkeypatch):
    """Provides a list with the time, and one with how long a sample takes on each rank."""
    now, per_sample = [0.0], [1.0, 1.0]
    monkeypatch.setattr(balanced_batches, "monotonic", lambda: now[0])
    return now, per_sample


def test_a_rank_of_half_the_speed_gets_half_the_samples_and_each_sample_is_drawn_once(clock, monkeypatch):
    now, per_sample = clock

    def rank(own: int) -> list[tuple[list[int], list[list[int]]]]:
        sampler = hvd.BalancedBatchSampler(range(100), 30)
        monkeypatch.setattr(
            balanced_batches,
            "stragglers",
            lambda: [pace(number, share * per_sample[number]) for number, share in enumerate(sampler.shares)],
        )
        found = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            hvd.barrier()
            if own == 0:
                now[0], per_sample[1] = 70.0 * epoch, 2.0
            hvd.barrier()
            found.append((list(sampler), sampler.shares))
            assert len(found[-1][0]) == len(sampler) == 4
        return found

    first, second = run_worlds(2, rank)
    assert [shares for _, shares in first] == [shares for _, shares in second] == [[15, 15], [20, 10], [20, 10]]
    for (mine, shares), (others, _) in zip(first, second, strict=True):
        assert [len(part) for part in mine[:3]] == [shares[0]] * 3
        assert sorted(chain.from_iterable(mine + others)) == list(range(100))
    assert first[1][0] != first[2][0], "each epoch has another order"


def test_shares_stay_within_a_minute_of_a_change_and_where_little_would_be_gained(clock, monkeypatch):
    now, per_sample = clock
    hvd.init()
    sampler = hvd.BalancedBatchSampler(range(10), 10, shuffle=False)
    monkeypatch.setattr(balanced_batches, "size", lambda: 2)
    monkeypatch.setattr(balanced_batches, "stragglers", lambda: [pace(1, per_sample[1]), pace(0, per_sample[0])])
    sampler._shares = [500, 500]
    sampler._batch_size = 1000
    per_sample[1] = 2.0
    now[0] = 59.0
    assert sampler._measured() == [500, 500]
    now[0] = 61.0
    assert sampler._measured() == [667, 333]
    per_sample[1] = 1.01
    assert sampler._measured() == [500, 500]
    monkeypatch.setattr(balanced_batches, "stragglers", list)
    assert sampler._measured() == [500, 500], "nothing is known yet"


def test_training_is_that_of_one_process_on_the_whole_batch():
    data = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))

    model_of = partial(copy.deepcopy, nn.Linear(3, 1))

    def rank(own: int) -> nn.Module:
        model = model_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        sampler = hvd.BalancedBatchSampler(data, 16, shuffle=False)
        sampler._shares = [11, 5]
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        for batch in loader:
            optimizer.zero_grad()
            optimizer.weighted(model(batch).square().mean(), len(batch)).backward()
            optimizer.step()
        return model

    models = run_worlds(2, rank)
    alone = model_of()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for start in range(0, 50, 16):
        optimizer.zero_grad()
        alone(data[start : start + 16]).square().mean().backward()
        optimizer.step()
    for model in models:
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("length", "last"), [(9, [1, 1]), (10, [1, 1])])
def test_each_rank_has_a_sample_of_the_last_batch(length, last):
    def rank(own: int) -> list[int]:
        return [len(part) for part in hvd.BalancedBatchSampler(range(length), 8)]

    parts = run_worlds(2, rank)
    assert [each[-1] for each in parts] == last
    assert [len(each) for each in parts] == [2, 2]


@pytest.mark.parametrize("batch_size", [0, "8", 1.5])
def test_a_batch_without_a_sample_for_each_rank_is_refused(batch_size):
    hvd.init()
    with pytest.raises(ValueError, match="is no whole number of at least 1"):
        hvd.BalancedBatchSampler(range(3), batch_size)


def test_more_ranks_than_a_batch_has_samples_are_refused_when_an_epoch_begins(monkeypatch):
    hvd.init()
    sampler = hvd.BalancedBatchSampler(range(10), 2)
    monkeypatch.setattr(balanced_batches, "size", lambda: 3)
    with pytest.raises(ValueError, match="batch_size=2 is no whole number of at least 3"):
        iter(sampler)
