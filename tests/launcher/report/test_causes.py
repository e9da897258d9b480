"""Which rank a report names as the cause, from what is known of each."""

from __future__ import annotations

import pytest
from hvdlite_launcher.report.causes import find_cause, first_difference
from hvdlite_launcher.report.rank_facts import Frame, Process, RankFacts, Source, Thread, Wait
from hvdlite_launcher.report.report_text import verdict

LIBRARIES = ("/lib/",)
ALL_REDUCE = "the all-reduce of the gradients of weight (bucket 0 of optimizer 1)"


def rank(number: int, *places: tuple[str, int, str], **more) -> RankFacts:
    """A rank that has answered, and is at these places of the program, the outermost first."""
    frames = tuple(Frame(*place) for place in places)
    given = {
        "processes": (Process(100 + number, "python", more.pop("state", "sleeping"), 1.0, 0, "python"),),
        "threads": (Thread("MainThread", True, frames),),
        "libraries": LIBRARIES,
        "source": Source.ANSWER,
        "can_answer": True,
        **more,
    }
    return RankFacts(worker=number, rank=number, host="a", pid=100 + number, **given)


def waits(number: int, what: str = ALL_REDUCE, line: int = 50) -> RankFacts:
    return rank(number, ("train.py", 9, "main"), ("train.py", line, "train"), waits=(Wait(what, 61.0),))


def named(facts) -> tuple[list[int], list[int]]:
    cause = find_cause(facts)
    return [each.worker for each in cause.ranks], [each.worker for each in cause.waiting]


def test_the_rank_that_waits_for_nobody_is_the_cause_and_its_line_is_told():
    late = rank(2, ("train.py", 9, "main"), ("train.py", 41, "load"), ("/lib/time.py", 3, "sleep"))
    facts = [waits(0), waits(1), late, waits(3)]
    assert named(facts) == ([2], [0, 1, 3])
    assert find_cause(facts).what(late) == "is at train.py:41 in load, within sleep (/lib/time.py)"
    assert first_difference(late, facts[0]) == (Frame("train.py", 41, "load"), Frame("train.py", 50, "train"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"state": "stopped"}, "is stopped: its process does not run"),
        ({"source": Source.SIGNAL}, "does not answer: a C extension holds the interpreter's lock"),
        ({"source": Source.NONE, "state": "disk-sleep"}, "is in an uninterruptible wait of the kernel"),
        ({"has_come": False, "source": Source.NONE}, "has no report: its host did not answer in time"),
    ],
)
def test_a_process_that_cannot_run_is_the_cause_even_if_it_waited_before(fault, words):
    ill = rank(1, ("train.py", 50, "train"), waits=(Wait(ALL_REDUCE, 60.0),), **fault)
    facts = [waits(0), ill, rank(2, ("train.py", 41, "load"))]
    assert named(facts) == ([1], [0])
    assert find_cause(facts).what(ill).startswith(words)


def test_of_ranks_that_all_wait_the_few_that_wait_elsewhere_are_the_cause():
    odd = waits(3, "allreduce(metrics)", 60)
    assert named([waits(0), waits(1), waits(2), odd]) == ([3], [0, 1, 2])
    assert find_cause([waits(0), waits(1), odd]).what(odd) == "waits in allreduce(metrics), at train.py:60 in train"


def test_two_halves_that_wait_in_different_places_have_no_exception_among_them():
    cause = find_cause([waits(0), waits(1, "allreduce(metrics)", 60)])
    assert cause.ranks == ()
    assert cause.what(waits(0)) == "the ranks wait in different places: they have taken different ways"


def test_ranks_that_all_wait_in_one_place_have_a_broken_connection_between_them():
    cause = find_cause([waits(0), waits(1)])
    assert cause.ranks == ()
    assert "the connection between them is slow or broken" in cause.what(waits(0))


def test_a_program_of_plain_torch_distributed_is_seen_to_wait_by_its_stack():
    inner = ("/lib/torch/distributed/distributed_c10d.py", 3000, "all_reduce")
    late = rank(1, ("ddp.py", 7, "load"))
    assert named([rank(0, ("ddp.py", 5, "train"), inner), late]) == ([1], [0])


def test_ranks_that_compute_are_no_hang():
    cause = find_cause([rank(0, ("train.py", 41, "load")), rank(1, ("train.py", 41, "load"))])
    assert cause.ranks == ()
    assert "no rank waits for another" in cause.what(waits(0))


def test_a_program_that_never_called_init_says_nothing():
    silent = RankFacts(worker=0, rank=0, host="a", pid=1)
    assert "has not called hvd.init()" in find_cause([silent]).what(silent)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([rank(0), rank(1)], "goes on"),
        ([rank(0), rank(1, waits=(Wait(ALL_REDUCE, 9.0),))], "goes on"),
        ([rank(0), rank(1, waits=(Wait(ALL_REDUCE, 10.0),))], "stands still"),
        ([rank(0), rank(1, state="stopped")], "stands still"),
        ([rank(0), rank(1, source=Source.SIGNAL)], "stands still"),
        ([rank(0), rank(1, has_come=False)], "stands still"),
        ([rank(0, can_answer=False, source=Source.NONE)], "not known"),
        ([], "not known"),
    ],
)
def test_a_job_stands_still_if_a_rank_cannot_run_or_has_waited_long(facts, said):
    assert verdict(facts).value == said
