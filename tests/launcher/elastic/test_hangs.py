"""Which workers do not answer, and when one of them is to be ended."""

from __future__ import annotations

import pytest
from hvdlite_launcher.elastic.hangs import Hangs
from hvdlite_launcher.protocol.messages import Alive, Unresponsive

LIMIT_S = 8.0
PAUSE_S = 2.0


class Played:
    """A job of three workers: those that answer do so at once, with how long they have waited."""

    def __init__(self, limit_s: float = LIMIT_S, workers=range(3)) -> None:
        self.now_s = 100.0
        self.keys: dict[bytes, bytes] = {}
        self.told: list[tuple[float, int, float]] = []
        self.hangs = Hangs(limit_s, self, lambda: self.now_s, self.tell)
        self.waited_s = dict.fromkeys(workers, 0.0)
        self.silent: set[int] = set()
        self.in_init: set[int] = set()
        for worker in workers:
            self.hangs.begin(worker)
        self.answer()

    def put(self, key, value):
        assert key not in self.keys
        self.keys[key] = value

    def delete(self, key):
        del self.keys[key]

    def tell(self, said: Unresponsive):
        self.told.append((self.now_s, said.worker, said.silent_s))

    def answer(self):
        for key in list(self.keys):
            _, worker, number = key.split(b"/")
            assert self.keys[key] == number
            if int(worker) not in self.silent:
                self.hangs.answered(Alive(int(worker), int(number), self.waited_s[int(worker)]))

    def pass_s(self, seconds: float) -> list[int]:
        """Lets time pass, and looks whenever it is due; returns the workers to end."""
        until_s = self.now_s + seconds
        ended = []
        while (due_s := self.hangs.due_s()) is not None and due_s <= until_s:
            self.now_s = due_s
            ended += self.hangs.look(self.in_init)
            for worker in ended:
                self.hangs.forget(worker)
            self.answer()
        self.now_s = until_s
        return ended


def test_workers_that_answer_are_left_alone():
    played = Played()
    played.waited_s[0] = 1000
    assert played.pass_s(100) == []


def test_a_silent_worker_is_ended_once_the_limit_is_over_if_others_wait():
    played = Played()
    played.pass_s(PAUSE_S)
    played.silent, played.waited_s[0], played.waited_s[1] = {2}, 5, 5
    assert played.pass_s(LIMIT_S) == []
    assert played.pass_s(PAUSE_S) == [2]
    assert played.pass_s(100) == []


def test_a_silent_worker_for_which_nobody_waits_is_left_alone_until_somebody_does():
    played = Played()
    played.silent = {2}
    assert played.pass_s(10 * LIMIT_S) == []
    played.waited_s[0] = 5
    assert played.pass_s(2 * PAUSE_S) == [2]


def test_one_that_waits_itself_is_ended_too_if_it_is_silent():
    played = Played()
    played.waited_s = {0: 5, 1: 5, 2: 5}
    played.pass_s(PAUSE_S)
    played.silent = {1}
    assert played.pass_s(LIMIT_S + 2 * PAUSE_S) == [1]


def test_a_wait_in_init_counts():
    played = Played()
    played.silent, played.in_init = {2}, {0}
    assert played.pass_s(LIMIT_S + PAUSE_S) == [2]


def test_silent_workers_do_not_wait_for_each_other():
    played = Played()
    played.waited_s = {0: 5, 1: 5, 2: 5}
    played.pass_s(PAUSE_S)
    played.silent = {0, 1, 2}
    assert played.pass_s(100) == []


def test_several_are_ended_together():
    played = Played()
    played.silent, played.waited_s[0] = {1, 2}, 5
    assert played.pass_s(LIMIT_S + PAUSE_S) == [1, 2]


def test_some_seconds_before_a_worker_is_ended_it_is_told_once_that_it_does_not_respond():
    played = Played(limit_s=30.0)
    played.silent, played.waited_s[0] = {2}, 5
    asked_at_s = played.now_s + 2.5
    assert played.pass_s(29.9) == []
    assert played.told == [(asked_at_s + 25.0, 2, 25.0)]
    assert played.pass_s(5.0) == [2]
    assert len(played.told) == 1


def test_it_is_told_again_after_an_answer_and_not_where_nobody_waits():
    played = Played(limit_s=30.0)
    played.silent = {2}
    played.pass_s(100)
    assert played.told == []
    played.silent = set()
    played.answer()
    played.pass_s(10)
    played.waited_s[0] = 5
    for count in (1, 2):
        played.silent = {2}
        assert played.pass_s(29) == []
        played.silent = set()
        played.answer()
        played.pass_s(10)
        assert len(played.told) == count


def test_within_a_short_limit_nothing_is_told():
    played = Played()
    played.silent, played.waited_s[0] = {2}, 5
    assert played.pass_s(LIMIT_S + PAUSE_S) == [2]
    assert played.told == []


def test_the_time_in_which_the_launcher_was_stopped_does_not_count():
    played = Played()
    played.waited_s[0] = 5
    played.pass_s(PAUSE_S)
    played.silent = {1}
    played.pass_s(PAUSE_S)
    played.now_s += 1000
    assert played.hangs.look(()) == []
    played.silent = set()
    played.answer()
    assert played.pass_s(100) == []


def test_an_answer_to_an_earlier_question_is_ignored():
    played = Played()
    played.silent, played.waited_s[0] = {1}, 5
    played.pass_s(PAUSE_S)
    played.hangs.answered(Alive(1, 0, 0))
    assert played.pass_s(LIMIT_S + PAUSE_S) == [1]


def test_a_worker_that_has_ended_leaves_no_key():
    played = Played()
    played.silent = {0, 1, 2}
    played.pass_s(PAUSE_S)
    assert len(played.keys) == 3
    for worker in range(3):
        played.hangs.forget(worker)
    played.hangs.answered(Alive(1, 1, 0))
    assert not played.keys
    assert played.hangs.due_s() is None


@pytest.mark.parametrize("worker", [0, 1])
def test_without_a_limit_nobody_is_asked(worker):
    played = Played(limit_s=0)
    played.hangs.begin(worker)
    assert not played.keys
    assert played.hangs.due_s() is None
