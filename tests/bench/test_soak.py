"""What a soak concludes from the workers' files, its report, and its wrong command lines."""

from __future__ import annotations

import pytest
from bench.soak import Line, Soak, Training, Window, parsed, read_lines, report_of, training_of

from hvdlite.bench.arguments import OptionError


def lines(*steps: tuple[int, int, float, str | None]) -> list[Line]:
    return [Line(number, step, at_s, 16, hashed) for number, step, at_s, hashed in steps]


def test_a_line_that_a_killed_worker_has_not_finished_is_left_out(tmp_path):
    written = lines((1, 0, 100.5, "ab"), (1, 1, 100.75, None))
    (tmp_path / "0.txt").write_text("".join(line.text() for line in written) + "1 2 100.")
    (tmp_path / "1.txt").write_text("")
    (tmp_path / "stderr").write_text("not a worker's")
    assert read_lines(tmp_path) == [written, []]


def test_a_step_ends_with_its_slowest_rank_and_the_first_is_not_counted():
    first = lines((1, 0, 10.0, "a"), (1, 1, 11.0, None), (1, 2, 13.0, "b"))
    second = lines((1, 0, 10.5, "a"), (1, 1, 12.5, None))
    assert training_of([first, second]) == Training(
        seconds=2.5, steps=2, samples=48, repeated=0, pause_s=2.0, compared=1, unequal=0
    )


def test_a_step_that_is_done_again_is_lost_once_and_counts_once():
    left = lines((1, 0, 0.0, "a"), (1, 1, 1.0, "b"), (2, 1, 3.0, "c"), (2, 2, 4.0, None))
    killed = lines((1, 0, 0.0, "a"), (1, 1, 1.0, "b"))
    found = training_of([left, killed])
    assert found is not None
    assert (found.steps, found.samples, found.repeated, found.pause_s) == (2, 32, 1, 3.0)
    # The killed worker's hash is of the first time, and is not compared with the second.
    assert (found.compared, found.unequal) == (2, 0)


def test_hashes_that_differ_after_the_same_step_are_counted():
    found = training_of([lines((1, 0, 0.0, "a"), (1, 1, 1.0, "b")), lines((1, 0, 0.0, "a"), (1, 1, 1.0, "x"))])
    assert found is not None
    assert (found.compared, found.unequal) == (2, 1)


def test_less_than_two_steps_are_no_training():
    assert training_of([lines((1, 0, 0.0, "a")), []]) is None


def window(has_faults: bool, samples: int, kinds: tuple[str, ...] = (), left: int | None = 0, unequal: int = 0):
    return Window(has_faults, Training(2.0, samples // 32, samples, 1, 0.5, 10, unequal), kinds, left)


def test_the_report_has_the_ratio_of_the_medians_and_counts_the_faults():
    rates = ((False, 400), (True, 300), (True, 100), (False, 200), (False, 600))
    windows = [window(has, samples, ("kill", "segv") if has else ()) for has, samples in rates]
    text, data = report_of(windows, 2, 6.0)
    without, with_faults = data["rows"]
    assert (without["median_samples_per_s"], with_faults["median_samples_per_s"]) == (200, 100)
    assert (with_faults["times_without"], with_faults["faults"], without["faults"]) == (0.5, 4, 0)
    assert data["faults"] == {"kill": 2, "segv": 2}
    assert (data["steps_repeated"], data["steps_compared"], data["is_right"]) == (5, 50, True)
    assert "faults: 2 kill, 2 segv" in text
    assert "equal on all ranks after each of the 50 steps" in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (window(True, 100, unequal=3), "NOT EQUAL on all ranks after 3 of the 10 steps"),
        (window(True, 100, left=2), "processes left behind: 2"),
        (Window(True, None, (), 0, "exit code 1:\nwhy"), "a window failed: exit code 1:\nwhy"),
    ],
)
def test_what_is_wrong_is_told_and_the_soak_has_failed(wrong, said):
    text, data = report_of([wrong], 2, 6.0)
    assert said in text
    assert not data["is_right"]


def test_a_report_of_no_window_says_so_without_an_error():
    assert "faults: none" in report_of([], 2, 6.0)[0]


def test_windows_come_in_pairs_that_are_long_enough_for_several_faults():
    assert Soak().pairs == 6
    assert Soak(seconds=12, every=4).pairs == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-np 1", "-np: a rank that is alone cannot go on after a fault: say at least 2"),
        ("--for 50", "--for: half of 50 s is without faults, and the rest is too short for one in each 30 s: say at"),
    ],
)
def test_a_soak_without_room_for_faults_is_refused(words, message):
    with pytest.raises(OptionError) as error:
        parsed(words.split())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-np two", "-np: 'two' is not a whole number of at least 1"),
        ("--every 0", "--every: '0' is not a number of seconds, such as 30"),
        ("--for nan", "--for: 'nan' is not a number of seconds, such as 30"),
        ("--faults kill+host", "--faults: 'host' is not a kind of fault: choose from kill, segv, stop, joined by +"),
        ("--seed=-1", "--seed: '-1' is not a whole number from 0 to 999999"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit):
        parsed(words.split())
    assert f"error: argument {message}" in capsys.readouterr().err
