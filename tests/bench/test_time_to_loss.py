"""When `time_to_loss` says that a technique has learnt, what that took, and what its small problem is made of."""

from __future__ import annotations

import copy
import itertools
import re
from contextlib import contextmanager

import pytest
import torch
from bench.time_to_loss import Problem, learn, read_loss, report_of, text_of

import hvdlite as hvd
from hvdlite.bench.arguments import OptionError
from hvdlite.bench.ranks import Ranks, Samples
from hvdlite.bench.training import Training
from hvdlite.runtime.world import current_world


@pytest.mark.parametrize("text", ["0", "-1", "3", "nan", "inf", "low", ""])
def test_a_loss_that_guessing_has_or_nobody_reaches_is_refused(text):
    with pytest.raises(OptionError) as error:
        read_loss(text)
    assert str(error.value) == f"{text!r} is not a loss between 0 and that of guessing, 2.77, such as 1.0"


# Seconds and bytes of a step in each block, and the loss after it.
OF_BLOCKS = {
    "ddp": ([2.0, 4.0], [100.0, 100.0], [1.5, 0.9]),
    "int4": ([1.0, 1.0, 2.0], [10.0, 10.0, 13.0], [2.0, 1.5, 1.0]),
    "powersgd": ([0.5, 0.5, 0.5], [5.0, 5.0, 5.0], [2.0, 1.8, 1.7]),
    "diloco": ([0.1], [1.0], [0.8]),
}


def learnt(*names: str, ddp: list[float] = OF_BLOCKS["ddp"][2]):
    """Returns the rows of trainings to a loss of 1 at two rates, the second ten times as slow."""
    rates = {}
    for factor, rate in ((1, "1gbit"), (10, "100mbit")):
        of_blocks = {name: OF_BLOCKS[name] for name in names}
        rates[rate] = {
            "times": {name: [factor * each for each in times] for name, (times, _, _) in of_blocks.items()},
            "sent": {name: sent for name, (_, sent, _) in of_blocks.items()},
            "losses": {name: ddp if name == "ddp" else losses for name, (_, _, losses) in of_blocks.items()},
        }
    return report_of(rates, 1.0)


def test_steps_seconds_and_bytes_to_a_loss_are_those_of_all_blocks_until_then():
    rows = {(row["rate"], row["technique"]): row for row in learnt("ddp", "int4", "powersgd", "diloco")}
    keys = ("reached", "steps", "seconds", "sent_bytes", "times_sooner_than_ddp")
    assert {
        name: tuple(rows["1gbit", name][key] for key in keys) for name in ("ddp", "int4", "powersgd", "diloco")
    } == {
        "ddp": (True, 20, 60.0, 2000.0, 1.0),
        "int4": (True, 30, 40.0, 330.0, 1.5),
        "powersgd": (False, 30, 15.0, 150.0, None),
        "diloco": (True, 100, 10.0, 100.0, 6.0),
    }
    assert rows["100mbit", "int4"]["seconds"] == 400.0
    assert rows["1gbit", "int4"]["losses"] == [2.0, 1.5, 1.0]


def test_a_technique_that_does_not_reach_the_loss_says_after_how_many_steps():
    text = text_of(learnt("ddp", "powersgd"), 1.0)
    assert re.search(r"^1gbit +powersgd +not in 30 steps +– +– +–$", text, re.MULTILINE)


def test_nothing_is_sooner_than_a_rival_that_did_not_reach_the_loss():
    assert [row["times_sooner_than_ddp"] for row in learnt("ddp", "int4", ddp=[1.5, 1.4])] == [None] * 4


def trained(names: list[str], loss: float, most_steps: int) -> tuple[Samples, Samples, list[list[str]]]:
    """Returns samples and losses of trainings on one rank, and which have trained in each round."""
    hvd.init()
    ranks = Ranks(current_world(), "cpu")
    times, sent, losses = ({name: [] for name in names} for _ in range(3))
    counts = []
    try:
        learn(ranks, loss, most_steps, times, sent, losses, lambda: counts.append({n: len(losses[n]) for n in names}))
    finally:
        ranks.close()
    assert {name: len(each) for name, each in times.items()} == {name: len(each) for name, each in losses.items()}
    assert {name: len(each) for name, each in sent.items()} == {name: len(each) for name, each in losses.items()}
    before = [dict.fromkeys(names, 0), *counts]
    return times, losses, [[n for n in names if b[n] < a[n]] for b, a in itertools.pairwise([*before])]


def test_each_technique_trains_until_its_own_loss_is_reached():
    _, losses, rounds = trained(["none", "localsgd"], 1.9, 400)
    for each in losses.values():
        assert each[-1] <= 1.9 < min(each[:-1])
    last = {name: len(each) for name, each in losses.items()}
    assert [[name for name in last if number < last[name]] for number in range(len(rounds))] == rounds


def test_a_training_ends_after_the_most_steps_with_or_without_its_loss():
    _, losses, rounds = trained(["ddp", "localsgd"], 0.001, 24)
    assert {name: len(each) for name, each in losses.items()} == {"ddp": 3, "localsgd": 3}
    assert rounds == [["ddp", "localsgd"]] * 3


def test_the_same_training_has_the_same_losses_again_with_ddp_too():
    losses = [trained(names, 0.001, 20)[1] for names in (["none", "ddp"], ["ddp", "none"])]
    assert losses[0] == losses[1]
    assert losses[0]["ddp"] == losses[0]["none"]


def test_ranks_and_steps_have_batches_of_their_own_and_every_technique_the_same_ones():
    problem, again = (Problem(torch.device("cpu")) for _ in range(2))
    inputs = [x for rank in (0, 1) for x, _ in problem.batches(3, 2, rank, 2)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(inputs, 2))
    for (x, y), (same_x, same_y) in zip(problem.batches(3, 2, 1, 2), again.batches(3, 2, 1, 2), strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_what_is_evaluated_is_what_all_hosts_share():
    problem = Problem(torch.device("cpu"))
    model, shared = problem.model(), problem.model()
    with torch.no_grad():
        model[0].weight.zero_()

    @contextmanager
    def averaged():
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(shared.state_dict())
        yield
        model.load_state_dict(own)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = problem.loss(Training(model, optimizer, averaged=averaged))
    assert loss == problem.loss(Training(shared, optimizer)) != problem.loss(Training(model, optimizer))
