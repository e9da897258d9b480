"""The summary says how a job ended, in words and numbers, from what is kept of it."""

import pytest
from endings import ending_of
from hvdlite_launcher.protocol.messages import Exited, PeakMemory, Started
from hvdlite_launcher.status.job_facts import GenerationRow, GenerationTable, JobFacts
from hvdlite_launcher.status.progress import JobProgress
from hvdlite_launcher.status.summary import summary_data
from hvdlite_launcher.workers.failure_message import JobOutcome
from hvdlite_wire.worker_status import HostUsage
from statuses import told


def _facts(*events, hosts=("node1", "node2"), table=None, lasted_s=2.5):
    now = [0.0]
    ending = ending_of(lambda: now[0], hosts=hosts)
    progress = JobProgress(ending, lambda _: None, each_s=10.0)
    facts = JobFacts(ending, progress, table)
    for number in ending.running:
        facts.on_event(Started(number, 100 + number))
    now[0] = lasted_s
    for event in events:
        progress.on_event(event)
        facts.on_event(event)
    return facts


def test_it_has_the_last_steps_the_peak_memory_and_the_losses():
    last = told(1, steps={"optimizer 1": 9}, usage=HostUsage(70, 50))
    facts = _facts(last, Exited(1, 3, peak_memory=700), Exited(0, 1, peer_lost=True, peak_memory=500))
    data = summary_data(facts, JobOutcome(3, "why it failed", rank=1), ["python", "x.py"], 2)
    assert (data["verdict"], data["why"], data["exit_code"], data["first_failed_rank"]) == (
        "failed", "why it failed", 3, 1
    )  # fmt: skip
    assert "rank 1 failed first" in data["next"]
    assert [(each["rank"], each["steps"], each["peak_memory_bytes"]) for each in data["ranks"]] == [
        (0, {}, 500),
        (1, {"optimizer 1": 9}, 700),
    ]
    assert [(each["rank"], each["how"]) for each in data["losses"]] == [(1, "exit code 3")]
    assert (data["hosts"], data["most_workers"], data["peak_memory_bytes"]) == (["node1", "node2"], 2, 700)
    assert data["bytes"] == {"node2": {"sent": 70, "received": 50}}
    assert (data["duration_s"], data["command"], data["restarts"]) == (2.5, ["python", "x.py"], 2)


def test_the_memory_of_a_killed_worker_comes_when_it_is_reaped():
    facts = _facts(Exited(1, -9), Exited(0, -15, peak_memory=5), PeakMemory(1, 700))
    assert {end.worker: end.peak_memory for end in facts.ends} == {1: 700, 0: 5}


@pytest.mark.parametrize(
    ("outcome", "verdict", "advice"),
    [
        (JobOutcome(), "done", ""),
        (JobOutcome(130, hasty=True), "interrupted", "same command again"),
        (JobOutcome(1, "lost node2: gone", lost_host="node2"), "lost host", "Look at node2"),
        (JobOutcome(137, "killed", rank=0), "failed", "memory runs out"),
        (JobOutcome(1, "rank 1 did not call hvd.init()"), "failed", "See why"),
    ],
)
def test_verdict_and_advice_follow_from_the_outcome(outcome, verdict, advice):
    data = summary_data(_facts(), outcome, [], 0)
    assert data["verdict"] == verdict
    assert advice in data["next"]
    assert bool(advice) == bool(data["next"])


def test_the_generations_of_an_elastic_job_are_in_it():
    table = GenerationTable()
    table.add(GenerationRow(1, 0.5, 2, ["workers 0, 1 on node1"], []))
    table.add(GenerationRow(2, 3.0, 1, [], ["worker 1 failed"]))
    data = summary_data(_facts(table=table), JobOutcome(), [], 0)
    assert data["generations"][1] == {"generation": 2, "at_s": 3.0, "size": 1, "came": [], "left": ["worker 1 failed"]}
