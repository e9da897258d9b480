"""If ranks call different operations, all get the same error, which names each rank's call, whatever the difference."""

from __future__ import annotations

import threading

import pytest
import torch
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite.calls import handle
from hvdlite.coordinator import coordinator, negotiation

# Calls that differ from each other in one respect, or in several; all but one have the same name.
CALLS = {
    "plain": lambda: hvd.allreduce(torch.ones(2), name="a"),
    "other dtype": lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64), name="a"),
    "other shape": lambda: hvd.allreduce(torch.ones(3), name="a"),
    "other op": lambda: hvd.allreduce(torch.ones(2), name="a", op=hvd.Max),
    "other prescale": lambda: hvd.allreduce(torch.ones(2), name="a", prescale_factor=2.0),
    "other postscale": lambda: hvd.allreduce(torch.ones(2), name="a", postscale_factor=2.0),
    "other name": lambda: hvd.allreduce(torch.ones(2), name="b"),
    "no name": lambda: hvd.allreduce(torch.ones(2)),
    "grouped": lambda: hvd.grouped_allreduce([torch.ones(2)], name="a"),
    "allgather": lambda: hvd.allgather(torch.ones(2), name="a"),
    "broadcast from 0": lambda: hvd.broadcast(torch.ones(2), 0, name="a"),
    "broadcast from 1": lambda: hvd.broadcast(torch.ones(2), 1, name="a"),
    "alltoall": lambda: hvd.alltoall(torch.ones(2), name="a"),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(2), name="a"),
    "barrier": hvd.barrier,
    "parameters": lambda: hvd.broadcast_parameters([torch.ones(2)]),
    "object": lambda: hvd.broadcast_object(1, name="a"),
    "async": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(2, 1), name="a")),
}


def one_error(outcomes: list[object]) -> str:
    assert all(isinstance(outcome, hvd.MismatchError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.mark.parametrize(
    ("one", "another", "words"),
    [
        ("plain", "other dtype", "Mismatched data types: One rank had type torch.float32, but another rank had "),
        (
            "plain",
            "other shape",
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but ",
        ),
        ("plain", "other op", "Mismatched reduction operation: One rank asked for Average, but another rank for Max."),
        ("plain", "other prescale", "Mismatched prescale and/or postscale factors: One rank had prescale_factor=1.0"),
        ("plain", "other postscale", "Mismatched prescale and/or postscale factors: One rank had postscale_factor=1.0"),
        ("broadcast from 0", "broadcast from 1", "Mismatched BROADCAST root ranks: One rank named rank 0, but another"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_difference_in_what_is_called_under_one_name_is_told_in_horovods_words(one, another, words, odd):
    over = threading.Barrier(3)

    def call(rank: int) -> object:
        try:
            return CALLS[another if rank == odd else one]()
        finally:
            # Two ranks suffice for a difference; a third would be told that these have ended, if they had.
            over.wait(60)

    text = one_error(attempt_worlds(3, call))
    if odd == 2:
        assert text.startswith(words)
    assert f"rank {odd} (node{odd})" in text


@pytest.mark.slow
@pytest.mark.parametrize("one", list(CALLS)[:-1])
def test_every_two_calls_that_differ_end_in_one_error_on_every_rank(one, monkeypatch):
    # There are no gradients in flight that would have to arrive first.
    for module, seconds in ((handle, "_PATIENCE_S"), (negotiation, "SETTLING_S"), (coordinator, "_TICK_S")):
        monkeypatch.setattr(module, seconds, 0.02)
    others = list(CALLS)[list(CALLS).index(one) + 1 :]

    def rank(own: int) -> dict[str, str]:
        errors = {}
        for another in others:
            try:
                CALLS[[one, another][own]]()
            except hvd.MismatchError as error:
                errors[another] = str(error)
        return errors

    first, second = run_worlds(2, rank)
    assert first == second
    assert list(first) == others
    assert all("rank 0 (node0)" in text and "rank 1 (node1)" in text for text in first.values())


def test_ranks_of_all_gathers_may_differ_in_the_first_dimension_alone():
    outcomes = attempt_worlds(2, lambda rank: hvd.allgather(torch.ones(2, 2 + rank), name="a"))
    assert one_error(outcomes).startswith("Mismatched ALLGATHER tensor shapes: One rank sent a tensor of shape [-1, 2]")


def test_groups_that_differ_in_one_member_are_told_apart():
    outcomes = attempt_worlds(2, lambda rank: hvd.grouped_allreduce([torch.ones(2), torch.ones(rank + 1)], name="a"))
    assert "[[2], [1]]" in one_error(outcomes)


@pytest.mark.slow
def test_backward_passes_that_differ_are_told_by_the_name_of_the_forward_pass():
    def rank(own: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = hvd.allreduce(x, name="loss") if own == 0 else hvd.allreduce(x, name="loss").repeat(2)[:2]
        (y.sum() if own == 0 else hvd.barrier())
        if own == 0:
            y.sum().backward()

    text = one_error([outcome for outcome in attempt_worlds(2, rank) if outcome is not None])
    assert "loss.gradient" in text
