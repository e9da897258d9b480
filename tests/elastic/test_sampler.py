"""The sampler of elastic programs: nothing twice and nothing left out, whatever the number of ranks becomes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import run_worlds

from hvdlite.elastic import ElasticSampler, TorchState, sampler
from hvdlite.runtime.survival import Note


def samplers(monkeypatch: pytest.MonkeyPatch, count: int, length: int, state=None, **arguments) -> list[ElasticSampler]:
    """One for each of ``count`` ranks."""
    made = []
    for rank in range(count):
        monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(sampler, "size", lambda: count)
        one = ElasticSampler(range(length), **arguments)
        if state is not None:
            one.load_state_dict(state)
        made.append(one)
    return made


@given(st.integers(0, 50), st.integers(1, 9), st.booleans())
def test_all_ranks_together_see_every_sample_and_each_as_many(length, count, shuffle):
    with pytest.MonkeyPatch.context() as monkeypatch:
        drawn = [list(each) for each in samplers(monkeypatch, count, length, shuffle=shuffle)]
        assert len({len(each) for each in drawn}) == 1
        counts = Counter(index for each in drawn for index in each)
        assert set(counts) == set(range(length))
        # The last are repeated, once more than others at most.
        assert not counts or max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=5), st.integers(1, 4))
def test_nothing_is_seen_twice_or_left_out_when_ranks_come_and_go_in_an_epoch(length, worlds, batch_size):
    with pytest.MonkeyPatch.context() as monkeypatch:
        state, seen = None, []
        for count, batches in [*worlds, (2, 1000)]:
            ranks = samplers(monkeypatch, count, length, state)
            for each in ranks:
                iter(each)
            steps = min(batches, -(-len(ranks[0]) // batch_size))
            for batch in range(steps):
                for each in ranks:
                    seen += each.get_indices(batch, batch_size)
                    each.record_batch(batch, batch_size)
            state = ranks[0].state_dict()
            if state["processed_num"] >= length:
                break
        assert set(seen) == set(range(length))
        # Only the tail's padding is seen again.
        assert len(seen) - length < 5 * batch_size


def test_another_epoch_has_another_order_and_the_same_epoch_the_same(monkeypatch):
    (one,) = samplers(monkeypatch, 1, 20)
    (other,) = samplers(monkeypatch, 1, 20)
    first = list(one)
    assert list(other) == first
    one.set_epoch(1)
    assert list(one) != first
    assert sorted(one) == sorted(first)


def test_a_new_epoch_begins_with_all_samples(monkeypatch):
    (one,) = samplers(monkeypatch, 1, 20)
    iter(one)
    one.record_batch(0, 20)
    one.set_epoch(1)
    assert len(one) == 20


def test_what_was_recorded_by_indices_counts_as_well(monkeypatch):
    one, _ = samplers(monkeypatch, 2, 20)
    one.record_indices([3, 4, 5])
    assert one.state_dict() == {"epoch": 0, "processed_num": 6}


def test_ranks_get_rank_0s_place_in_the_epoch_and_their_own_part_of_the_rest():
    def sync(rank):
        own = ElasticSampler(range(20), shuffle=False)
        if rank == 0:
            own.record_batch(0, 4)
        TorchState(sampler=own).sync()
        return list(own)

    first, second = run_worlds(2, sync)
    assert sorted([*first, *second]) == list(range(8, 20))


def test_a_reset_divides_the_rest_anew(monkeypatch):
    (own,) = samplers(monkeypatch, 1, 20, shuffle=False)
    own.record_batch(0, 4)
    state = TorchState(sampler=own)
    monkeypatch.setattr(sampler, "size", lambda: 4)
    monkeypatch.setattr(sampler, "rank", lambda: 1)
    state.on_reset()
    assert list(own) == [5, 9, 13, 17]


class OfStep:
    """A `Survival` in a step: it knows whether the functions run that adapt to the ranks that are left."""

    is_going_on = False

    def follow(self, follower):
        self.follower = follower


@pytest.fixture
def of_step(monkeypatch):
    survival = OfStep()
    monkeypatch.setattr(sampler, "is_initialized", lambda: True)
    monkeypatch.setattr(sampler, "current_world", lambda: SimpleNamespace(survival=survival))
    return survival


def test_a_reset_within_a_step_leaves_what_is_drawn_as_it_is(monkeypatch, of_step):
    _, last = samplers(monkeypatch, 2, 8, shuffle=False)
    assert of_step.follower is last
    of_step.is_going_on = True
    monkeypatch.setattr(sampler, "size", lambda: 1)
    TorchState(sampler=last).on_reset()
    assert list(last) == [1, 3, 5, 7]


def lose_rank_0(monkeypatch, ranks):
    """The last of two ranks goes on without the first."""
    monkeypatch.setattr(sampler, "rank", lambda: 0)
    monkeypatch.setattr(sampler, "size", lambda: 1)
    ranks[1].go_on([Note(0, ranks[1].note_of(0))])
    return ranks[1]


def test_an_iterator_goes_on_with_what_the_lost_rank_had_left(monkeypatch):
    ranks = samplers(monkeypatch, 2, 8, shuffle=False)
    drawn = iter(ranks[1])
    first = [next(drawn), next(drawn)]
    last = lose_rank_0(monkeypatch, ranks)
    assert first + list(drawn) == [1, 3, 5, 7, 0, 2, 4, 6]
    assert (len(last), last.num_replicas, last.rank) == (8, 1, 0)
    assert last.get_indices(1, 4) == [0, 2, 4, 6]


def test_what_is_left_when_iterators_have_ended_is_drawn_by_the_next_of_this_epoch_or_the_next_epoch(monkeypatch):
    ranks = samplers(monkeypatch, 2, 8, shuffle=False)
    assert list(ranks[1]) == [1, 3, 5, 7]
    last = lose_rank_0(monkeypatch, ranks)
    last.record_batch(0, 4)
    again = ElasticSampler(range(8), shuffle=False)
    again.load_state_dict(json.loads(json.dumps(last.state_dict())))
    assert list(last) == list(again) == [0, 2, 4, 6]
    ranks = samplers(monkeypatch, 2, 8, shuffle=False)
    list(ranks[1])
    last = lose_rank_0(monkeypatch, ranks)
    last.record_batch(0, 4)
    last.set_epoch(1)
    again.load_state_dict(json.loads(json.dumps(last.state_dict())))
    assert list(last) == list(again) == [0, 2, 4, 6, *range(8)]
    last.set_epoch(2)
    assert sorted(last) == sorted([0, 2, 4, 6, *range(8)]), "nothing was recorded of epoch 1"
    last.record_batch(0, 12)
    last.set_epoch(3)
    assert list(last) == list(range(8))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 40))
def test_an_iterators_state_has_what_was_drawn_whether_it_was_recorded_or_not(length, before, after, drawn, recorded):
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen, states = [], []
        for each in samplers(monkeypatch, before, length):
            iterator = iter(each)
            seen += itertools.islice(iterator, drawn)
            each.record_batch(0, min(recorded, drawn, len(each)))
            states.append(iterator.state_dict())
        assert all(state == states[0] for state in states)
        for rank in range(after):
            monkeypatch.setattr(sampler, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(sampler, "size", lambda: after)
            iterator = iter(ElasticSampler(range(length)))
            iterator.load_state_dict(states[0])
            seen += iterator
        assert set(seen) == set(range(length))
        assert len(seen) < length + before + after, "only the last are repeated"


@pytest.mark.parametrize("loses_state", [False, True])
def test_behind_the_last_sample_of_an_epoch_the_next_iterator_begins_the_next_epoch(monkeypatch, loses_state):
    (one,) = samplers(monkeypatch, 1, 6)
    iterator = iter(one)
    list(iterator)
    state = iterator.state_dict()
    (other,) = samplers(monkeypatch, 1, 6)
    resumed = iter(other)
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert other.epoch == 0, "a loader whose epoch has not ended has no batch more"
    if loses_state:
        other.load_state_dict(one.state_dict())
    assert sorted(other) == list(range(6))
    assert other.epoch == (0 if loses_state else 1)


def test_an_iterator_from_before_a_reset_has_the_state_of_its_sampler(monkeypatch):
    (one,) = samplers(monkeypatch, 1, 6)
    iterator = iter(one)
    next(iterator)
    one.reset()
    assert iterator.state_dict() == one.state_dict() == {"epoch": 0, "processed_num": 0}
