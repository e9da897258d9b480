"""A job with faults on scripts of events: what workers are answered, whom hvdlite-run signals, and the report."""

from __future__ import annotations

import signal

import pytest
from elastic_script import TIME_PASSES, Played, begins
from hvdlite_launcher.elastic.job_faults import asked_fault
from hvdlite_launcher.plan.job_spec import ON_FAILURE
from hvdlite_launcher.protocol.messages import Exited, FaultAsked, InitDone, InitStarted, Lost
from hvdlite_wire.job_contract import ask_key
from hvdlite_wire.store_requests import NewWorkerPolicy


def played(chaos, *script, **policy):
    job = Played(*script, chaos=chaos, on_failure=ON_FAILURE["shrink"], **policy)
    job.faults.final_report()
    return job


def answer(job, worker, number=0):
    return job.store.get(b"chaos/answer/%d/%d" % (worker, number))


def again(*workers, after: int):
    """These workers come to the next generation, and are connected."""
    asks = [InitStarted(worker, after, NewWorkerPolicy.NEVER) for worker in workers]
    return [*asks, *(InitDone(worker, after + 1) for worker in workers)]


def killed(worker: int) -> Exited:
    return Exited(worker, -signal.SIGKILL)


KILL_1 = "kill@vote:worker=1:step=7"


def test_a_worker_that_asks_for_its_fault_is_answered_and_the_fault_is_reported():
    job = played(
        [KILL_1], *begins(a=3), 2.0, FaultAsked(1, 0, 0, 7), 0.5, killed(1), 0.25, *again(0, 2, after=1)
    )  # fmt: skip
    assert answer(job, 1) == b"now"
    (record,) = job.faults.report.records
    assert (record.kind, record.point, record.step, record.worker, record.rank) == ("kill", "vote", 7, 1, 1)
    assert (record.at_s, record.end) == (2.0, "killed by SIGKILL")
    assert job.faults.report.never == []
    assert "kill@vote" in job.faults.report.text()


def test_no_seeded_fault_takes_the_job_below_its_least_number_of_ranks():
    job = played(["seed=1,every=5"], *begins(a=2), FaultAsked(0, 0, 0, 3), FaultAsked(1, 0, 0, 4), min_np=1)
    assert (answer(job, 0), answer(job, 1)) == (b"now", b"later")
    assert [each.worker for each in job.faults.report.records] == [0]


def test_a_worker_that_had_to_wait_may_ask_again_and_its_old_answer_is_taken_away():
    job = played(
        ["seed=1,every=5,count=1"], *begins(a=2), FaultAsked(0, 0, 0, 3), FaultAsked(1, 0, 0, 4), FaultAsked(1, 1, 0, 5)
    )
    assert (answer(job, 1, 0), answer(job, 1, 1)) == (None, b"later")


def test_none_comes_once_a_rank_has_ended_with_exit_code_0():
    job = played(["seed=1,every=5,count=1"], *begins(a=3), Exited(2, 0), FaultAsked(0, 0, 0, 3))
    assert answer(job, 0) == b"later"
    assert job.faults.report.never == ["1 of 1 seeded faults never came: the job ended first"]


def test_by_the_clock_workers_are_signalled_and_not_more_than_may_be_lost():
    script = [*begins(a=3), TIME_PASSES, TIME_PASSES]
    job = played(["seed=1,every=30s,faults=kill"], *script, min_np=2)
    ((_, workers, signum),) = job.signals
    assert signum == signal.SIGKILL
    (record,) = job.faults.report.records
    assert ([record.worker], record.point, record.step) == (workers, None, None)


def test_equal_seeds_signal_the_same_workers():
    def signals(seed: int):
        script = [*begins(a=5), TIME_PASSES, TIME_PASSES, TIME_PASSES]
        return played([f"seed={seed},every=30s,faults=kill+segv+stop"], *script).signals

    assert signals(7) == signals(7)
    assert len({str(signals(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize("kind", ["agent", "host"])
def test_a_host_goes_by_its_agent_and_its_workers_with_it(kind):
    fault = f"{kind}@vote:worker=2:step=7"
    lost = Lost("b", "its agent was killed")
    job = played([fault], *begins(a=2, b=2), FaultAsked(2, 0, 0, 7), lost, *again(0, 1, after=1))
    assert job.killed == ["b"]
    assert job.signals == ([(0.0, [2, 3], signal.SIGKILL)] if kind == "host" else [])
    (record,) = job.faults.report.records
    assert (record.end, record.host) == ("lost with b", "b")


@pytest.mark.parametrize(("left", "end"), [((0, 1), "lost with b"), ((2, 3), "still there when the job ended")])
def test_a_host_or_the_others_go_by_a_cut_link(left, end):
    lost = Lost("b" if 0 in left else "a", "the network is cut")
    job = played(["link@vote:worker=2:step=7"], *begins(a=2, b=2), FaultAsked(2, 0, 0, 7), lost, *again(*left, after=1))
    assert (job.killed, job.signals) == ([], [])
    (record,) = job.faults.report.records
    assert record.end == end


def test_a_worker_that_has_ended_before_its_host_is_lost_keeps_its_own_end():
    fault, asked = "kill@vote:worker=2:step=7", FaultAsked(2, 0, 0, 7)
    job = played([fault], *begins(a=2, b=2), asked, killed(2), Lost("b", "the link is cut"))
    assert [record.end for record in job.faults.report.records] == ["killed by SIGKILL"]


def test_a_fault_that_never_came_is_said_so_with_the_reason():
    job = played([KILL_1, "kill@vote:worker=9:step=1"], *begins(a=2))
    assert job.faults.report.never == [
        "kill@vote:worker=1:step=7 never came: worker 1 did not reach it, the job ended first",
        "kill@vote:worker=9:step=1 never came: worker 9 did not reach it, it was never started",
    ]
    assert job.faults.report.text().startswith("chaos: 0 faults")


@pytest.mark.parametrize("asked", [FaultAsked(1, 0, 5, 7), FaultAsked(8, 0, 0, 7)])
def test_what_nobody_was_given_is_not_answered(asked):
    job = played([KILL_1], *begins(a=3), asked)
    assert job.faults.report.records == []
    assert answer(job, asked.worker) is None


@pytest.mark.parametrize("value", [b"", b"1 2", b"1 2 x", b"1 2 3 4", b"1 2 -3", b"1 2 9999999999"])
def test_a_question_that_is_none_is_ignored(value):
    assert asked_fault(ask_key(1), value) is None
    assert asked_fault(ask_key(1), b"1 2 3") == FaultAsked(1, 1, 2, 3)
    assert asked_fault(b"chaos/ask/x", b"1 2 3") is None
