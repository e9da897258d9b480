"""A job with faults on scripts of events: what workers are answered, whom hvdlite-run signals, and the report."""

from __future__ import annotations

import contextlib
import signal
from queue import Empty

import pytest
from hvdlite_launcher.elastic.elastic_hosts import ElasticHosts
from hvdlite_launcher.elastic.elastic_job import ElasticJob
from hvdlite_launcher.elastic.job_faults import JobFaults, asked_fault
from hvdlite_launcher.elastic.membership import Membership
from hvdlite_launcher.job.supervisor import Supervisor
from hvdlite_launcher.plan.chaos_spec import parse_chaos
from hvdlite_launcher.plan.elastic_spec import ON_FAILURE, Policy
from hvdlite_launcher.status.reports import Reports
from hvdlite_launcher.store.server import Store
from hvdlite_launcher.wire.messages import (
    Answered,
    Exited,
    FaultAsked,
    Hello,
    HostsFound,
    InitDone,
    InitStarted,
    Lost,
)
from hvdlite_launcher.workers.ending import Ending
from hvdlite_launcher.workers.roster import Roster
from hvdlite_wire.assignments import NewWorkerPolicy
from hvdlite_wire.fault_points import ask_key

TIME_PASSES = object()


class ScriptIsOverError(Exception):
    pass


class Played:
    """A run of the supervisor over a script; a number in it lets so many seconds pass."""

    def __init__(self, specs: list[str], *script, **policy) -> None:
        self.now_s = 0.0
        self.signals: list = []
        self.agents_killed: list[str] = []
        self.said: list[str] = []
        self.store = Store()
        self._script = list(script)
        rules = Policy(**{"min_np": 1, "on_failure": ON_FAILURE["shrink"], **policy})
        membership, roster, spec = Membership(rules), Roster(), parse_chaos(specs)
        ending = Ending(roster, signal_workers=self.signal, say=self.say, log=_nothing, grace=30, clock=self._now)
        faults = JobFaults(spec, membership, ending, store=self.store, hosts=self)
        job = ElasticJob(
            membership,
            ElasticHosts(self, start_timeout_s=60, say=self.say),
            ending,
            store=self.store,
            screen=self,
            hang_timeout_s=0,
            post=_nothing,
            chaos_of=faults.variable_of,
        )
        self.variables: dict[int, str] = faults.given
        reports = Reports(ending, lambda _: None, directory=None)
        supervisor = Supervisor(
            job,
            ending,
            reports,
            send_input=None,
            stdin=None,
            screen=self,
            observers=[faults],
        )
        with contextlib.suppress(ScriptIsOverError):
            supervisor.run(self)
        self.report = faults.final_report()

    def _now(self) -> float:
        return self.now_s

    def get(self, timeout):
        while self._script:
            event = self._script.pop(0)
            if event is TIME_PASSES:
                assert timeout is not None, "the loop would wait for ever"
                self.now_s += timeout
                raise Empty
            if isinstance(event, float):
                self.now_s += event
                continue
            return event
        raise ScriptIsOverError

    def answer(self, worker: int, number: int = 0) -> bytes | None:
        return self.store.get(b"chaos/answer/%d/%d" % (worker, number))

    # agents and screen

    def connect_later(self, label, slots):
        pass

    def leave(self, label):
        pass

    def start_worker(self, label, worker, variables, hellos):
        pass

    def signal(self, numbers, signum):
        self.signals.append((sorted(numbers), signum))

    def kill_agent(self, label):
        self.agents_killed.append(label)

    def begin(self, worker):
        pass

    def set_rank(self, worker, rank):
        pass

    def finish(self, worker):
        pass

    def say(self, text):
        self.said.append(text)


def _nothing(_):
    pass


def begins(**hosts):
    size = sum(hosts.values())
    answers = [Answered(host, Hello("1", None, None, 1, host)) for host in hosts]
    asks = [InitStarted(worker, 0) for worker in range(size)]
    return [HostsFound(hosts), *answers, *asks, *(InitDone(worker, 1) for worker in range(size))]


def again(*workers, after: int):
    """These workers come to the next generation, and are connected."""
    asks = [InitStarted(worker, after, NewWorkerPolicy.NEVER) for worker in workers]
    return [*asks, *(InitDone(worker, after + 1) for worker in workers)]


def killed(worker: int) -> Exited:
    return Exited(worker, -signal.SIGKILL)


KILL_1 = "kill@vote:worker=1:step=7"


def test_a_worker_that_asks_for_its_fault_is_answered_and_the_fault_is_reported():
    played = Played(
        [KILL_1], *begins(a=3), 2.0, FaultAsked(1, 0, 0, 7), 0.5, killed(1), 0.25, *again(0, 2, after=1)
    )  # fmt: skip
    assert played.answer(1) == b"now"
    (record,) = played.report.records
    assert (record.kind, record.point, record.step, record.worker, record.rank) == ("kill", "vote", 7, 1, 1)
    assert (record.at_s, record.end) == (2.0, "killed by SIGKILL")
    assert played.report.never == []
    assert "kill@vote" in played.report.text()


def test_no_seeded_fault_takes_the_job_below_its_least_number_of_ranks():
    played = Played(["seed=1,every=5"], *begins(a=2), FaultAsked(0, 0, 0, 3), FaultAsked(1, 0, 0, 4), min_np=1)
    assert (played.answer(0), played.answer(1)) == (b"now", b"later")
    assert [each.worker for each in played.report.records] == [0]


def test_a_worker_that_had_to_wait_may_ask_again_and_its_old_answer_is_taken_away():
    played = Played(
        ["seed=1,every=5,count=1"], *begins(a=2), FaultAsked(0, 0, 0, 3), FaultAsked(1, 0, 0, 4), FaultAsked(1, 1, 0, 5)
    )
    assert (played.answer(1, 0), played.answer(1, 1)) == (None, b"later")


def test_none_comes_once_a_rank_has_ended_with_exit_code_0():
    played = Played(["seed=1,every=5,count=1"], *begins(a=3), Exited(2, 0), FaultAsked(0, 0, 0, 3))
    assert played.answer(0) == b"later"
    assert played.report.never == ["1 of 1 seeded faults never came: the job ended first"]


def test_by_the_clock_workers_are_signalled_and_not_more_than_may_be_lost():
    script = [*begins(a=3), TIME_PASSES, TIME_PASSES]
    played = Played(["seed=1,every=30s,faults=kill"], *script, min_np=2)
    ((workers, signum),) = played.signals
    assert signum == signal.SIGKILL
    (record,) = played.report.records
    assert ([record.worker], record.point, record.step) == (workers, None, None)


def test_equal_seeds_signal_the_same_workers():
    def signals(seed: int):
        script = [*begins(a=5), TIME_PASSES, TIME_PASSES, TIME_PASSES]
        return Played([f"seed={seed},every=30s,faults=kill+segv+stop"], *script).signals

    assert signals(7) == signals(7)
    assert len({str(signals(seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize("kind", ["agent", "host"])
def test_a_host_goes_by_its_agent_and_its_workers_with_it(kind):
    fault = f"{kind}@vote:worker=2:step=7"
    lost = Lost("b", "its agent was killed")
    played = Played([fault], *begins(a=2, b=2), FaultAsked(2, 0, 0, 7), lost, *again(0, 1, after=1))
    assert played.agents_killed == ["b"]
    assert played.signals == ([([2, 3], signal.SIGKILL)] if kind == "host" else [])
    (record,) = played.report.records
    assert (record.end, record.host) == ("lost with b", "b")


@pytest.mark.parametrize(("left", "end"), [((0, 1), "lost with b"), ((2, 3), "still there when the job ended")])
def test_a_host_or_the_others_go_by_a_cut_link(left, end):
    lost = Lost("b" if 0 in left else "a", "the network is cut")
    played = Played(
        ["link@vote:worker=2:step=7"], *begins(a=2, b=2), FaultAsked(2, 0, 0, 7), lost, *again(*left, after=1)
    )
    assert (played.agents_killed, played.signals) == ([], [])
    (record,) = played.report.records
    assert record.end == end


def test_a_worker_that_has_ended_before_its_host_is_lost_keeps_its_own_end():
    fault, asked = "kill@vote:worker=2:step=7", FaultAsked(2, 0, 0, 7)
    played = Played([fault], *begins(a=2, b=2), asked, killed(2), Lost("b", "the link is cut"))
    assert [record.end for record in played.report.records] == ["killed by SIGKILL"]


def test_a_fault_that_never_came_is_said_so_with_the_reason():
    played = Played([KILL_1, "kill@vote:worker=9:step=1"], *begins(a=2))
    assert played.report.never == [
        "kill@vote:worker=1:step=7 never came: worker 1 did not reach it, the job ended first",
        "kill@vote:worker=9:step=1 never came: worker 9 did not reach it, it was never started",
    ]
    assert played.report.text().startswith("chaos: 0 faults")


@pytest.mark.parametrize("asked", [FaultAsked(1, 0, 5, 7), FaultAsked(8, 0, 0, 7)])
def test_what_nobody_was_given_is_not_answered(asked):
    played = Played([KILL_1], *begins(a=3), asked)
    assert played.report.records == []
    assert played.answer(asked.worker) is None


@pytest.mark.parametrize("value", [b"", b"1 2", b"1 2 x", b"1 2 3 4", b"1 2 -3", b"1 2 9999999999"])
def test_a_question_that_is_none_is_ignored(value):
    assert asked_fault(ask_key(1), value) is None
    assert asked_fault(ask_key(1), b"1 2 3") == FaultAsked(1, 1, 2, 3)
    assert asked_fault(b"chaos/ask/x", b"1 2 3") is None
