"""What a step's clock adds up, by phase, with times that the test sets."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hvdlite.comm import step_clock
from hvdlite.comm.step_clock import Phase, StepClock


class SetTime:
    """A timer whose time the test advances. Stamps are not known while ``is_late``, as on a GPU."""

    def __init__(self) -> None:
        self.now_s: float | None = 0.0
        self.is_late = False

    def stamp(self) -> Any:
        return self.now_s

    def is_known(self, stamp: Any) -> bool:
        return not self.is_late

    def seconds_between(self, began: float, ended: float) -> float:
        return ended - began

    def work(self, seconds: float) -> None:
        assert self.now_s is not None
        self.now_s += seconds


@pytest.fixture
def timer() -> SetTime:
    return SetTime()


@pytest.fixture
def clock(timer) -> StepClock:
    made = StepClock(timer)
    made.turn_on(0.0)  # a reading after each step
    return made


def take_step(clock: StepClock, timer: SetTime, set_id: int = 0, passes: int = 1) -> None:
    for _ in range(passes):
        timer.work(1)
        clock.begin_backward()
        timer.work(10)
        clock.end_backward()
    with clock.stepping():
        with clock.waiting():
            timer.work(1000)
        timer.work(100)
    clock.stepped(set_id)


def seconds(reading) -> dict[str, float]:
    return {phase.name: reading.seconds[phase] for phase in Phase}


def test_each_phase_has_its_time_and_the_first_step_counts_for_none(clock, timer):
    for _ in range(3):
        take_step(clock, timer)
    assert [each.steps for each in clock.readings] == [1, 2, 3]
    assert [seconds(each) for each in clock.readings] == [
        {"LOAD": steps * 1, "BACKWARD": steps * 10, "OPTIMIZER": steps * 100, "WAIT": steps * 1000}
        for steps in range(3)
    ]


def test_what_lies_between_the_backward_passes_of_a_step_is_no_backward(clock, timer):
    take_step(clock, timer)
    take_step(clock, timer, passes=3)
    assert seconds(clock.readings[-1]) == {"LOAD": 3, "BACKWARD": 30, "OPTIMIZER": 100, "WAIT": 1000}


@pytest.mark.parametrize("phase", ["LOAD", "BACKWARD", "OPTIMIZER"])
def test_a_wait_interrupts_any_phase(clock, timer, phase):
    take_step(clock, timer)
    if phase == "BACKWARD":
        clock.begin_backward()
    with clock.stepping() if phase == "OPTIMIZER" else clock.waiting(), clock.waiting(), clock.waiting():
        timer.work(5)
    timer.work(7 if phase != "OPTIMIZER" else 0)
    clock.end_backward()
    clock.stepped(0)
    expected = dict.fromkeys(Phase.__members__, 0) | {"WAIT": 5}
    if phase != "OPTIMIZER":
        expected[phase] = 7
    assert seconds(clock.readings[-1]) == expected


def test_a_part_of_the_optimizers_step_within_a_wait_is_the_optimizers(clock, timer):
    take_step(clock, timer)
    with clock.stepping(), clock.waiting():
        timer.work(5)
        with clock.stepping():
            timer.work(3)
        timer.work(5)
    clock.stepped(0)
    assert seconds(clock.readings[-1]) == {"LOAD": 0, "BACKWARD": 0, "OPTIMIZER": 3, "WAIT": 10}


def test_a_wait_of_another_thread_is_none_of_the_steps(clock, timer):
    take_step(clock, timer)
    with pytest.raises(ZeroDivisionError), clock.stepping():
        raise ZeroDivisionError
    began = []
    other = threading.Thread(target=lambda: began.append(clock.begin_wait()))
    other.start()
    other.join()
    assert began == [False]
    assert clock.phase is Phase.LOAD


def test_times_that_are_known_late_are_added_up_later(clock, timer):
    timer.is_late = True
    for _ in range(3):
        take_step(clock, timer)
    assert not clock.readings
    timer.is_late = False
    take_step(clock, timer)
    assert [each.steps for each in clock.readings] == [1, 2, 3, 4]
    assert seconds(clock.readings[-1])["BACKWARD"] == 30


def test_a_step_that_a_cuda_graph_captures_is_left_out(clock, timer):
    take_step(clock, timer)
    captured, timer.now_s = timer.now_s, None
    clock.begin_backward()
    clock.end_backward()
    with clock.stepping(), clock.waiting():
        pass
    clock.stepped(0)
    timer.now_s = captured
    take_step(clock, timer)
    take_step(clock, timer)
    assert seconds(clock.readings[-1]) == {"LOAD": 1, "BACKWARD": 10, "OPTIMIZER": 100, "WAIT": 1000}


def test_a_step_of_very_many_waits_takes_bounded_memory_and_only_the_steps_around_it_are_measured(
    clock, timer, monkeypatch
):
    monkeypatch.setattr(step_clock, "_MOST_MARKS", 100)
    take_step(clock, timer)
    take_step(clock, timer)
    for _ in range(1000):
        with clock.waiting():
            timer.work(1)
        assert len(clock._marks) <= 100
    for _ in range(3):
        take_step(clock, timer)
    assert [seconds(each)["BACKWARD"] for each in clock.readings] == [0, 10, 10, 20, 30]
    assert seconds(clock.readings[-1])["WAIT"] == 3000


def test_readings_become_rarer_until_they_are_an_interval_apart(clock, timer):
    clock.turn_on(1e9)
    for _ in range(20):
        take_step(clock, timer)
    assert [each.steps for each in clock.readings] == [1, 2, 4, 8, 16]


def test_steps_of_smaller_process_sets_do_not_count_beside_those_of_all_ranks(clock, timer):
    for set_id in (2, 2, 0, 2, 0):
        take_step(clock, timer, set_id)
    assert [(each.set_id, each.steps) for each in clock.readings] == [(2, 1), (2, 2), (0, 1), (0, 2)]
    # The time of the other optimizer's step is part of it all the same.
    assert clock.readings[-1].seconds[Phase.OPTIMIZER] - clock.readings[-2].seconds[Phase.OPTIMIZER] == 200


def test_a_clock_that_is_off_measures_nothing(timer):
    clock = StepClock(timer)
    for _ in range(3):
        take_step(clock, timer)
    clock.sat_out(0)
    assert not clock.readings
