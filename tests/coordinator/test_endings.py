"""Which rank's end is reported as the first, in whatever order ends and reports of lost ranks arrive."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.coordinator.scene import HELD_S, Endings


def test_the_end_of_a_rank_that_lost_nobody_is_told_at_once():
    endings = Endings()
    assert endings.ended(3, False, 0.0) == [(3, False)]
    assert endings.is_idle
    assert endings.ended(2, True, 0.0) == [(2, True)]


def test_the_end_of_one_that_lost_another_is_told_after_that_others():
    endings = Endings()
    endings.lost(2)
    assert endings.ended(2, True, 0.0) == []
    assert not endings.is_idle
    assert endings.due(HELD_S / 2) == []
    assert endings.ended(3, False, 0.1) == [(3, False), (2, True)]
    assert endings.is_idle
    assert endings.due(HELD_S * 2) == []


def test_where_nobody_else_ends_it_was_the_first_after_all():
    endings = Endings()
    endings.lost(1)
    assert endings.ended(1, False, 5.0) == []
    assert endings.due(5.0 + HELD_S) == [(1, False)]
    endings.lost(2)
    assert endings.ended(2, False, 9.0) == [(2, False)]


@pytest.mark.parametrize("order", list(permutations([0, 1, 2, 3])))
def test_in_whatever_order_ends_come_the_one_without_a_word_is_the_first(order):
    victim, endings, told = 2, Endings(), []
    for rank in order:
        if rank != victim:
            endings.lost(rank)
        told += endings.ended(rank, False, 0.0)
    assert told[0] == (victim, False)
    assert sorted(rank for rank, _ in told) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["lost", "ended"]), st.integers(0, 4)), max_size=20))
def test_every_end_is_told_once_at_some_time(events):
    endings, told, ended = Endings(), [], set()
    for now_s, (what, rank) in enumerate(events):
        told += endings.due(float(now_s))
        if what == "lost":
            endings.lost(rank)
        elif rank not in ended:
            ended.add(rank)
            told += endings.ended(rank, False, float(now_s))
    told += endings.due(100.0)
    assert sorted(rank for rank, _ in told) == sorted(ended)
    assert endings.is_idle
