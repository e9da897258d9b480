"""Round trips between pairs of ranks; ranks are threads here."""

import itertools
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvdlite import round_trips
from hvdlite.round_trips import measure, present_ranks, rounds, without_noise


@pytest.mark.parametrize("size", range(2, 20))
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_at_a_time(size):
    ranks = [3 * rank for rank in range(size)]
    plan = rounds(ranks)
    assert Counter(pair for pairs in plan for pair in pairs) == Counter(itertools.combinations(ranks, 2))
    for pairs in plan:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy)) == size - size % 2
    assert len(plan) == size - 1 + size % 2


def test_alone_nobody_meets():
    assert rounds([5]) == [[]]


def _on_threads(size, work):
    outcomes = [None] * size

    def run(rank):
        outcomes[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_pairs_are_measured_at_the_same_time():
    store = dist.HashStore()

    def meet_all(rank):
        partners = [a + b - rank for pairs in rounds(range(4)) for a, b in pairs if rank in (a, b)]
        return {partner: measure(store, rank, partner, patience_s=60) for partner in partners}

    for rank, times_us in enumerate(_on_threads(4, meet_all)):
        assert times_us.keys() == {0, 1, 2, 3} - {rank}
        assert all(0 < time_us < 1e6 for time_us in times_us.values())


def test_a_partner_that_does_not_come_is_an_error():
    with pytest.raises(RuntimeError, match="did not connect"):
        measure(dist.HashStore(), 0, 1, patience_s=0.05)


def test_who_cannot_listen_is_an_error_of_both_at_once(monkeypatch):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=600))
    address = threading.local()

    def address_for_others():
        if address.rank == 1:
            raise OSError("there is no such interface")
        return "127.0.0.1"

    monkeypatch.setattr(round_trips, "address_for_others", address_for_others)

    def meet(rank):
        address.rank = rank
        with pytest.raises(RuntimeError) as caught:
            measure(store, rank, 1 - rank, patience_s=60)
        return str(caught.value)

    begun_s = time.monotonic()
    assert _on_threads(2, meet) == [
        "the other host cannot listen on an address that this one reaches",
        "it cannot listen on an address that other hosts reach: there is no such interface",
    ]
    assert time.monotonic() - begun_s < 60


def test_all_agree_on_who_is_there():
    store = dist.HashStore()
    assert _on_threads(3, lambda rank: present_ranks(store, rank, 3, timeout_s=60)) == [[0, 1, 2]] * 3


def test_who_is_not_there_in_time_is_left_out_by_all():
    store = dist.HashStore()
    store.set("present/1", "")
    assert [present_ranks(store, rank, 3, timeout_s=0.05) for rank in range(3)] == [[0, 1]] * 3


def test_gloo_s_words_are_told_without_its_sources():
    said = "Gloo connectFullMesh failed with [/__w/gloo/transport/tcp/pair.h:311] Connect timeout [none]"
    assert without_noise(said) == "Connect timeout"
    assert without_noise("[/p/pair.cc:547] Connection closed by peer [10.0.0.1]:234") == (
        "Connection closed by peer [10.0.0.1]:234"
    )
