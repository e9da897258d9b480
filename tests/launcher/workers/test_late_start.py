"""When a report is taken on ranks that do not come to hvd.init(): scripted events, on a clock of the test's."""

from __future__ import annotations

import pytest
from endings import ending_of
from hvdlite_launcher.plan.hosts import Host, plan_slots
from hvdlite_launcher.protocol.messages import Event, Exited, InitDone, InitFailed, InitStarted
from hvdlite_launcher.workers.first_failure import FirstFailure


def reports_of(start_timeout_s: float, *events: tuple[float, Event]) -> list[tuple[float, float]]:
    """Returns when reports are taken, and for how long ranks had waited, if these events come at these times."""
    now_s, taken = 0.0, []
    ending = ending_of(lambda: now_s, hosts=("node1", "node1"))
    slots = {slot.number: slot for slot in plan_slots([Host("node1", 2)])}
    judge = FirstFailure(slots, ending, start_timeout_s=start_timeout_s)
    judge.warn_with(lambda waited_s: taken.append((now_s, waited_s)))
    for at_s, event in [*events, (1000.0, None)]:
        while ending.outcome is None and (left_s := judge.time_left_s()) is not None and now_s + left_s <= at_s:
            now_s += left_s
            judge.time_passes()
        now_s = at_s
        if isinstance(event, Exited):
            judge.on_exit(event)
        elif event is not None:
            judge.on_init(event)
    return taken


def test_a_report_is_taken_shortly_before_the_start_timeout():
    assert reports_of(60, (3.0, InitStarted(0)), (10.0, InitStarted(1))) == [(58.0, 55.0)]


@pytest.mark.parametrize("event", [InitFailed(0), Exited(1, 1)])
def test_none_is_taken_where_the_job_ends_or_a_rank_has_given_up(event):
    assert reports_of(60, (3.0, InitStarted(0)), (10.0, event)) == []


def test_none_is_taken_once_all_ranks_are_connected_also_where_they_connect_again():
    connected = [(4.0, InitStarted(1)), (5.0, InitDone(0)), (5.0, InitDone(1))]
    assert reports_of(60, (3.0, InitStarted(0)), *connected, (6.0, InitStarted(0))) == []


def test_none_is_taken_of_a_program_that_does_not_call_init_or_within_a_timeout_as_short_as_a_report():
    assert reports_of(60) == []
    assert reports_of(10, (3.0, InitStarted(0))) == []
