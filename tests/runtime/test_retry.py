"""How often the same ranks may fail, and which ranks are others."""

from __future__ import annotations

import pytest

from hvdlite.runtime.survival import Retry


def test_the_same_ranks_have_as_many_tries_as_are_given():
    retry = Retry(3)
    assert [retry.failed(4, 0) for _ in range(4)] == [True, True, False, False]


def test_progress_gives_all_tries_again():
    retry = Retry(2)
    for _ in range(5):
        assert retry.failed(4, 0)
        retry.begin_anew()


@pytest.mark.parametrize(
    "losses",
    [
        [(size, 0) for size in range(9, 0, -1)],
        [(4, 1)] * 20,
        [(4, 0), (3, 0), (4, 1), (3, 0)] * 5,
    ],
    ids=["each is lost for good", "each is replaced at once", "each is replaced after a while"],
)
def test_a_worker_that_dies_over_and_over_takes_no_try_of_the_others(losses):
    retry = Retry(2)
    assert all(retry.failed(size, newcomers) for size, newcomers in losses)


def test_ranks_that_fail_after_they_were_replaced_have_tries_of_their_own():
    retry = Retry(3)
    found = [retry.failed(4, newcomers) for newcomers in (0, 0, 1, 0, 0)]
    assert found == [True, True, True, True, False]
