"""Handles of asynchronous operations: poll, synchronize, and the errors for what is not a handle."""

from __future__ import annotations

import threading

import pytest
import torch
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.environment import Environment


def test_a_handle_is_done_when_all_ranks_have_asked_and_not_before():
    may_ask = threading.Event()

    def rank(number):
        if number == 1:
            assert may_ask.wait(60)
        handle = hvd.allreduce_async(torch.tensor(1.0), op=hvd.Sum)
        if number == 0:
            assert not hvd.poll(handle)
            may_ask.set()
        result = hvd.synchronize(handle)
        assert hvd.poll(handle)
        return result.item()

    assert run_worlds(2, rank) == [2.0, 2.0]


def test_asynchronous_operations_pair_up_by_name_in_whatever_order_they_are_asked_for():
    names = ["a", "b", "c"]

    def rank(number):
        order = names[number:] + names[:number]
        handles = {name: hvd.allreduce_async(torch.tensor(ord(name)), name=name, op=hvd.Max) for name in order}
        handles["gathered"] = hvd.allgather_async(torch.tensor(number), name="a")
        return [hvd.synchronize(handles[name]).tolist() for name in [*reversed(names), "gathered"]]

    assert run_worlds(3, rank) == [[99, 98, 97, [0, 1, 2]]] * 3


def test_a_handle_is_a_number_unlike_any_other_and_gives_its_result_as_often_as_one_asks():
    def rank(number):
        handles = [hvd.allreduce_async(torch.ones(1), name=str(i)) for i in range(3)]
        assert len({int(handle) for handle in handles}) == len(dict.fromkeys(handles)) == 3
        assert hvd.synchronize(handles[0]) is hvd.synchronize(handles[0]) is handles[0]()

    run_worlds(2, rank)


@pytest.mark.parametrize("stranger", [7, "x", torch.ones(1)])
def test_what_is_no_handle_is_an_error(stranger):
    for asker in (hvd.synchronize, hvd.poll):
        with pytest.raises(ValueError, match=f"{asker.__name__}.* is not a handle"):
            asker(stranger)


def test_there_is_nothing_to_wait_for_in_none():
    assert hvd.synchronize(None) is None
    with pytest.raises(ValueError, match=r"poll.* is not a handle"):
        hvd.poll(None)


def test_what_goes_wrong_is_raised_by_synchronize_as_often_as_one_asks():
    def rank(number):
        handle = hvd.allreduce_async(torch.zeros(1 + number), name="x")
        for _ in range(2):
            with pytest.raises(hvd.MismatchError, match="Mismatched ALLREDUCE tensor shapes"):
                hvd.synchronize(handle)
        return hvd.poll(handle)

    assert run_worlds(2, rank) == [True, True]


def test_without_the_check_operations_are_done_when_they_are_asked_for():
    def rank(number):
        handle = hvd.allreduce_async(torch.tensor(number), op=hvd.Sum)
        assert hvd.poll(handle)
        hvd.barrier()
        gathered = hvd.allgather(torch.full((number,), number))
        sent, received = hvd.alltoall(torch.arange(3), [1, 2] if number else [2, 1])
        return hvd.synchronize(handle).item(), gathered.tolist(), sent.tolist(), received.tolist()

    results = run_worlds(2, rank, Environment(check=False))
    assert results == [(1, [1], [0, 1, 0], [2, 1]), (1, [1], [2, 1, 2], [1, 2])]


@pytest.mark.parametrize("operation", [hvd.allreduce_async_, lambda tensor: hvd.broadcast_async_(tensor, 0)])
def test_what_cannot_be_overwritten_is_refused_before_anything_is_sent(operation):
    with torch.inference_mode():
        inferred = torch.ones(1)

    for tensor, words in ((torch.ones(1).expand(2), r"clone\(\) it"), (inferred, "inference_mode")):
        (outcome,) = attempt_worlds(1, lambda rank, tensor=tensor: operation(tensor))
        with pytest.raises(ValueError, match=words):
            raise outcome
