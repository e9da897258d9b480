"""Which workers an elastic job has, and who is which rank: scripts of events, and what is to be done."""

from __future__ import annotations

import random

import pytest
from hvdlite_launcher.elastic.elastic_workers import Place
from hvdlite_launcher.elastic.membership import (
    Dismiss,
    EndJob,
    EndWorkers,
    JobDone,
    Membership,
    Notify,
    Publish,
    Say,
    StartWorker,
)
from hvdlite_launcher.plan.job_spec import ON_FAILURE, Policy
from hvdlite_wire.store_requests import NewWorkerPolicy

KILLED = "worker was killed by SIGKILL"


class Job:
    """A membership, its clock, and what it has had done: workers that live, and the generations so far."""

    def __init__(self, hosts: dict[str, int], rest_s: float = 0.0, **policy) -> None:
        self.membership = Membership(Policy(**{"min_np": 1, **policy}), rest_s=rest_s)
        self.now_s = 0.0
        self.actions: list = []
        self.living: dict[int, Place] = {}
        self.generations: list[list[int]] = []
        self.last: list = []
        self.over: EndJob | None = None
        self.found(hosts)

    def _note(self, actions: list) -> None:
        self.last = actions
        self.actions += actions
        for action in actions:
            if isinstance(action, StartWorker):
                assert action.worker not in self.living
                assert action.place not in self.living.values()
                self.living[action.worker] = action.place
            elif isinstance(action, Publish):
                self.generations.append([member.worker for member in action.generation.members])
            elif isinstance(action, EndJob):
                assert self.over is None
                self.over = action

    def found(self, hosts: dict[str, int]) -> Job:
        self._note(self.membership.hosts_found(hosts, self.now_s))
        return self

    def ask(self, *workers: int, newcomers: NewWorkerPolicy = NewWorkerPolicy.WELCOME) -> Job:
        for worker in workers:
            current = self.membership.current
            known = current is not None and any(each.worker == worker for each in current.members)
            self._note(self.membership.asks(worker, current.number if known else 0, self.now_s, newcomers))
        return self

    def takes_back(self, worker: int) -> Job:
        self._note(self.membership.takes_back(worker, self.now_s))
        return self

    def kill(self, worker: int, why: str | None = KILLED) -> Job:
        del self.living[worker]
        self._note(self.membership.ended(worker, why, self.now_s, was_killed=why == KILLED))
        return self

    def lose(self, host: str) -> Job:
        self.living = {worker: place for worker, place in self.living.items() if place.host != host}
        self._note(self.membership.host_lost(host, f"lost {host}", self.now_s))
        return self

    def wait(self, seconds: float) -> Job:
        self.now_s += seconds
        self._note(self.membership.time_passes(self.now_s))
        return self

    def of(self, kind: type) -> list:
        return [action for action in self.actions if isinstance(action, kind)]


def running(hosts: dict[str, int], **policy) -> Job:
    job = Job(hosts, **policy)
    return job.ask(*job.living)


def test_the_first_generation_has_all_workers_once_all_of_them_ask():
    job = Job({"a": 2, "b": 1})
    assert job.of(StartWorker) == [
        StartWorker(0, Place("a", 0)),
        StartWorker(1, Place("a", 1)),
        StartWorker(2, Place("b", 0)),
    ]
    assert job.ask(2, 0).generations == []
    assert job.ask(1).generations == [[0, 1, 2]]


def test_no_more_workers_are_started_than_max_np():
    assert len(Job({"a": 2, "b": 2}, max_np=3).living) == 3


def test_nothing_is_started_before_there_are_slots_for_min_np():
    job = Job({"a": 1}, min_np=2)
    assert not job.living
    assert "at least 2 workers (--min-np): so far 0 workers, and 1 slot (a:1)" in job.of(Say)[0].text
    assert len(job.found({"a": 1, "b": 1}).living) == 2


def test_fewer_slots_than_min_np_end_the_job_after_the_elastic_timeout():
    job = Job({"a": 1}, min_np=2, elastic_timeout_s=30)
    assert job.membership.deadline_s() == 30
    assert job.wait(29).over is None
    assert "waited 30 s (--elastic-timeout) for at least 2 workers (--min-np): only 0 workers" in job.wait(1).over.why


def test_survivors_keep_their_order_and_go_on_once_all_of_them_ask():
    job = running({"a": 4}, on_failure=ON_FAILURE["shrink"]).kill(1)
    assert job.ask(3, 0).generations == [[0, 1, 2, 3]]
    assert job.ask(2).generations[-1] == [0, 2, 3]
    assert job.membership.current.why == KILLED


def test_when_rank_0_is_lost_the_next_oldest_is_rank_0():
    job = running({"a": 3}).kill(0)
    assert job.ask(2, 1).generations[-1] == [1, 2]


def test_a_replacement_gets_the_slot_and_joins_last_when_the_ranks_leave():
    job = running({"a": 3}).kill(1)
    assert job.last == [StartWorker(3, Place("a", 1))]
    assert job.ask(0, 2).generations[-1] == [0, 2]
    job.ask(3)
    assert job.last == [Notify(added=True, removed=False)]
    assert job.ask(0, 2).generations[-1] == [0, 2, 3]
    assert [member.since for member in job.membership.current.members] == [1, 1, 3]


def test_a_replacement_that_asks_before_the_survivors_do_is_in_their_next_generation():
    job = running({"a": 2}).kill(0).ask(2)
    assert job.generations == [[0, 1]]
    assert job.ask(1).generations[-1] == [1, 2]


@pytest.mark.parametrize("newcomers", [NewWorkerPolicy.IF_NEEDED, NewWorkerPolicy.AFTERWARDS, NewWorkerPolicy.NEVER])
def test_survivors_in_a_step_get_no_newcomers_who_are_told_of_at_once_in_the_next_generation(newcomers):
    job = running({"a": 3}).kill(0).ask(3)
    assert job.ask(1).ask(2, newcomers=newcomers).generations[-1] == [1, 2]
    assert job.last[-1] == Notify(added=True, removed=False)
    assert job.ask(1, 2).generations[-1] == [1, 2, 3]


def test_survivors_in_a_step_get_newcomers_below_min_np_if_their_program_can_give_them_its_state():
    job = running({"a": 2}, min_np=2).kill(0).ask(1, newcomers=NewWorkerPolicy.IF_NEEDED)
    assert job.generations == [[0, 1]]
    assert job.ask(2).generations[-1] == [1, 2]


def test_survivors_in_a_step_finish_it_alone_below_min_np_once_enough_newcomers_are_there_to_join_them():
    job = running({"a": 4}, min_np=4).kill(0).kill(2).ask(1, 3, newcomers=NewWorkerPolicy.AFTERWARDS)
    assert job.ask(4).generations == [[0, 1, 2, 3]]
    assert job.ask(5).generations[-1] == [1, 3]
    assert job.last[-1] == Notify(added=True, removed=False)
    assert job.ask(1, 3).generations[-1] == [1, 3, 4, 5]


def test_survivors_in_a_step_wait_for_newcomers_no_longer_than_the_elastic_timeout():
    job = running({"a": 2}, min_np=2, on_failure=ON_FAILURE["shrink"], elastic_timeout_s=60).kill(0)
    job.ask(1, newcomers=NewWorkerPolicy.AFTERWARDS)
    assert job.wait(59).over is None
    assert "waited 60 s (--elastic-timeout) for at least 2 workers (--min-np)" in job.wait(1).over.why


def test_survivors_whose_program_can_give_no_state_wait_below_min_np_until_the_elastic_timeout():
    job = running({"a": 2}, min_np=2, elastic_timeout_s=60).kill(0).ask(1, newcomers=NewWorkerPolicy.NEVER).ask(2)
    assert job.generations == [[0, 1]]
    assert "waited 120 s (--elastic-timeout 60" in job.wait(60).wait(60).over.why


def test_nobody_takes_the_place_of_a_lost_worker_where_the_job_is_to_shrink():
    job = running({"a": 2}, on_failure=ON_FAILURE["shrink"]).kill(0)
    assert not job.last
    assert job.found({"a": 2, "b": 1}).last == [StartWorker(2, Place("b", 0))]


def test_a_failure_bars_its_host_and_ends_the_others_there_where_hosts_are_blacklisted():
    job = running({"a": 2, "b": 2}, on_failure=ON_FAILURE["blacklist"], max_np=3).kill(0)
    assert job.last == [EndWorkers((1,), "a gets no more workers after a failure"), StartWorker(3, Place("b", 1))]


def test_a_barred_host_is_used_again_after_its_cooldown_which_doubles():
    job = running({"a": 1, "b": 1}, on_failure=ON_FAILURE["blacklist"], cooldown_s=(10, 100)).kill(1)
    assert job.membership.deadline_s() == 10
    assert job.wait(9).last == []
    assert job.wait(1).last == [StartWorker(2, Place("b", 0))]
    job.kill(2)
    assert job.membership.deadline_s() == 10 + 20


def test_a_lost_host_loses_all_its_workers_and_is_named():
    job = running({"a": 2, "b": 2}).lose("b")
    assert job.ask(0, 1).generations[-1] == [0, 1]
    assert job.membership.current.why == "lost b"
    assert not job.of(EndWorkers)


def test_new_hosts_are_told_of_when_their_workers_are_ready_and_only_once():
    job = running({"a": 1}).found({"a": 1, "b": 2})
    assert job.last == [StartWorker(1, Place("b", 0)), StartWorker(2, Place("b", 1))]
    assert job.ask(1).last == [Notify(added=True, removed=False)]
    assert job.ask(2).last == []
    assert job.ask(0).generations[-1] == [0, 1, 2]


def test_workers_of_a_removed_host_go_on_until_they_ask_and_are_then_dismissed():
    job = running({"a": 1, "b": 1}).found({"a": 1})
    assert job.last == [Notify(added=False, removed=True)]
    assert job.ask(1).last == [Dismiss(1, "b has been removed from the job")]
    assert job.ask(0).generations[-1] == [0]
    assert job.kill(1, None).over is None


def test_a_host_that_has_fewer_slots_loses_the_workers_of_the_last():
    job = running({"a": 2}).found({"a": 1})
    assert job.ask(0, 1).generations[-1] == [0]
    assert job.of(Dismiss) == [Dismiss(1, "slot 1 of a has been removed from the job")]


def test_a_host_that_is_removed_added_and_removed_again_ends_up_removed():
    job = running({"a": 1, "b": 1})
    for hosts in ({"a": 1}, {"a": 1, "b": 1}, {"a": 1}):
        job.found(hosts)
    assert job.ask(0, 1).generations[-1] == [0]


def test_below_min_np_survivors_wait_for_others_and_go_on_with_them():
    job = running({"a": 1, "b": 1}, min_np=2, on_failure=ON_FAILURE["blacklist"]).kill(1)
    assert job.ask(0).generations == [[0, 1]]
    assert isinstance(job.last[0], Say)
    job.found({"a": 1, "b": 1, "c": 1})
    assert job.ask(2).generations[-1] == [0, 2]
    assert job.membership.deadline_s() is None


def test_below_min_np_for_too_long_is_the_end_which_names_barred_hosts():
    job = running({"a": 1, "b": 1}, min_np=2, on_failure=ON_FAILURE["blacklist"], elastic_timeout_s=60).kill(1).ask(0)
    assert "1 worker, and 1 slot (a:1); hosts that get no workers after failures: b" in job.wait(60).over.why


def test_when_all_ranks_have_failed_nothing_follows():
    job = running({"a": 2}).kill(0).ask(2)
    assert job.over is None
    assert job.kill(1).over == EndJob(None)


def test_workers_that_could_go_on_with_the_state_of_a_rank_are_named_when_all_ranks_are_lost():
    job = running({"a": 2}).kill(0)
    assert [each.text for each in job.kill(1).of(Say)] == [
        "no rank is left that has the state of the training, with which worker 2 on a could go on: start the job "
        "again, from a checkpoint if the program has saved one"
    ]


def test_where_nobody_could_go_on_nobody_is_named_when_all_ranks_are_lost():
    assert running({"a": 2}, on_failure=ON_FAILURE["shrink"]).kill(0).kill(1).of(Say) == []


def test_a_failure_before_the_first_generation_is_the_end():
    assert Job({"a": 2}).kill(0, "worker 0 failed with exit code 1").over == EndJob(None)


def test_when_all_hosts_are_blacklisted_that_is_said_before_the_end():
    job = running({"a": 2}, on_failure=ON_FAILURE["blacklist"]).kill(0)
    assert job.over == EndJob(None)
    assert "no host is left: after a failure these get no more workers (--on-failure blacklist): a." in (
        job.of(Say)[-1].text
    )


def test_a_wait_says_which_workers_have_not_called_init():
    job = running({"a": 2}, min_np=2, elastic_timeout_s=60).kill(1).ask(0)
    assert "so far 2 workers, of which 1 not yet in hvd.init(), and 2 slots (a:2)" in job.of(Say)[0].text


def test_workers_that_were_started_in_time_may_take_as_long_again_to_come():
    job = running({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=60, on_failure=ON_FAILURE["blacklist"]).kill(1).ask(0)
    job.wait(50).found({"a": 1, "c": 1})
    assert job.of(StartWorker)[-1] == StartWorker(2, Place("c", 0))
    assert job.membership.deadline_s() == 120
    assert job.wait(40).ask(2).generations[-1] == [0, 2]
    assert job.membership.deadline_s() is None


def test_workers_that_were_started_in_time_and_do_not_come_are_not_waited_for_for_ever():
    job = running({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=60).kill(1).ask(0).wait(119)
    assert job.over is None
    assert job.wait(1).over == EndJob(
        "waited 120 s (--elastic-timeout 60, and as long again for workers that were starting) for at least 2 workers "
        "(--min-np): only 2 workers, of which 1 not yet in hvd.init(), and 2 slots (a:1, b:1)",
        is_limit=True,
    )
    job = running({"a": 1, "b": 1}, min_np=2, elastic_timeout_s=60).kill(1).ask(0).wait(90).found({"a": 1})
    assert job.over is None, "the worker that is starting may still come back with its host"
    assert "waited 60 s (--elastic-timeout) for at least 2 workers" in job.kill(2).over.why


def test_a_slot_rests_a_while_once_its_replacement_has_failed_before_it_was_a_rank_and_longer_after_each():
    job = running({"a": 2}, rest_s=1.0, max_restarts=6)
    assert job.kill(1).living == {0: Place("a", 0), 2: Place("a", 1)}, "the first one is replaced at once"
    rests = []
    for worker in range(2, 6):
        assert job.kill(worker).living == {0: Place("a", 0)}
        rests.append(job.membership.deadline_s() - job.now_s)
        assert job.wait(rests[-1] - 0.1).living == {0: Place("a", 0)}
        assert job.wait(0.1).living == {0: Place("a", 0), worker + 1: Place("a", 1)}
        assert job.membership.deadline_s() is None
    assert rests == pytest.approx([1, 2, 4, 4])
    job.ask(6, 0)
    assert job.generations[-1] == [0, 6]
    assert len(job.kill(6).living) == 2, "one that was a rank is replaced at once"


def test_another_slot_does_not_rest_nor_does_one_that_has_been_removed():
    job = running({"a": 3}, rest_s=1.0, max_np=2).kill(1).kill(2)
    assert list(job.living.values()) == [Place("a", 0), Place("a", 2)]
    job = running({"a": 2}, rest_s=1.0).kill(1).kill(2).found({"a": 1})
    assert job.membership.deadline_s() is None


def test_a_job_with_too_few_workers_waits_for_a_slot_that_rests():
    job = running({"a": 2}, rest_s=1.0, min_np=2, elastic_timeout_s=60).kill(1).kill(2).ask(0)
    assert job.over is None
    assert job.wait(1).ask(3).generations[-1] == [0, 3]


def test_a_slot_whose_workers_fail_again_and_again_stays_empty():
    job = running({"a": 2}, max_restarts=2)
    for worker in (1, 2, 3):
        job.kill(worker)
        job.ask(0)
    assert not any(isinstance(action, StartWorker) for action in job.last)
    assert list(job.living) == [0]
    (said,) = job.of(Say)
    assert said.text == "slot 1 of a stays empty for 300 s: 3 workers failed in it within 300 s (--max-restarts 2)"


def test_a_slot_that_is_to_stay_empty_or_is_not_there_any_more_is_not_told_of():
    assert not running({"a": 2}, on_failure=ON_FAILURE["shrink"]).kill(1).of(Say)
    assert not running({"a": 2}, max_restarts=0).found({"a": 1}).kill(1).of(Say)
    assert not running({"a": 1}, max_restarts=0).kill(0).of(Say), "the job ends"


def test_below_min_np_for_too_long_is_the_end_which_counts_the_slots_that_stay_empty():
    job = running({"a": 2}, min_np=2, max_restarts=0, elastic_timeout_s=60).kill(1).ask(0)
    assert job.wait(60).over.why == (
        "waited 60 s (--elastic-timeout) for at least 2 workers (--min-np): only 1 worker, and 2 slots (a:2), "
        "of which 1 stay empty after failures"
    )


def test_restarts_that_lie_far_apart_are_not_counted_together():
    job = running({"a": 2}, max_restarts=1, restart_window_s=100)
    for worker in (1, 2, 3, 4):
        job.wait(100)
        job.kill(worker)
    assert 5 in job.living


def test_more_generations_than_the_reset_limit_allows_end_the_job():
    job = running({"a": 3}, reset_limit=1).kill(0).ask(1, 2)
    assert job.over is None
    assert job.kill(1).ask(2).over == EndJob("--reset-limit 1: the ranks have changed more often", is_limit=True)


def test_the_first_generation_needs_as_many_workers_as_it_is_to_begin_with_and_later_ones_fewer():
    job = Job({"a": 2}, start_np=3, min_np=1)
    assert not job.living
    assert "for at least 3 workers (-np): so far 0 workers, and 2 slots (a:2)" in job.of(Say)[0].text
    job.found({"a": 3}).ask(0, 1, 2)
    assert job.generations == [[0, 1, 2]]
    assert job.found({"a": 1}).ask(0, 1, 2).generations[-1] == [0]


def test_a_spare_waits_until_a_rank_is_lost_and_then_takes_its_place_at_once():
    job = running({"a": 4}, min_np=1, max_np=2, spares=1)
    assert job.generations == [[0, 1]]
    assert sorted(job.living) == [0, 1, 2]
    assert not job.of(Notify)
    job.kill(0).ask(1)
    assert job.generations[-1] == [1, 2]
    assert job.living == {1: Place("a", 1), 2: Place("a", 2), 3: Place("a", 0)}
    assert job.ask(3).last == []


def test_a_spare_that_takes_back_that_it_has_asked_is_not_waited_for_until_it_asks_again():
    job = running({"a": 3}, max_np=2, spares=1)
    job.takes_back(2).kill(1)
    assert job.ask(0).generations[-1] == [0]
    job.ask(2)
    assert job.last == [Notify(added=True, removed=False)]
    assert job.ask(0).generations[-1] == [0, 2]


def test_a_spare_that_fails_is_replaced_and_no_rank_is_disturbed():
    job = running({"a": 3}, min_np=1, max_np=2, spares=1).kill(2)
    assert job.last == [StartWorker(3, Place("a", 2))]
    assert job.ask(3).last == []
    assert job.generations == [[0, 1]]


def test_a_failure_ends_the_job_where_that_is_asked_for_though_hosts_may_come_and_go():
    job = running({"a": 2}, on_failure=ON_FAILURE["stop"]).found({"a": 3}).ask(2)
    assert job.ask(0, 1).generations[-1] == [0, 1, 2]
    assert job.kill(1).last == [EndJob(None)]
    assert job.kill(2).last == []
    assert running({"a": 1, "b": 1}, on_failure=ON_FAILURE["stop"]).lose("b").last == [EndJob("lost b")]


def test_after_a_rank_is_done_nobody_is_started_any_more():
    job = running({"a": 2}).kill(0, None).found({"a": 4})
    assert not job.last
    assert job.over is None


def test_all_hosts_removed_is_the_end_once_their_workers_have_left():
    job = running({"a": 1})
    job._note(job.membership.hosts_found({}, job.now_s, are_wanted=False))
    assert "all hosts have been removed" in job.ask(0).over.why


def test_ranks_whose_hosts_are_removed_stay_until_enough_others_have_come():
    job = running({"a": 2}, min_np=2).found({})  # what is listed cannot be reached, such as a wrong name
    assert job.last == [
        Say(
            "the new list of hosts leaves fewer than 2 workers (--min-np): worker 0 on a, worker 1 on a stay until "
            "workers on other hosts have come"
        )
    ]
    assert not job.found({}).last  # told once
    job.kill(1).ask(0)  # a rank that is lost meanwhile has no place for another
    assert job.over is None
    assert list(job.living) == [0]


@pytest.mark.parametrize("max_np", [2, 3, 4, None])
def test_all_hosts_can_be_exchanged_by_others_that_take_the_training_over(max_np):
    job = running({"a": 2}, min_np=2, max_np=max_np).found({}).found({"b": 2}).ask(2, 3)
    for _ in range(4):
        if job.membership._notified is not None:  # rank 0 is told, and all ranks leave at their next commit
            before = job.generations[-1]
            for worker in before:
                if worker in job.living:
                    job.ask(worker)
            for action in job.actions:
                if isinstance(action, Dismiss) and action.worker in job.living:
                    job.kill(action.worker, None)
    assert job.over is None
    assert sorted(job.living) == job.generations[-1] == [2, 3]
    for before, after in zip(job.generations, job.generations[1:], strict=False):
        assert after[0] in before  # rank 0 has the state of the training


def test_a_host_that_loses_slots_keeps_the_ranks_that_min_np_needs():
    job = running({"a": 2}, min_np=2).found({"a": 1})
    assert job.ask(0, 1).generations[-1] == [0, 1]
    job = running({"a": 2}, min_np=1).found({"a": 1})
    assert Dismiss(1, "slot 1 of a has been removed from the job") in job.ask(0, 1).actions


@pytest.mark.parametrize("seed", range(20))
def test_a_job_whose_survivors_always_ask_always_goes_on_while_there_are_slots(seed):
    draw = random.Random(seed)
    job = running({"a": 2, "b": 2, "c": 2}, min_np=2, max_restarts=10**6)
    for _ in range(50):
        job.kill(draw.choice(sorted(job.living)))
        before = len(job.generations)
        for worker in draw.sample(sorted(job.living), len(job.living)):
            job.ask(worker)
        if job.over:
            break
        assert len(job.generations) > before
        assert len(job.generations[-1]) >= 2
    assert job.over is None


def test_a_member_that_does_not_leave_an_ended_generation_is_told_of_and_ended_so_that_the_others_go_on():
    job = running({"a": 3}, elastic_timeout_s=100, on_failure=ON_FAILURE["shrink"])
    job.kill(0).ask(1)
    assert len(job.generations) == 1
    assert job.membership.deadline_s() == 60
    (told,) = job.wait(60).last
    assert isinstance(told, Say)
    assert "waiting 60 s for worker 2 on a" in told.text
    assert job.wait(1).last == []
    assert job.membership.deadline_s() == 100
    ended, published = job.wait(39).last
    why = "it did not come to the next generation within 100 s (--elastic-timeout) of the first that did"
    assert ended == EndWorkers((2,), f"{why}: worker 1 on a waited", is_failure=True)
    assert [each.worker for each in published.generation.members] == [1]
    assert "worker 2 on a did not come" in published.generation.why
    assert job.membership.deadline_s() is None


def test_a_member_that_leaves_late_is_in_the_next_generation_and_the_wait_begins_anew_with_the_next_end():
    job = running({"a": 3}, elastic_timeout_s=100, on_failure=ON_FAILURE["shrink"])
    job.kill(0).ask(1).wait(99).ask(2)
    assert job.generations[-1] == [1, 2]
    assert job.membership.deadline_s() is None
    job.wait(1000).found({"a": 3, "b": 1}).kill(1)
    assert job.membership.deadline_s() is None
    job.found({"b": 1})
    assert job.ask(2).generations[-1] == [2]
    job = running({"a": 4}, elastic_timeout_s=100, on_failure=ON_FAILURE["shrink"])
    job.kill(0).ask(1).wait(99).kill(1).wait(99).ask(2)
    assert job.membership.deadline_s() == job.now_s + 60


def test_ranks_that_compute_after_a_loss_are_left_alone_while_no_other_rank_waits():
    for on_failure in (ON_FAILURE["shrink"], ON_FAILURE["replace"]):
        job = running({"a": 3}, elastic_timeout_s=100, on_failure=on_failure).kill(0)
        assert job.membership.deadline_s() is None
        job.wait(1000).ask(1)
        assert job.membership.deadline_s() == job.now_s + 60, "the time begins when one asks"
        assert not job.of(EndWorkers)
        assert job.wait(99).ask(2).generations[-1] == [1, 2]
        assert not job.of(EndWorkers)


def test_a_new_worker_waits_for_ranks_that_have_the_state_as_long_as_they_compute_and_that_is_told():
    job = running({"a": 2}, elastic_timeout_s=100).kill(1).wait(1000).ask(2)
    assert job.membership.deadline_s() == job.now_s + 60
    (told,) = job.wait(60).last
    assert told.text == (
        "the next generation has been waiting 60 s for worker 0 on a: a long computation, or a hang. Nobody else has "
        "the state of the training, so worker 2 on a can only wait"
    )
    assert job.membership.deadline_s() is None
    assert job.wait(1000).last == []
    assert job.ask(0).generations[-1] == [0, 2]


def test_a_spare_for_which_there_is_no_place_waits_for_nobody():
    job = running({"a": 3}, max_np=2, spares=1).ask(0)
    assert job.membership.deadline_s() is not None
    job = running({"a": 4}, max_np=2, spares=2, elastic_timeout_s=100).ask(2, 3).kill(1).ask(0)
    assert job.generations[-1] == [0, 2]


def test_a_member_that_ignores_that_hosts_have_changed_while_others_leave_is_not_waited_for_for_ever():
    job = running({"a": 2}, elastic_timeout_s=100, max_np=3)
    joiner = max(job.found({"a": 2, "b": 1}).living)
    job.ask(joiner)
    job.ask(1)
    assert len(job.generations) == 1
    job.wait(60).wait(40)
    assert job.of(EndWorkers)[0].workers == (0,)
    assert job.generations[-1] == [1, joiner]


def test_a_cooldown_that_is_over_is_due_no_more():
    job = running({"a": 1, "b": 1}, on_failure=ON_FAILURE["blacklist"], cooldown_s=(10, 100))
    job.kill(1).ask(0).wait(10)
    assert job.last == [StartWorker(2, Place("b", 0))]
    assert job.membership.deadline_s() is None


def test_a_wait_for_slots_is_over_when_workers_are_started_and_begins_anew_if_they_are_lost():
    job = Job({"a": 1}, min_np=2, elastic_timeout_s=30).wait(10).found({"a": 2})
    assert sorted(job.living) == [0, 1]
    assert job.membership.deadline_s() is None
    job.lose("a")
    assert job.membership.deadline_s() == 40


def test_a_host_that_fails_thousands_of_times_has_the_longest_cooldown():
    job = running({"a": 1}, cooldown_s=(1, 50))
    for _ in range(2000):
        job.lose("b")
    assert job.membership.barred_until_s("b") == 50


def test_a_slot_in_which_too_many_failed_is_filled_again_when_the_window_is_over():
    job = running({"a": 2}, max_restarts=0, restart_window_s=100).wait(5).kill(1).ask(0)
    assert sorted(job.living) == [0]
    assert job.membership.deadline_s() == 105
    assert job.wait(100).last == [StartWorker(2, Place("a", 1))]
    assert job.membership.deadline_s() is None


def test_a_worker_that_never_leaves_an_ended_generation_has_failed():
    def hang(**policy):
        job = running({"a": 3, "b": 1}, max_np=3, elastic_timeout_s=100, **policy).kill(0)
        return job.ask(1).wait(60).wait(40)

    assert hang(on_failure=ON_FAILURE["shrink"]).kill(2).of(StartWorker)[3:] == [StartWorker(3, Place("b", 0))]
    ended = hang(on_failure=ON_FAILURE["blacklist"], min_np=1).of(EndWorkers)
    assert [each.workers for each in ended] == [(1, 2)], "the failure of worker 0 has barred its host already"
    job = running({"a": 2}, on_failure=ON_FAILURE["stop"], elastic_timeout_s=100).ask(0).wait(60).wait(40)
    assert job.over == EndJob(
        "worker 1 on a did not come to the next generation within 100 s (--elastic-timeout) of the first that did: "
        "worker 0 on a waited"
    )


def test_members_that_stay_in_a_generation_that_a_dismissed_one_has_left_keep_nobody_waiting_until_others_ask():
    job = running({"a": 2, "b": 1}, elastic_timeout_s=100).found({"a": 2}).ask(2)
    assert job.membership.deadline_s() is None
    assert job.wait(60).ask(1).membership.deadline_s() == 120
    assert job.wait(60).of(Say)[0].text.startswith("the next generation has been waiting 60 s for worker 0 on a:")
    assert job.ask(0).generations[-1] == [0, 1]


def test_a_dismissed_worker_that_asks_again_is_told_again():
    job = running({"a": 1, "b": 1}).found({"a": 1}).ask(1)
    assert job.found({"a": 1, "b": 1}).last == []
    assert job.ask(1).last == [Dismiss(1, "b has been removed from the job")]


def test_who_waits_for_late_ranks_does_not_wait_once_another_is_done():
    job = running({"a": 3}, elastic_timeout_s=100).kill(2).ask(0)
    assert job.membership.deadline_s() is not None
    assert job.kill(0, None).over is None
    assert job.membership.deadline_s() is None
    assert isinstance(job.kill(1, None).last[-1], JobDone)
    job = running({"a": 2, "b": 1}, elastic_timeout_s=100).found({"a": 2}).ask(0)
    assert job.kill(0, None).over is None
    assert job.membership.deadline_s() is None


# ------------------------------------------------------ the last step of a job


@pytest.mark.parametrize("first_to_end", ["the killed one", "a rank that is done"])
def test_a_rank_that_is_killed_at_its_end_costs_nothing_if_rank_0_is_done(first_to_end):
    job = running({"a": 3})
    for worker, why in [(2, KILLED), (1, None)] if first_to_end == "the killed one" else [(1, None), (2, KILLED)]:
        assert not job.kill(worker, why).of(JobDone)
    assert job.kill(0, None).last == [
        Say(f"{KILLED}, at its end: the others are done, and nothing of the training is missing"),
        JobDone(),
    ]


def test_a_lost_host_is_no_failure_either_once_its_ranks_are_at_their_end():
    job = running({"a": 1, "b": 1}).kill(0, None).lose("b")
    assert job.last[0].text.startswith("lost b, at its end")
    assert job.last[1:] == [JobDone()]


def test_rank_0_that_is_killed_at_its_end_fails_the_job_once_the_others_are_done():
    job = running({"a": 3}).kill(2, None).kill(0)
    assert job.over is None
    over = job.kill(1, None).over
    assert over.is_limit
    assert over.why == (
        "rank 0 was lost at its end, when worker 2 on a was done: what rank 0 does at the end, such as saving the "
        "model, may be missing"
    )


@pytest.mark.parametrize("first_to_end", ["the failed one", "a rank that is done"])
def test_a_program_that_fails_at_its_end_fails_the_job_at_once(first_to_end):
    job = running({"a": 3})
    job.kill(1, "failed").kill(0, None) if first_to_end == "the failed one" else job.kill(0, None).kill(1, "failed")
    assert job.over == EndJob(None)


def test_ranks_that_have_a_last_step_to_finish_do_so_without_the_lost_one_and_without_those_that_are_done():
    job = running({"a": 4}, min_np=4, on_failure=ON_FAILURE["shrink"], elastic_timeout_s=100)
    job.kill(0).kill(1, None).ask(2, newcomers=NewWorkerPolicy.NEVER)
    assert len(job.generations) == 1
    assert job.membership.deadline_s() == 60
    assert job.ask(3, newcomers=NewWorkerPolicy.NEVER).generations[-1] == [2, 3]
    # The oldest of them is rank 0 now, so what is done once at the end is done.
    assert not job.kill(3, None).of(JobDone)
    assert job.kill(2, None).last == [JobDone()]


def test_ranks_that_go_back_to_a_commit_cannot_go_on_without_those_that_are_done():
    assert running({"a": 3}).kill(0).kill(1, None).ask(2).over == EndJob(None)
