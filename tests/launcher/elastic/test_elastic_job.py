"""An elastic job on scripts of events: who is started, which ranks are given, what is said, and how it ends."""

from __future__ import annotations

import errno
import signal

import pytest
from elastic_script import START_TIMEOUT_S, TIME_PASSES, Played, answers, asks, begins
from hvdlite_launcher.plan.job_spec import ON_FAILURE
from hvdlite_launcher.protocol.messages import (
    Alive,
    DiscoveryFailed,
    Exited,
    HostsFound,
    InitDone,
    InitFailed,
    InitStarted,
    Interrupted,
    LoopFailed,
    Lost,
    NotThereYet,
    Output,
    Refused,
    ScreenFailed,
    Started,
    Unresponsive,
)
from hvdlite_launcher.workers.ending import FAILURE_GRACE_S
from hvdlite_wire.store_requests import Dismissal, NewWorkerPolicy, RankAssignment

TERM, KILL, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGINT


class Agent:
    """An agent to whose store messages nobody listens."""

    def __init__(self) -> None:
        self.told: list = []

    def send(self, message) -> None:
        self.told.append(message)


def found(**hosts):
    return HostsFound(hosts)


KILLED_1 = Exited(1, -9)


def test_workers_are_started_where_hosts_have_slots_and_given_ranks_once_all_of_them_ask():
    def check(job):
        assert job.started == {0: "a", 1: "a", 2: "b"}
        assert job.answer(0, 0) is None

    played = Played(found(a=2, b=1), answers("b"), answers("a"), *asks(2, 0), check, *asks(1))
    assert [played.answer(worker, 0) for worker in range(3)] == [RankAssignment(1, rank, 3, 3) for rank in range(3)]
    assert played.ranks == {0: 0, 1: 1, 2: 2}
    assert played.variables[1]["HVDLITE_WORKER"] == played.variables[1]["LOCAL_RANK"] == "1"


def test_the_first_generation_waits_for_all_hosts_that_were_found_first_and_not_for_one_that_fails():
    played = Played(found(a=1, b=1, c=1), answers("a"), lambda job: bool(job.started) and 1 / 0, answers("b"))
    assert played.started == {}
    played = Played(found(a=1, b=1, c=1), answers("a"), answers("b"), Lost("c", "no route"))
    assert played.started == {0: "a", 1: "b"}
    assert played.said == ["c: no route"]


def test_a_host_that_does_not_answer_in_time_is_done_without():
    played = Played(found(a=1, b=1), answers("a"), TIME_PASSES, lambda job: None)
    assert played.started == {0: "a"}
    assert played.said == ["b: no answer within 60 s (--start-timeout)"]
    assert played.left == ["b"]


def test_who_lost_a_rank_gets_a_rank_among_those_that_are_left_and_is_told_why():
    agent = Agent()
    played = Played(
        *begins(a=3),
        lambda job: job.store.receive(agent, _want(b"world1/x")),
        KILLED_1,
        *asks(0, 2, after=1),
        on_failure=ON_FAILURE["shrink"],
    )
    assert [(each.generation, each.why) for each in agent.told if hasattr(each, "why")] == [
        (1, "worker 1 (rank 1 on a) was killed by SIGKILL"),
        (1, "there is generation 2"),
    ]
    assert played.answer(2, 1) == RankAssignment(2, 1, 2, 0)
    assert played.said == ["generation 2: 2 ranks; worker 1 (rank 1 on a) was killed by SIGKILL"]
    assert played.ranks == {0: 0, 1: 1, 2: 1}
    assert played.answer(0, 0) is None, "a rank is taken away when its worker asks again"


def _want(key):
    from hvdlite_launcher.protocol.store_messages import Want  # noqa: PLC0415

    return Want(key)


def test_a_replacement_is_announced_to_rank_0_once_it_asks_and_joins_last():
    def check(job):
        assert job.started[2] == "a"
        assert job.news(2) is None

    played = Played(
        *begins(a=2),
        KILLED_1,
        *asks(0, after=1),
        check,
        *asks(2),
        lambda job: None if job.news(2)["added"] else 1 / 0,
        *asks(0, after=2),
    )
    assert played.answer(2, 0) == RankAssignment(3, 1, 2, 1)
    assert played.said[-1] == "generation 3: 2 ranks; worker 2 joins as rank 1 on a"


def test_hosts_that_come_are_connected_to_and_hosts_that_go_are_left_when_their_workers_have_ended():
    def removed(job):
        assert job.news(2) == {"added": False, "removed": True, "timestamp": job.news(2)["timestamp"]}
        assert job.left == []

    played = Played(
        *begins(a=1),
        found(a=1, b=1),
        answers("b"),
        *asks(1),
        *asks(0, after=1),
        found(b=1),
        removed,
        *asks(0, after=2),
        lambda job: None if job.answer(0, 2) == Dismissal("a has been removed from the job") else 1 / 0,
        Exited(0, 0),
        *asks(1, after=2),
    )
    assert played.connected == ["a", "b"]
    assert played.left == ["a"]
    assert played.answer(1, 2) == RankAssignment(3, 0, 1, 0)
    left = "worker 0 (rank 0 on a) has left: a has been removed from the job"
    assert played.said[-1] == f"generation 3: 1 rank; {left}"


def test_a_wrong_name_in_the_list_of_hosts_does_not_end_the_ranks_that_there_are():
    unknown = NotThereYet("typo", "its name is not known", "ssh: Could not resolve hostname typo")
    given_up = [TIME_PASSES, lambda job: None]
    played = Played(*begins(a=2), found(typo=2), unknown, *given_up, *asks(0, 1, after=1), min_np=1)
    assert played.ending.outcome is None
    assert played.left == ["typo"]
    assert played.news(1) is None  # no rank is told to leave
    assert any(said.startswith("typo: ") for said in played.said)
    assert played.answer(0, 1).size == 2


def test_a_list_of_hosts_that_is_empty_ends_the_job():
    played = Played(*begins(a=1), found(), *asks(0, after=1), Exited(0, 0))
    assert played.outcome.message == "all hosts have been removed"


def test_a_host_that_comes_back_is_connected_anew():
    played = Played(*begins(a=1), found(a=1, b=1), answers("b"), found(a=1), Exited(1, 0), found(a=1, b=1))
    assert played.connected == ["a", "b", "b"]


def test_a_lost_host_is_named_and_connected_anew_after_its_cooldown():
    played = Played(
        *begins(a=1, b=2),
        Lost("b", "the link is cut"),
        *asks(0, after=1),
        TIME_PASSES,
        lambda job: None,
        cooldown_s=(10, 100),
    )
    assert played.connected == ["a", "b", "b"]
    assert played.now_s == 10
    assert played.finished == [1, 2]
    assert played.said == ["lost b: the link is cut", "generation 2: 1 rank; lost b: the link is cut"]


def test_two_names_of_one_machine_are_one_host_with_the_slots_of_both():
    played = Played(found(a=1, b=2), answers("a", "m"), answers("b", "m"))
    assert list(played.started.values()) == ["a"] * 3
    assert played.left == ["b"]
    assert played.said == ["b is a further name of a, and not a host of its own"]


def test_slots_that_were_not_counted_are_those_that_the_host_says():
    assert len(Played(found(a=0), answers("a", slots=3)).started) == 3


def test_workers_of_a_blacklisted_host_are_ended_and_killed_if_they_do_not_end():
    played = Played(
        *begins(a=2, b=1),
        KILLED_1,
        TIME_PASSES,
        Exited(0, -9),
        *asks(2, after=1),
        on_failure=ON_FAILURE["blacklist"],
    )
    assert played.signals == [(0, [0], TERM), (FAILURE_GRACE_S, [0], KILL)]
    why = "a gets no more workers after a failure"
    killed = "worker 1 (rank 1 on a) was killed by SIGKILL"
    assert played.said[-1] == f"generation 2: 1 rank; worker 0 (rank 0 on a) was ended by hvdlite-run: {why}; {killed}"


def test_a_worker_that_is_ended_with_its_host_and_ends_well_is_no_rank_that_is_done():
    played = Played(*begins(a=2, b=1), KILLED_1, Exited(0, 0), *asks(2, after=1), on_failure=ON_FAILURE["blacklist"])
    assert played.answer(2, 1).generation == 2


# --------------------------------------------------------------- how it ends


def test_a_job_whose_ranks_end_well_ends_well_and_those_that_wait_for_a_place_are_ended():
    played = Played(*begins(a=2), found(a=2, b=1), answers("b"), *asks(2), Exited(0, 0), Exited(1, 0), Exited(2, -15))
    assert (played.outcome.exit_code, played.outcome.message) == (0, "")
    assert played.signals == [(0, [2], TERM)]


def test_a_program_that_never_calls_init_ends_well():
    assert Played(found(a=2), answers("a"), Exited(1, 0), Exited(0, 0)).outcome.exit_code == 0


def test_a_rank_that_fails_after_another_was_done_fails_the_job():
    played = Played(*begins(a=2), Exited(0, 0), Started(1, 7), Output(1, "stderr", b"why\n"), Exited(1, 3))
    assert played.outcome.exit_code == 3
    assert (
        played.outcome.message == "rank 1 on a (pid 7) failed first, with exit code 3. The end of its stderr:\n    why"
    )


def test_a_rank_that_waits_for_one_that_is_done_ends_the_job():
    played = Played(*begins(a=2), Exited(0, 0), *asks(1, after=1), Exited(1, -15))
    assert played.outcome.exit_code == 1
    assert played.outcome.message == "worker 0 on a ended with exit code 0, and worker 1 waits for it in hvd.init()"


def test_the_same_error_on_all_ranks_ends_the_job_with_the_first_and_without_another_try():
    said = Output(1, "stderr", b"Traceback (most recent call last):\nValueError: shape\n")
    ends = Exited(1, 1), Exited(0, 1, peer_lost=True), Exited(2, -15)
    played = Played(*begins(a=2), Started(1, 11), said, *ends)
    assert played.outcome.exit_code == 1
    assert played.outcome.message.startswith("rank 1 on a (pid 11) failed first, with exit code 1.")
    assert played.outcome.message.endswith("ValueError: shape")
    assert played.signals == [(0, [2], TERM)]


@pytest.mark.parametrize(
    ("end", "exit_code", "rank"),
    [(Exited(1, -15), 1, 0), (Exited(1, -9), 1, 0), (Exited(1, 0), 1, 0), (Exited(1, 5), 5, 1)],
)
def test_who_was_ended_with_its_host_is_not_the_cause_unless_it_fails_by_itself(end, exit_code, rank):
    lost = Exited(0, 1, peer_lost=True)
    played = Played(*begins(a=2), lost, end, on_failure=ON_FAILURE["blacklist"])
    assert (played.outcome.exit_code, played.outcome.rank) == (exit_code, rank)


def test_after_a_cooldown_the_job_goes_on():
    played = Played(
        *begins(a=1, b=1),
        Lost("b", "the link is cut"),
        *asks(0, after=1),
        TIME_PASSES,
        answers("b"),
        *asks(2),
        *asks(0, after=2),
        cooldown_s=(10, 100),
    )
    assert played.now_s == 10
    assert played.answer(2, 0) == RankAssignment(3, 1, 2, 1)


def test_who_only_lost_a_peer_is_not_the_cause_if_the_peer_fails_after_it():
    played = Played(*begins(a=2), Exited(0, 1, peer_lost=True), Exited(1, 5), Exited(2, -15))
    assert (played.outcome.exit_code, played.outcome.rank) == (5, 1)


def test_of_a_later_generation_the_first_cause_is_that_of_its_own_end():
    played = Played(*begins(a=2), KILLED_1, *asks(0, after=1), Exited(0, 4), Exited(2, -15))
    assert (played.outcome.exit_code, played.outcome.rank) == (4, 0)


def test_a_failure_before_the_first_generation_ends_the_job_as_in_one_that_is_not_elastic():
    played = Played(found(a=2), answers("a"), Started(1, 5), Output(1, "stderr", b"no\n"), Exited(1, 2), Exited(0, -15))
    assert played.outcome.exit_code == 2
    assert played.outcome.message.startswith("worker 1 on a (pid 5) failed first, with exit code 2.")


def test_a_replacement_that_fails_before_it_has_a_rank_is_told_and_is_no_cause_of_the_end():
    played = Played(*begins(a=2), KILLED_1, *asks(0, after=1), Exited(2, 1), Exited(0, 6), Exited(3, -15))
    assert "worker 2 on a failed with exit code 1 before it had a rank" in played.said
    assert played.outcome.exit_code == 6


def test_a_worker_that_fails_before_it_has_a_rank_is_the_cause_where_a_failure_ends_the_job():
    ends = Exited(1, 7), Exited(0, -15)
    played = Played(*begins(a=1), found(a=1, b=1), answers("b"), *ends, on_failure=ON_FAILURE["stop"])
    assert played.outcome.exit_code == 7
    assert played.outcome.message.startswith("worker 1 on b (pid 0) failed first, with exit code 7.")


def test_a_command_that_cannot_be_started_ends_the_job_with_the_code_of_a_shell():
    played = Played(found(a=2, b=1), answers("a"), answers("b"), Refused("pyhton: command not found", 127, "b"))
    assert (played.outcome.exit_code, played.outcome.message) == (127, "b: pyhton: command not found")


def test_a_host_that_comes_later_and_cannot_start_the_command_is_done_without():
    played = Played(*begins(a=1), found(a=1, b=1), answers("b"), Refused("python: command not found", 127, "b"))
    assert played.said == ["lost b: python: command not found"]
    assert played.left == ["b"]
    assert Lost("b", "python: command not found") in played.observed  # which the summary and the metrics count


def test_a_replacement_that_cannot_be_started_is_a_failure_of_its_slot_and_not_of_its_host():
    why = "train: command not found"
    refused = [Refused(why, 127, "a", worker=number) for number in (2, 3, 4)]
    played = Played(*begins(a=2), KILLED_1, *refused, *asks(0, after=1))
    assert played.left == []
    assert list(played.started) == [0, 1, 2, 3, 4]  # as often as --max-restarts allows
    assert [said for said in played.said if why in said] == [
        f"worker {number} on a could not be started: {why}" for number in (2, 3, 4)
    ]
    assert any(said.startswith("slot 1 of a stays empty") for said in played.said)
    assert played.answer(0, 1) == RankAssignment(2, 0, 1, 0)
    assert Exited(2, 127) in played.observed  # which the summary and the metrics count
    assert played.ending.running == {0}


def test_a_replacement_that_cannot_be_started_is_named_where_a_limit_ends_the_job():
    refused = [Refused("train: command not found", 127, "a", worker=number) for number in (2, 3, 4)]
    script = *begins(a=2), KILLED_1, *refused, *asks(0, after=1), TIME_PASSES, TIME_PASSES, Exited(0, -15)
    played = Played(*script, min_np=2, elastic_timeout_s=10)
    assert played.outcome.message.endswith("worker 4 on a could not be started: train: command not found")


def test_a_worker_that_never_comes_to_the_first_generation_is_named_after_the_start_timeout():
    played = Played(found(a=2), answers("a"), *asks(0), TIME_PASSES, Exited(0, -15), Exited(1, -15))
    assert played.outcome.message == (
        "worker 1 on a did not call hvd.init() within 60 s (--start-timeout) of the first that did"
    )
    assert played.outcome.exit_code == 1


def test_ranks_that_cannot_connect_in_generation_after_generation_end_the_job():
    script = [event for number in range(6) for event in asks(0, 1, after=number)]
    played = Played(found(a=2), answers("a"), *script, Exited(0, -15), Exited(1, -15))
    assert played.outcome.message.startswith("the ranks of 5 generations in a row called hvd.init(), but were not conn")


def test_hosts_that_cannot_be_found_out_end_the_job():
    played = Played(DiscoveryFailed("the script failed"))
    assert (played.outcome.exit_code, played.outcome.message) == (1, "the script failed")


def test_a_job_of_whose_hosts_none_can_be_used_again_ends():
    played = Played(found(a=1, b=1), Lost("a", "no route"), Lost("b", "refused"))
    assert played.said == ["a: no route", "b: refused"]
    assert played.outcome.message == (
        "no host is left: each has had a failure and gets no more workers (--blacklist-cooldown-range)"
    )


REFUSED = NotThereYet("b", "connection refused", "ssh: Connection refused (is sshd running there?)")
WAITING = "waiting for b: connection refused; trying again until 60 s are over (--start-timeout)"


def test_a_job_begins_without_a_host_that_is_not_there_yet_and_tells_of_it_once():
    def begun(job):
        assert job.started == {0: "a"}

    played = Played(found(a=1, b=1), REFUSED, answers("a"), begun, REFUSED, answers("b"))
    assert played.started == {0: "a", 1: "b"}
    assert played.said == [WAITING]


def test_a_host_that_does_not_come_is_given_up_with_the_cause():
    played = Played(found(a=1, b=1), answers("a"), REFUSED, TIME_PASSES)
    assert played.said == [
        WAITING,
        "b: ssh: Connection refused (is sshd running there?). It was tried again for 60 s; --start-timeout allows more",
    ]
    assert played.left == ["b"]


def test_a_host_that_vanishes_before_it_was_there_is_no_failure_and_may_come_again():
    played = Played(found(a=1, b=1), answers("a"), REFUSED, found(a=1), found(a=1, b=1), REFUSED, answers("b"))
    assert played.left == ["b"]
    assert played.connected == ["a", "b", "b"]
    assert played.started == {0: "a", 1: "b"}


def test_a_limit_that_ends_the_job_is_told_with_the_last_failure():
    limits = {"reset_limit": 0, "on_failure": ON_FAILURE["shrink"]}
    why, wrote = "--reset-limit 0: the ranks have changed more often", Output(1, "stderr", b"no memory\n")
    end, others = Exited(1, 3), [Exited(0, 1, peer_lost=True), *asks(2, after=1), Exited(2, -15)]
    played = Played(*begins(a=3), Started(1, 7), wrote, end, *others, **limits)
    assert played.outcome.exit_code == 1
    assert played.outcome.message == (
        f"{why}. rank 1 on a (pid 7) failed last, with exit code 3. The end of its stderr:\n    no memory"
    )
    played = Played(*begins(a=1, b=1), Lost("b", "the link is cut"), *asks(0, after=1), Exited(0, -15), **limits)
    assert played.outcome.message == f"{why}. lost b: the link is cut"
    played = Played(*begins(a=1), found(a=1, b=1), answers("b"), *asks(1), *asks(0, after=1), Exited(0, -15),
                    Exited(1, -15), **limits)  # fmt: skip
    assert played.outcome.message == why, "nothing has failed"


@pytest.mark.parametrize("when", [[], [found(a=1)]], ids=["before any host", "while one is connected to"])
def test_a_signal_before_any_worker_runs_ends_the_job_at_once(when):
    played = Played(*when, Interrupted(INT))
    assert (played.outcome.exit_code, played.outcome.message, played.said) == (130, "", [])


def test_a_signal_to_the_launcher_is_passed_on_and_nobody_is_started_any_more():
    played = Played(*begins(a=2), Interrupted(TERM), KILLED_1, *asks(0, after=1), Exited(0, 0))
    assert played.outcome.exit_code == 143
    assert played.signals == [(0, [0, 1], TERM)]
    assert list(played.started) == [0, 1]


def test_output_that_cannot_be_written_ends_the_job():
    gone = ScreenFailed("stdout", OSError(errno.ENOSPC, "No space left on device"))
    played = Played(*begins(a=1), gone, Exited(0, -15))
    assert played.outcome.message == "cannot write to stdout: No space left on device"


def test_where_no_agent_is_heard_any_more_the_job_ends():
    for already in ([found(a=1)], begins(a=2)):
        played = Played(*already, LoopFailed("out of memory"))
        assert played.outcome.exit_code == 1
        assert played.outcome.message == "the launcher's connections to its agents failed: out of memory"


def test_what_a_process_writes_that_an_ended_worker_has_left_is_shown():
    played = Played(*begins(a=2), KILLED_1, *asks(0, after=1), Output(1, "stdout", b"late"))
    assert played.shown == [b"late"]


def test_what_a_killed_worker_has_left_running_may_call_init_and_is_not_asked_whether_it_responds():
    played = Played(*begins(a=2), KILLED_1, *asks(1, after=1), *asks(0, after=1), hang_timeout_s=30)
    assert played.store.get(b"ping/1/0") is None
    assert played.answer(0, 1) == RankAssignment(2, 0, 1, 0)


def test_a_worker_that_does_not_respond_may_have_ended_before_that_is_told():
    played = Played(*begins(a=2), KILLED_1, *asks(0, after=1), Unresponsive(1, 23.0), *asks(2))
    assert played.ending.running == {0, 2}


def test_a_host_on_which_no_worker_can_be_started_is_lost_once():
    def refuse_both(job):
        for worker in (1, 2):
            job.job.on_refused(Refused("python: command not found", 127, "b", worker=worker))

    played = Played(*begins(a=1), found(a=1, b=2), answers("b"), refuse_both)
    assert [event for event in played.observed if isinstance(event, Lost)] == [Lost("b", "python: command not found")]
    assert played.left == ["b"]


def test_a_host_that_is_given_up_may_still_report_on_its_workers():
    refused = Refused("cannot fork: out of memory", 126, "b")
    late = [Started(3, 9), Output(2, "stderr", b"late"), *asks(2, after=1), InitFailed(2, 1), Exited(2, -9)]
    played = Played(*begins(a=1, b=2), KILLED_1, refused, *late, *asks(0, after=1))
    assert played.left == ["b"]
    assert played.shown == [b"late"]
    assert played.answer(0, 1) == RankAssignment(2, 0, 1, 0)


def test_news_of_hosts_are_younger_than_those_before_though_the_clock_is_set_back(monkeypatch):
    times = iter([2000.0, 1000.0])
    monkeypatch.setattr("hvdlite_launcher.elastic.rank_assignments.time.time", lambda: next(times))
    news = []
    Played(
        *begins(a=1),
        found(a=1, b=1),
        answers("b"),
        *asks(1),
        lambda job: news.append(job.news(1)["timestamp"]),
        *asks(0, after=1),
        found(a=1),
        lambda job: news.append(job.news(2)["timestamp"]),
    )
    assert news[0] == 2000
    assert news[1] > news[0]


def test_a_worker_of_a_host_that_comes_before_the_first_generation_has_as_long_for_init_as_the_others():
    def late(job):
        job.now_s = START_TIMEOUT_S - 1
        return found(a=2, b=1)

    played = Played(found(a=2), answers("a"), *asks(0), late, answers("b"), TIME_PASSES)
    assert played.started == {0: "a", 1: "a", 2: "b"}
    assert played.now_s == 2 * START_TIMEOUT_S - 1
    assert "workers 1, 2 on a, b did not call hvd.init()" in played.ending.outcome.message


# ---------------------------------------------------------- workers that stand by


def test_a_spare_that_stands_by_after_it_has_asked_gets_a_rank_once_it_asks_again():
    script = [found(a=3), answers("a"), *asks(0, 1, 2), InitDone(0, 1), InitDone(1, 1), InitFailed(2, 0)]
    played = Played(*script, KILLED_1, *asks(0, after=1), max_np=2, spares=1)
    assert played.store.get(b"standby/2") == b"1"
    assert played.answer(2, 0) is None
    assert played.answer(0, 1) == RankAssignment(2, 0, 1, 0)
    goes_on = [InitDone(0, 2), *asks(2), *asks(0, after=2)]
    played = Played(*script, KILLED_1, *asks(0, after=1), *goes_on, max_np=2, spares=1)
    assert played.answer(2, 0) == RankAssignment(3, 1, 2, 1)


def test_a_worker_that_would_stand_by_when_it_has_a_rank_is_told_so_and_takes_that():
    played = Played(*begins(a=2), found(a=2, b=1), answers("b"), *asks(2), *asks(0, 1, after=1), InitFailed(2, 0))
    assert played.store.get(b"standby/2") == b"0"
    assert played.answer(2, 0).generation == 2
    assert played.ranks[2] == 2


def test_what_is_said_to_a_worker_that_stands_by_is_forgotten_when_it_ends():
    script = [found(a=3), answers("a"), *asks(0, 1, 2), InitDone(0, 1), InitDone(1, 1), InitFailed(2, 0)]
    assert Played(*script, Exited(2, -9), max_np=2, spares=1).store.get(b"standby/2") is None


# ---------------------------------------------- ranks for which others cannot go on

LATE = (
    "worker 0 (rank 0 on a) was ended by hvdlite-run: it did not come to the next generation within 50 s "
    "(--elastic-timeout) of the first that did: worker 2 on b waited"
)
LATE_0 = [KILLED_1, *asks(2, after=1), TIME_PASSES]  # worker 0 does not come, for which worker 2 waits


def test_the_end_of_a_job_says_who_was_ended_for_whom_and_not_only_who_failed_before_by_itself():
    policy = {"on_failure": ON_FAILURE["shrink"], "elastic_timeout_s": 50}
    played = Played(*begins(a=2, b=1), *LATE_0, TIME_PASSES, TIME_PASSES, Exited(0, -15), Exited(2, -15),
                    min_np=2, **policy)  # fmt: skip
    assert played.outcome.message.endswith(f"only 1 worker, and 3 slots (a:2, b:1), of which 2 stay empty after "
                                           f"failures. {LATE}")  # fmt: skip


def test_where_no_rank_is_left_the_end_says_which_was_ended_by_the_launcher():
    def is_ended(job):
        assert [signalled for _, *signalled in job.signals] == [[[0], KILL]]

    killed = "worker 1 (rank 1 on a) was killed by SIGKILL"
    half_a_minute = a_minute_in_which_only(2)[:26]
    script = [KILLED_1, *asks(2), *half_a_minute, is_ended, Exited(0, -9), Exited(2, -15)]
    played = Played(*begins(a=2), *script, hang_timeout_s=30)
    assert played.outcome.exit_code == 1
    assert played.outcome.message.startswith(
        f"no rank is left: {killed}; worker 0 (rank 0 on a) was ended by hvdlite-run: it did not respond for 30 s "
    )


# ------------------------------------------------------------- a network that is cut

AT = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def alive(worker: int, host: str, *, silent=(), silent_s: float = 15.0, waited_s: float = 15.0) -> Alive:
    return Alive(worker, 0, waited_s, (AT[host],), dict.fromkeys((AT[other] for other in silent), silent_s))


def test_a_host_that_others_cannot_reach_is_given_up_once_and_the_others_go_on():
    answers_of_all = [alive(0, "a", silent="b"), alive(2, "b", silent="a"), alive(1, "a", silent="b")]
    script = [*begins(a=2, b=1), *answers_of_all, *asks(0, 1, after=1)]
    played = Played(*script, hang_timeout_s=30)
    assert played.left == ["b"]
    (line,) = [line for line in played.said if line.startswith("lost b")]
    assert line == (
        "lost b: the network between it and a is cut: nothing came over it for 15 s, though hvdlite-run reaches both "
        "ends"
    )
    assert played.ranks == {0: 0, 1: 1, 2: 2}
    assert played.answer(0, 1).size == 2


def test_a_network_that_is_cut_for_less_than_half_the_hang_timeout_is_left_alone():
    short = [alive(0, "a", silent="b", silent_s=14.9), alive(1, "b", silent="a", silent_s=14.9)]
    assert Played(*begins(a=1, b=1), *short, hang_timeout_s=30).left == []


def test_a_network_that_is_cut_while_all_compute_is_left_alone():
    busy = [alive(0, "a", silent="b", waited_s=0), alive(1, "b", silent="a", waited_s=0)]
    assert Played(*begins(a=1, b=1), *busy, hang_timeout_s=30).left == []


def test_a_host_is_given_up_that_cannot_be_reached_while_ranks_connect():
    busy = [alive(0, "a", silent="b", waited_s=0), alive(1, "b", silent="a", waited_s=0)]
    assert Played(*begins(a=1, b=1)[:-1], *busy, hang_timeout_s=30).left == ["b"]


# ------------------------------------------------- ranks that cannot connect


def fails(worker: int, generation: int, host: str, refused_by: str = "") -> InitFailed:
    return InitFailed(worker, generation, True, (AT[host],), tuple(AT[other] for other in refused_by))


def reasons(agent: Agent) -> list[tuple[int, str]]:
    """The generations whose keys have been revoked, and why."""
    return [(each.generation, each.why) for each in agent.told if hasattr(each, "why")]


NEW_HOST = [found(a=2, b=1), answers("b"), *asks(2), *asks(0, 1, after=1)]


def test_a_generation_ends_for_all_once_one_of_its_ranks_could_not_connect():
    agent = Agent()
    wants = lambda job: job.store.receive(agent, _want(b"world2/x"))  # noqa: E731
    Played(*begins(a=2), *NEW_HOST, wants, InitDone(1, 2), fails(0, 2, "a"))
    assert reasons(agent) == [(2, "worker 0 (rank 0 on a) could not connect to the other ranks")]


@pytest.mark.parametrize(
    "event",
    [
        InitFailed(0, 2),  # an error of its program's, which it may handle
        fails(0, 1, "a"),  # of an earlier generation
        [InitDone(0, 2), InitDone(2, 2), fails(0, 2, "a")],  # all have been connected
    ],
    ids=["another error", "an earlier one", "connected"],
)
def test_other_failures_do_not_end_the_generation(event):
    agent = Agent()
    wants = lambda job: job.store.receive(agent, _want(b"world2/x"))  # noqa: E731
    Played(*begins(a=2), *NEW_HOST, wants, InitDone(1, 2), *(event if isinstance(event, list) else [event]))
    assert reasons(agent) == []


def refuses(generation: int) -> list[InitFailed | InitStarted]:
    """In this generation worker 0 on a is refused by b, where worker 2 is; all give up, and ask for the next."""
    failures = [fails(0, generation, "a", "b"), fails(1, generation, "a"), fails(2, generation, "b")]
    return [*failures, *asks(0, 1, 2, after=generation)]


def test_a_new_host_that_refuses_connections_is_given_up_and_named_and_the_others_go_on():
    why = (
        "TCP connections between it and a are refused, though hvdlite-run reaches both ends. Does a firewall block "
        "them? hvdlite-run --check shows which connections fail"
    )
    played = Played(*begins(a=2), *NEW_HOST, *refuses(2), *refuses(3), *asks(0, 1, after=4))
    assert played.ending.outcome is None
    assert f"lost b: {why}" in played.said
    assert played.left == ["b"]
    last = max(number for number in range(10) if played.answer(0, number) is not None)
    assert played.answer(0, last) == RankAssignment(last + 1, 0, 2, 0)
    assert Lost("b", why) in played.observed


def test_a_refusal_by_a_rank_that_was_lost_meanwhile_gives_up_no_host():
    script = [KILLED_1, *(event for number in (2, 3) for event in refuses(number) if event.worker != 1)]
    assert Played(*begins(a=2), *NEW_HOST, *script).left == []


def test_in_the_first_generation_a_host_that_refuses_is_an_error_of_the_job():
    script = [event for number in (1, 2, 3) for event in refuses(number)]
    assert Played(found(a=2, b=1), answers("a"), answers("b"), *asks(0, 1, 2), *script).left == []


# ------------------------------------------------- workers that do not respond


def a_minute_in_which_only(worker: int):
    """Time passes, and of all workers one answers each question: it waits in no collective."""

    def answer(job):
        asked = [number for number in range(100) if job.store.get(b"ping/%d/%d" % (worker, number)) is not None]
        return Alive(worker, asked[0], 0.0, (), {}) if asked else None

    return [answer, *[TIME_PASSES, answer] * 24]


def test_ranks_that_do_not_respond_are_left_alone_while_only_a_spare_waits():
    script = [found(a=3), answers("a"), *asks(0, 1, 2), InitDone(0, 1), InitDone(1, 1), *a_minute_in_which_only(2)]
    played = Played(*script, max_np=2, spares=1, hang_timeout_s=30)
    assert played.now_s >= 60
    assert played.signals == []
    played = Played(*script, KILLED_1, TIME_PASSES, max_np=2, spares=1, hang_timeout_s=30)
    assert [signalled for _, *signalled in played.signals] == [[[0], KILL]], "the spare is to take a place now"


@pytest.mark.parametrize("newcomers", list(NewWorkerPolicy))
def test_a_rank_that_does_not_respond_is_ended_if_a_worker_waits_with_which_it_can_go_on(newcomers):
    goes_on = [KILLED_1, InitStarted(0, 1, newcomers), InitDone(0, 2), *asks(2)]
    played = Played(*begins(a=2), *goes_on, *a_minute_in_which_only(2), hang_timeout_s=30)
    is_ended = [signalled for _, *signalled in played.signals][:1] == [[[0], KILL]]
    assert is_ended == (newcomers is not NewWorkerPolicy.NEVER)


def test_a_network_that_is_cut_is_left_alone_while_only_a_spare_waits():
    busy = [alive(0, "a", silent="b", waited_s=0), alive(1, "b", silent="a", waited_s=0)]
    played = Played(*begins(a=1, b=2), *busy, max_np=2, spares=1, hang_timeout_s=30)
    assert played.ranks == {0: 0, 1: 1, 2: None}
    assert played.left == []


# ------------------------------------------------------------------ what stays


def test_the_generations_are_told_in_a_table():
    played = Played(*begins(a=2), KILLED_1, *asks(0, after=1), *asks(2), *asks(0, after=2))
    rows = [line.split(maxsplit=4) for line in played.job.table.text().splitlines()]
    assert rows == [
        ["generation", "after", "ranks", "changes"],
        ["1", "0.0", "s", "2", "+ workers 0, 1 on a"],
        ["2", "0.0", "s", "1", "- worker 1 (rank 1 on a) was killed by SIGKILL"],
        ["3", "0.0", "s", "2", "+ worker 2 joins as rank 1 on a"],
    ]
    assert Played(*begins(a=2)).job.table.text() == ""
