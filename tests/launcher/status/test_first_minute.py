"""The first minute says what a job waits for, with scripted events, and goes away for good."""

import pytest
from endings import ending_of
from hvdlite_launcher.protocol.messages import (
    Answered,
    Exited,
    Hello,
    HostsFound,
    InitDone,
    InitStarted,
    Lost,
    Output,
    Started,
)
from hvdlite_launcher.status.first_minute import FirstMinute

HELLO = Hello("1", 1, None, 1)


class Shown:
    """The status after each event, as it is at the next tick."""

    def __init__(self, hosts):
        self.now, self.lines = 0.0, ["never set"]
        ending = ending_of(lambda: self.now, hosts=hosts)
        self.running, self.roster = ending.running, ending.roster
        self._minute = FirstMinute(ending, self._set)

    def add(self, number, host, rank=None):
        self.roster.add(number, host, rank)
        self.running.add(number)

    def _set(self, *lines):
        self.lines = list(lines)

    def after(self, *events):
        for event in events:
            self._minute.on_event(event)
        if (left_s := self._minute.time_left_s()) is not None:
            self.now += max(0.0, left_s)
            self._minute.time_passes()
        return self.lines


def test_it_says_what_is_awaited_from_the_start_until_all_are_connected():
    job = Shown(["node1", "node1", "node2", "node2"])
    assert job.after() == ["hvdlite-run: starting 4 workers on 2 hosts (0 s)"]
    assert job.after(*(Started(each, 100 + each) for each in range(3))) == [
        "hvdlite-run: starting 4 workers on 2 hosts (0 s)"
    ]
    (line,) = job.after(Started(3, 103))
    assert "4 workers on 2 hosts: importing" in line
    (line,) = job.after(InitStarted(0), InitStarted(1))
    assert "2 of 4 workers in hvd.init(), waiting for ranks 2, 3 on node2" in line
    (line,) = job.after(InitStarted(2), InitStarted(3), InitDone(1))
    assert "1 of 4 connected" in line
    assert job.after(InitDone(0), InitDone(2), InitDone(3)) == []


def test_the_seconds_go_on_while_nothing_happens():
    job = Shown(["node1"])
    job.after(Started(0, 1))
    assert [job.after()[0].rpartition("(")[2] for _ in range(3)] == ["1 s)", "2 s)", "3 s)"]


@pytest.mark.parametrize("event", [Output(0, "stdout", b"."), Exited(0, 1)], ids=["output", "end"])
def test_it_ends_for_good_with_the_first_output_or_end_of_a_worker(event):
    job = Shown(["node1", "node1"])
    job.after(Started(0, 1))
    assert job.after(event) == []
    assert job.after(Started(1, 2), InitStarted(0)) == []


def test_of_many_that_are_missing_only_the_number_is_told():
    job = Shown(["node1"] * 64)
    (line,) = job.after(*(Started(each, 1 + each) for each in range(64)), InitStarted(0))
    assert "1 of 64 workers in hvd.init(), waiting for 63 others" in line


def test_an_elastic_job_names_the_hosts_that_have_not_answered():
    job = Shown([])
    (line,) = job.after()
    assert "waiting for hosts" in line
    (line,) = job.after(HostsFound({"a": 1, "b": 1, "c": 1}), Answered("b", HELLO))
    assert "connecting to a, c (" in line
    (line,) = job.after(Lost("c", "gone"))
    assert "connecting to a (" in line
    job.add(7, "b")
    (line,) = job.after(Started(7, 1), InitStarted(7))
    assert "0 of 1 connected" in line
