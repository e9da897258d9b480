"""What is known of each worker of a job."""

from hvdlite_launcher.workers.ending import Roster


def test_hosts_are_named_once_and_a_worker_that_has_just_ended_has_none():
    roster = Roster()
    for number, host in enumerate(["b", "a", "b", "c"]):
        roster.add(number, host)
    del roster[3]  # as the job's thread does, while that of hvdlite-run --ps looks at those that ran a moment ago
    assert roster.hosts_of([0, 1, 2, 3]) == ["b", "a"]
