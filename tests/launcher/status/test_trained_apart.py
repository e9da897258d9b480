"""The warning of ranks that have trained without each other."""

from __future__ import annotations

from endings import ending_of
from hvdlite_launcher.protocol.messages import Exited, InitStarted, Started
from hvdlite_launcher.status.job_facts import JobFacts
from hvdlite_launcher.status.progress import JobProgress

WRAP = "wrap the optimizer: hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"


def warning(*events, ranks=(0, 1, 2)):
    """Returns the warning after these events of a job with a worker for each of the ranks."""
    ending = ending_of()
    roster, running = ending.roster, ending.running
    facts = JobFacts(ending, JobProgress(ending, lambda _: None, each_s=None), None)
    for number, rank in enumerate(ranks):
        roster.add(number, "node1", rank)
        running.add(number)
        facts.on_event(Started(number, 100 + number))
    for event in events:
        facts.on_event(event)
        if isinstance(event, Exited):
            running.discard(event.worker)
            del roster[event.worker]  # as elastic jobs do
    return facts.warning()


def test_it_names_the_ranks_and_the_way_out():
    assert warning(*(Exited(number, 0, apart=True) for number in (2, 0, 1))) == (
        "warning: ranks 0, 1, 2 trained without each other: each made an optimizer and exchanged nothing, so there "
        f"are 3 models. To train one model, call hvd.init(), and {WRAP}; with Accelerate on CPUs, set "
        "ACCELERATE_USE_CPU=1. If this is meant, give --independent"
    )
    assert warning(InitStarted(1), Exited(1, 0, apart=True), Exited(0, 0)) == (
        "warning: rank 1 trained without the others: it made an optimizer and exchanged nothing, so its model is its "
        f"own. To train one model, {WRAP}; with Accelerate on CPUs, set ACCELERATE_USE_CPU=1. If this is meant, give "
        "--independent"
    )


def test_workers_without_a_rank_are_named_by_number_and_of_many_only_the_first():
    ends = [Exited(number, 0, apart=True) for number in range(3)]
    assert warning(*ends, ranks=(0, None, None)).startswith("warning: workers 0, 1, 2 trained")
    many = [Exited(number, 0, apart=True) for number in range(100)]
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 84 more trained" in warning(
        *many, ranks=range(100)
    )


def test_there_is_none_for_one_worker_nor_of_ranks_that_failed_or_met_others():
    assert warning(Exited(0, 0, apart=True), ranks=(0,)) == ""
    assert warning(Exited(0, 3, apart=True), Exited(1, -15, apart=True), Exited(2, 0)) == ""
    assert warning(*(Exited(number, 0) for number in range(3))) == ""
