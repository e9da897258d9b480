"""Which rank, and which phase, is named as holding up the others, and when a line says so."""

from __future__ import annotations

import random
import sys
from statistics import median

import pytest
from control_messages import to_rank_0
from hvdlite_wire.codec import MessageError, decode, encode
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdlite.comm.step_clock import Phase, RankPace, Reading
from hvdlite.control.reports import is_in_model
from hvdlite.coordinator.stragglers import StragglerWatch, _medians_of_others, paces_between

PHASES = {Phase.LOAD: "data and forward", Phase.BACKWARD: "backward", Phase.OPTIMIZER: "optimizer"}


def reading(steps: int, seconds: list[float], *, set_id=0, sat_out=0, in_forward=0, elsewhere=0) -> Reading:
    return Reading(set_id, steps, sat_out, tuple(each * steps for each in seconds), in_forward, elsewhere)


def compare(per_step: list[list[float]], steps: int = 10) -> list[RankPace]:
    older = dict(enumerate(reading(steps, each) for each in per_step))
    newer = dict(enumerate(reading(3 * steps, each) for each in per_step))
    return paces_between(older, newer, [f"node{rank}" for rank in range(len(per_step))])


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_the_median_of_the_others_is_that_of_the_values_without_ones_own(values):
    medians = _medians_of_others(dict(enumerate(values)))
    for rank in range(len(values)):
        assert medians[rank] == pytest.approx(median(values[:rank] + values[rank + 1 :]))


@given(
    size=st.integers(2, 8),
    phase=st.sampled_from(list(PHASES)),
    extra_s=st.floats(0.05, 10),
    seed=st.integers(0, 2**32),
)
def test_whichever_rank_is_slow_in_whichever_phase_is_named(size, phase, extra_s, seed):
    dice = random.Random(seed)
    slow = dice.randrange(size)
    per_step = [[dice.uniform(0.1, 0.11) for _ in PHASES] for _ in range(size)]
    per_step[slow][phase] += extra_s
    longest_s = max(sum(each) for each in per_step)
    paces = compare([[*each, longest_s - sum(each)] for each in per_step])
    worst = max(paces, key=lambda pace: pace.cost)
    assert (worst.rank, worst.host, worst.phase) == (slow, f"node{slow}", PHASES[phase])
    usual_s = median(sum(each) for rank, each in enumerate(per_step) if rank != slow)
    assert worst.cost == pytest.approx((longest_s - usual_s) / longest_s)
    assert worst.relative_score == pytest.approx(usual_s / longest_s)
    assert sum(worst.seconds.values()) + worst.wait_s == pytest.approx(longest_s)


def test_equal_ranks_cost_nothing_and_lose_it_in_no_phase():
    for pace in compare([[1, 1, 1, 0]] * 3):
        assert (pace.cost, pace.phase, pace.relative_score, pace.own_score) == (0, None, 1, 1)


def test_a_rank_that_was_seen_in_its_model_is_slow_in_forward():
    older = {rank: reading(1, [0, 0, 0, 0]) for rank in range(3)}
    newer = {
        0: reading(11, [0.1, 0.1, 0.1, 0.5]),  # so seldom seen that what the others do is taken for its own
        1: reading(11, [0.6, 0.1, 0.1, 0.0], in_forward=90, elsewhere=10),
        2: reading(11, [0.1, 0.1, 0.1, 0.5], in_forward=5, elsewhere=5),
    }
    worst = max(paces_between(older, newer, ["a", "b", "c"]), key=lambda pace: pace.cost)
    assert (worst.rank, worst.phase) == (1, "forward")
    assert list(worst.seconds) == ["data", "forward", "backward", "optimizer"]
    assert worst.seconds["forward"] == pytest.approx(worst.seconds["data"] * 9)


def test_ranks_that_have_joined_are_not_compared():
    older = {rank: reading(1, [1, 1, 1, 0]) for rank in range(3)}
    newer = {0: reading(5, [1, 1, 1, 0]), 1: reading(5, [1, 1, 1, 0], sat_out=4), 2: reading(5, [2, 1, 1, 0])}
    assert [pace.rank for pace in paces_between(older, newer, ["here"] * 3)] == [0, 2]
    assert paces_between(older, {**newer, 2: reading(5, [2, 1, 1, 0], sat_out=1)}, ["here"] * 3) == []


def test_a_pace_arrives_as_it_was_sent():
    pace = compare([[1.0, 2.0, 0.5, 0.0], [1.0, 1.0, 0.5, 1.0]])[0]
    assert decode(RankPace, encode(pace.rounded())) == pace


@pytest.mark.parametrize(
    "said",
    [
        [],
        [0, 1, 0, [1.0] * 3, 0, 0],
        [0, 1, 0, [1.0, 1.0, 1.0, "1"], 0, 0],
        [0, 1, 0, [1.0, 1.0, 1.0, float("nan")], 0, 0],
        [0, -1, 0, [1.0] * 4, 0, 0],
        [0, 1, 0, 4, 0, 0],
        [None, 1, 0, [1.0] * 4, 0, 0],
    ],
)
def test_a_reading_that_is_none_is_refused(said):
    with pytest.raises(MessageError):
        to_rank_0("pace", said)


def test_a_reading_that_was_sent_is_read():
    assert to_rank_0("pace", [0, 8, 1, [1, 2.5, 0, 3], 4, 5]).reading == Reading(0, 8, 1, (1, 2.5, 0, 3), 4, 5)


class Job:
    """Ranks that take a step each second; ``load_s`` are their seconds in the phase LOAD, of 1 s."""

    def __init__(self, size: int = 3, threshold: float | None = 0.1) -> None:
        self.watch = StragglerWatch([f"node{rank}" for rank in range(size)], threshold, time_of_day=lambda: 0.0)
        self.load_s = [0.2] * size
        self.backward_s = [0.2] * size
        self.totals = [[0.0] * len(Phase) for _ in range(size)]
        self.steps = 0

    def run(self, seconds: int) -> list[str]:
        """Returns the lines written meanwhile."""
        for _ in range(seconds):
            self.steps += 1
            for rank, total in enumerate(self.totals):
                busy_s = self.load_s[rank] + self.backward_s[rank]
                for phase, each in zip(Phase, (self.load_s[rank], self.backward_s[rank], 0.0, 1 - busy_s), strict=True):
                    total[phase] += each
                self.watch.add(rank, Reading(0, self.steps, 0, tuple(total), 0, 0), float(self.steps))
        lines = self.watch.warnings + self.watch.remarks
        self.watch.warnings, self.watch.remarks = [], []
        return lines


def test_a_rank_that_is_slow_for_a_minute_is_named_once_and_again_when_it_no_longer_is():
    job = Job()
    assert job.run(100) == []
    job.load_s[2] = 0.8
    early = job.run(29)
    assert early == []
    (line,) = job.run(120)
    assert "rank 2 (node2)" in line
    assert "in data and forward" in line
    assert "HVDLITE_STRAGGLER_WARNING=0" in line
    assert job.run(300) == []
    job.load_s[2] = 0.2
    (line,) = job.run(120)
    assert line.startswith("straggler: rank 2 (node2) no longer holds up the other ranks")
    assert job.run(100) == []


def test_the_line_comes_again_after_ten_minutes():
    job = Job()
    job.load_s[0] = 0.8
    assert [len(job.run(100)) for _ in range(15)] == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]


def test_a_line_comes_when_another_rank_or_phase_holds_up_the_others():
    job = Job()
    job.load_s[0] = 0.8
    assert len(job.run(100)) == 1
    job.load_s[0], job.backward_s[0] = 0.2, 0.8
    (line,) = job.run(100)
    assert "rank 0" in line
    assert "in backward" in line
    job.backward_s[0], job.backward_s[1] = 0.2, 0.8
    lines = job.run(200)
    assert any("rank 1" in line and "costs" in line for line in lines)


def test_one_long_pause_is_no_straggler_though_it_costs_as_much():
    job = Job()
    job.run(70)
    job.totals[1][Phase.LOAD] += 30.0  # rank 1 saves, and the others wait for it
    for rank in (0, 2):
        job.totals[rank][Phase.WAIT] += 30.0
    assert job.run(1) == []
    assert max(pace.cost for pace in job.watch.paces()) > 0.1
    assert job.run(100) == []


def test_a_small_cost_is_no_straggler_and_no_threshold_no_line():
    job = Job()
    job.load_s[1] = 0.25
    assert job.run(200) == []
    assert job.watch.paces()[1].cost == pytest.approx(0.05)
    silent = Job(threshold=None)
    silent.load_s[1] = 0.8
    assert silent.run(200) == []
    assert silent.watch.paces()[1].cost == pytest.approx(0.6)


def test_a_rank_that_becomes_slower_than_it_was_has_a_lower_own_score():
    job = Job()
    job.run(100)
    job.load_s = [0.6] * 3
    job.run(100)
    for pace in job.watch.paces():
        assert pace.own_score == pytest.approx(0.5)
        assert pace.relative_score == 1


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=5), st.randoms())
def test_ranks_that_read_their_clocks_at_different_steps_are_compared_at_common_ones(everies, dice):
    watch = StragglerWatch(["here"] * len(everies), None)
    sent = [(step, rank) for step in range(1, 33) for rank, every in enumerate(everies) if step % every == 0]
    dice.shuffle(sent)
    sent.sort(key=lambda each: each[0])  # in any order of the ranks
    changes = [step for step, rank in sent if watch.add(rank, reading(step, [1, 1, 1, 0]), float(step))]
    # Before, not all ranks are known.
    since = 2 * max(everies)
    assert [step for step in changes if step > since] == list(range(since + max(everies), 33, max(everies)))


def test_ranks_are_compared_with_those_of_their_process_set():
    watch = StragglerWatch(["here"] * 4, None)
    for steps in (1, 2, 3):
        for rank, load_s in enumerate([1, 2, 30, 40]):
            watch.add(rank, reading(steps, [load_s, 0, 0, 0], set_id=1 + rank // 2), float(steps))
    assert [pace.relative_score for pace in watch.paces()] == [1, 0.5, 1, 0.75]


def test_a_rank_of_which_nothing_arrives_leaves_what_was_known_and_little_memory():
    watch = StragglerWatch(["here"] * 2, None)
    for steps in (1, 2):
        for rank in range(2):
            watch.add(rank, reading(steps, [1, 1, 1, 0]), float(steps))
    known = watch.paces()
    assert not any(watch.add(0, reading(steps, [1, 1, 1, 0]), float(steps)) for steps in range(3, 5000))
    assert watch.paces() == known
    assert len(watch._companies[0].by_rank[0]) < 1000


class Looks(nn.Module):
    """Notes whether a look at the program finds it in a model."""

    def __init__(self, *, has_parameters: bool) -> None:
        super().__init__()
        self.found: bool | None = None
        if has_parameters:
            self.weight = nn.Parameter(nn.init.zeros_(nn.Linear(1, 1).weight))

    def forward(self) -> None:

        self.found = is_in_model(sys._getframe())


class LooksWithListOfParameters(Looks):
    """Has a method of its own in place of PyTorch's."""

    def parameters(self) -> list[nn.Parameter]:
        return list(super().parameters())


def test_a_model_that_has_another_method_for_its_parameters_is_one_too():
    module = LooksWithListOfParameters(has_parameters=True)
    module()
    assert module.found is True


class LooksWhileItGrows(Looks):
    """Gets modules while the thread that looks goes through them."""

    def named_modules(self, *arguments, **named):
        for each in super().named_modules(*arguments, **named):
            self.add_module(f"number {len(self._modules)}", nn.Identity())
            yield each


def test_a_model_that_grows_while_it_is_looked_at_is_one_too():
    module = LooksWhileItGrows(has_parameters=False)
    module.first = nn.ReLU()
    module()
    assert module.found is True


def test_only_a_module_with_parameters_is_a_model():

    assert not is_in_model(sys._getframe())
    for has_parameters in (True, False):
        module = Looks(has_parameters=has_parameters)
        module()
        assert module.found is has_parameters
