"""What a rank tells rank 0 of its waits, and when it complains that rank 0 is silent."""

from __future__ import annotations

import pytest
from control_messages import said

from hvdlite.control.rank0_connection import LOOK_S
from hvdlite.control.reports import Heartbeat, Silence
from hvdlite.coordinator.scene import BlockedThread
from hvdlite.coordinator.stall import StallRules


def looked(heartbeat: Heartbeat, now_s: float, blocked=(), **more) -> list:
    more = {"is_stuck": True, "is_waiting": bool(blocked), "over_count": 0, **more}
    return [said(message) for message in heartbeat.look(now_s, blocked, **more)]


@pytest.mark.parametrize(
    "other",
    [
        BlockedThread("bucket 1", 11.0, collective=("opt", 4, (0, 1))),  # for too short a time to be reported
        BlockedThread("allreduce of 'a'", 0.0, is_operation=True),
        BlockedThread("something", 0.0),
    ],
)
def test_a_rank_is_stuck_only_where_all_that_it_waits_for_is_told(other):
    wait = BlockedThread("bucket 0", 0.0, collective=("opt", 3, (0, 2)))
    assert looked(Heartbeat(StallRules()), 11.0, [wait], size=3)[0][1:3] == [
        [["bucket 0", 11.0, False, ["opt", 3, [0, 2]]]],
        True,
    ]
    assert looked(Heartbeat(StallRules()), 11.0, [wait, other], size=3)[0][2] is False


def test_what_a_rank_is_blocked_in_is_told_once_and_again_when_it_changes():
    heartbeat = Heartbeat(StallRules())
    begun, size = {"opt": 3}, 2
    wait = BlockedThread("bucket 0", 10.0, collective=("opt", 3, (0, 1)))
    busy = ["busy", [["bucket 0", 1.5, False, ["opt", 3, None]]], True, begun]
    assert looked(heartbeat, 10.25, [wait]) == [["alive", 0]]
    assert looked(heartbeat, 11.5, [wait], begun=begun, size=size)[0] == busy
    assert looked(heartbeat, 12.5, [wait]) == [["alive", 0]]
    # The same text, but another step.
    again = BlockedThread("bucket 0", 12.0, collective=("opt", 3, (0, 1)))
    assert looked(heartbeat, 13.5, [again], begun=begun, size=size)[0] == busy
    assert looked(heartbeat, 14.5, begun=begun) == [["busy", [], False, begun]]
    assert looked(heartbeat, 15.5) == []


def test_the_longest_waits_of_all_threads_are_told_first():
    waits = [BlockedThread(str(number), float(number)) for number in range(30, 0, -1)]
    (_, told, _, _), _ = looked(Heartbeat(StallRules()), 100.0, waits)
    assert [what for what, *_ in told] == [str(number) for number in range(1, 17)]


def test_how_many_operations_are_over_is_told_when_that_has_changed():
    heartbeat = Heartbeat(StallRules())
    assert looked(heartbeat, 1.0, over_count=7) == [["alive", 7]]
    assert looked(heartbeat, 2.0, over_count=7) == []


def test_a_rank_0_that_does_not_answer_is_told_of_and_is_the_end_when_that_is_asked_for():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    told = []
    for second in range(10):
        looked(heartbeat, float(second), [BlockedThread("bucket 0", 0.0)])
        told.append(heartbeat.silence(float(second)))
    assert told == [None] * 5 + [Silence(5.0, is_end=False), None, None, Silence(8.0, True), Silence(9.0, True)]


def test_a_rank_0_that_answers_or_is_not_asked_is_not_silent():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    for second in range(20):
        looked(heartbeat, float(second), [BlockedThread("bucket 0", 0.0)])
        assert heartbeat.silence(float(second)) is None
        heartbeat.heard()
    for second in range(20, 40):
        looked(heartbeat, float(second))
        assert heartbeat.silence(float(second)) is None


def test_a_rank_that_was_stopped_itself_does_not_blame_rank_0():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    looked(heartbeat, 0.0, [BlockedThread("bucket 0", 0.0)])
    looked(heartbeat, 100.0, [BlockedThread("bucket 0", 0.0)])
    assert heartbeat.silence(100.0) is None
    assert LOOK_S < 3


def test_a_rank_0_that_does_not_answer_is_told_of_also_by_a_rank_that_is_always_late():
    heartbeat = Heartbeat(StallRules(5.0, 8.0))
    told = []
    for look in range(40):
        now_s = 4.0 * look
        looked(heartbeat, now_s, [BlockedThread("bucket 0", 0.0)])
        told.append(heartbeat.silence(now_s))
    # Of a time in which the rank did not look itself, no more counts than the time between two looks.
    assert [each for each in told if each is not None][:2] == [Silence(5.0, is_end=False), Silence(8.0, is_end=True)]


def test_the_stall_check_can_be_turned_off():
    heartbeat = Heartbeat(StallRules(None, None))
    for second in range(1000):
        looked(heartbeat, float(second), [BlockedThread("bucket 0", 0.0)])
        assert heartbeat.silence(float(second)) is None
