"""Which rank a report names as the cause, from what is known of each, and what it shows of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hvdlite_launcher.status.job_report import JobReport, find_cause, first_difference, verdict
from hvdlite_launcher.status.rank_status import RankStatus
from hvdlite_wire.worker_status import Frame, Process, Source, StepStatus, Thread, Wait

LIBRARIES = ("/lib/",)
ALL_REDUCE = "the all-reduce of the gradients of weight (bucket 0 of optimizer 1)"


def rank(number: int, *places: tuple[str, int, str], **more) -> RankStatus:
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
    return RankStatus(worker=number, rank=number, host="a", pid=100 + number, **given)


def waits(number: int, what: str = ALL_REDUCE, line: int = 50) -> RankStatus:
    return rank(number, ("train.py", 9, "main"), ("train.py", line, "train"), waits=(Wait(what, 61.0),))


def named(facts) -> tuple[list[int], list[int]]:
    cause = find_cause(facts)
    return [each.worker for each in cause.ranks], [each.worker for each in cause.waiting]


def test_the_rank_that_waits_for_nobody_is_the_cause_and_its_line_is_told():
    late = rank(2, ("train.py", 9, "main"), ("train.py", 41, "load"), ("/lib/time.py", 3, "sleep"))
    facts = [waits(0), waits(1), late, waits(3)]
    assert named(facts) == ([2], [0, 1, 3])
    assert find_cause(facts).what[0] == "is at train.py:41 in load, within sleep (/lib/time.py)"
    assert first_difference(late, facts[0]) == (Frame("train.py", 41, "load"), Frame("train.py", 50, "train"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"state": "stopped"}, "is stopped: its process does not run"),
        ({"source": Source.SIGNAL}, "does not answer: a C extension holds the interpreter's lock"),
        ({"source": Source.SIGNAL, "is_ending": True}, "is ending: its part in the job is over"),
        ({"source": Source.NONE, "state": "disk-sleep"}, "is in an uninterruptible wait of the kernel"),
        ({"has_come": False, "source": Source.NONE}, "has no report: its host did not answer in time"),
    ],
)
def test_a_process_that_cannot_run_is_the_cause_even_if_it_waited_before(fault, words):
    ill = rank(1, ("train.py", 50, "train"), waits=(Wait(ALL_REDUCE, 60.0),), **fault)
    facts = [waits(0), ill, rank(2, ("train.py", 41, "load"))]
    assert named(facts) == ([1], [0])
    assert find_cause(facts).what[0].startswith(words)


def test_of_ranks_that_all_wait_the_few_that_wait_elsewhere_are_the_cause():
    odd = waits(3, "allreduce(metrics)", 60)
    assert named([waits(0), waits(1), waits(2), odd]) == ([3], [0, 1, 2])
    assert find_cause([waits(0), waits(1), odd]).what[0] == "waits in allreduce(metrics), at train.py:60 in train"


def test_two_halves_that_wait_in_different_places_have_no_exception_among_them():
    facts = [waits(0), waits(1, "allreduce(metrics)", 60), waits(2), waits(3, "allreduce(metrics)", 60)]
    cause = find_cause(facts)
    assert cause.ranks == ()
    assert cause.what[0] == "the ranks wait in 2 different places: they have taken different ways"
    report = JobReport(1, "asked", facts, 0.1)
    assert report.data()["cause"]["ways"] == [[0, 2], [1, 3]]
    _, *lines = report.text().splitlines()
    assert lines[:4] == [
        "  cause: not certain; the ranks wait in 2 different places: they have taken different ways",
        f"    ranks 0, 2, each of which waits in {ALL_REDUCE}, at train.py:50 in train",
        "    ranks 1, 3, each of which waits in allreduce(metrics), at train.py:60 in train",
        "  first difference: rank 0 at train.py:50 in train, rank 1 at train.py:60 in train",
    ]


def test_ranks_that_all_wait_in_one_place_have_a_broken_connection_between_them():
    cause = find_cause([waits(0), waits(1)])
    assert cause.ranks == ()
    assert "the connection between them is slow or broken" in cause.what[0]


def test_hosts_that_do_not_reach_each_other_are_the_cause_and_not_a_rank_that_waits():
    two = [replace(waits(0), addresses=("10.0.0.1",), silent_s={"10.0.0.2": 14.2, "10.0.0.9": 60.0})]
    two += [replace(waits(1), host="b", addresses=("10.0.0.2",), silent_s={"10.0.0.1": 13.0})]
    cause = find_cause(two)
    assert (cause.ranks, cause.waiting, cause.cut) == ((), tuple(two), (("a", "b"),))
    assert cause.what[0].startswith(
        "a and b do not reach each other: nothing has come over the network between them for 14 s. hvdlite-run reaches"
    )
    report = JobReport(1, "asked", two, 0.1)
    assert "  cause: a and b do not reach each other: " in report.text()
    assert "  ranks 0-1 wait for others, for 61 s, in the all-reduce" in report.text()
    assert report.data()["cause"]["cut"] == [["a", "b"]]
    assert verdict(two).value == "stands still"


def test_a_network_that_is_cut_in_one_direction_is_told_with_it():
    two = [replace(waits(0), addresses=("10.0.0.1",))]
    two += [replace(waits(1), host="b", addresses=("10.0.0.2",), silent_s={"10.0.0.1": 13.0})]
    assert find_cause(two).what[0].startswith("a does not reach b: nothing has come over the network between")


def test_connections_that_are_silent_for_a_moment_or_lead_to_a_host_that_is_not_there_are_no_cut():
    short = [replace(waits(0), addresses=("10.0.0.1",), silent_s={"10.0.0.2": 5.0})]
    short += [replace(waits(1), host="b", addresses=("10.0.0.2",))]
    assert find_cause(short).cut == ()
    gone = [replace(waits(0), silent_s={"10.0.0.2": 60.0}), rank(1, has_come=False, source=Source.NONE)]
    assert named(gone) == ([1], [0])


def test_a_program_of_plain_torch_distributed_is_seen_to_wait_by_its_stack():
    inner = ("/lib/torch/distributed/distributed_c10d.py", 3000, "all_reduce")
    late = rank(1, ("ddp.py", 7, "load"))
    assert named([rank(0, ("ddp.py", 5, "train"), inner), late]) == ([1], [0])


@pytest.mark.parametrize(
    "inner",
    [
        ("/lib/torch/distributed/utils.py", 300, "_verify_param_shape_across_processes"),
        ("/lib/torch/distributed/rendezvous.py", 190, "_create_c10d_store"),
        ("/lib/torch/autograd/graph.py", 800, "_engine_run_backward"),
    ],
)
def test_ddp_is_seen_to_wait_when_it_begins_and_in_its_backward_passes(inner):
    plain = {"source": Source.SIGNAL, "can_answer": False}
    facts = [rank(0, ("ddp.py", 5, "train"), inner, **plain), rank(1, ("ddp.py", 7, "load"), **plain)]
    assert named(facts) == ([1], [0])
    assert "  rank 0 waits for others, at ddp.py:5 in train\n" in JobReport(1, "asked", facts, 0.1).text()
    assert "since it did not answer" not in JobReport(1, "asked", facts, 0.1).text()
    # As with Accelerate, after hvd.init().
    assert named([rank(0, ("ddp.py", 5, "train"), inner), rank(1, ("ddp.py", 7, "load"))]) == ([1], [0])


@pytest.mark.parametrize("differs", [{"state": "running"}, {"optimizers": (StepStatus("o", 1, "p", 1, 0, ()),)}])
def test_a_backward_pass_that_computes_or_whose_gradients_hvdlite_averages_is_no_wait(differs):
    inner = ("/lib/torch/autograd/graph.py", 800, "_engine_run_backward")
    assert named([waits(0), rank(1, ("train.py", 5, "train"), inner, **differs)]) == ([1], [0])


def test_a_program_that_is_installed_is_at_its_own_line():
    package = "/env/lib/python3.11/site-packages"
    frames = [(f"{package}/trainer/main.py", 8, "fit"), (f"{package}/torch/nn/modules/module.py", 9, "_call_impl")]
    late = rank(1, ("/lib/runpy.py", 1, "run"), *frames, libraries=("/lib/", f"{package}/"))
    assert late.place() == Frame(f"{package}/trainer/main.py", 8, "fit")


def test_ranks_that_compute_are_no_hang():
    cause = find_cause([rank(0, ("train.py", 41, "load")), rank(1, ("train.py", 41, "load"))])
    assert cause.ranks == ()
    assert "no rank waits for another" in cause.what[0]


def test_a_program_that_never_called_init_says_nothing():
    silent = RankStatus(worker=0, rank=0, host="a", pid=1)
    assert "has not called hvd.init()" in find_cause([silent]).what[0]


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
        ([rank(0, ("/lib/torch/autograd/graph.py", 8, "_engine_run_backward")), rank(1)], "not known"),
        ([], "not known"),
    ],
)
def test_a_job_stands_still_if_a_rank_cannot_run_or_has_waited_long(facts, said):
    assert verdict(facts).value == said


# ------------------------------------------------------------ the text


def lines(*facts: RankStatus) -> list[str]:
    return JobReport(1, "asked", facts, 0.1).text().splitlines()


def test_ranks_that_wait_are_one_line_and_only_the_cause_has_its_frames():
    places = ("train.py", 9, "main"), ("train.py", 50, "train"), ("/lib/torch/wait.py", 3, "wait")
    waiting = [rank(number, *places, waits=(Wait("a barrier", 61.0),)) for number in (0, 1)]
    report = JobReport(1, "asked", [*waiting, rank(2, ("train.py", 9, "main"), ("train.py", 41, "train"))], 0.1)
    assert report.text().splitlines()[1:7] == [
        "  cause: rank 2 (worker 2 on a, pid 102) is at train.py:41 in train",
        "  ranks 0-1 wait for others, for 61 s, in a barrier, at train.py:50 in train",
        "  first difference: rank 2 at train.py:41 in train, rank 0 at train.py:50 in train",
        "  main thread of rank 2:",
        "    > train.py:9 in main",
        "    > train.py:41 in train",
    ]
    assert report.text().splitlines()[7].split() == [
        *("rank", "worker", "host", "pid", "state", "cpu", "s", "MiB", "step", "buckets", "waits", "for")
    ]
    assert "/lib/torch/wait.py" not in report.text()
    assert report.data()["ranks"][0]["threads"][0]["frames"][-1]["file"] == "/lib/torch/wait.py"


def test_those_that_wait_in_several_places_are_a_line_for_each():
    late = rank(2, ("train.py", 41, "train"))
    shown = lines(waits(0, "a barrier"), waits(1, "a broadcast", 60), late)
    assert "  ranks 0-1 wait for others, for 61 s, in a barrier" in shown
    assert "  rank 0, which waits in a barrier, at train.py:50 in train" in shown
    assert "  rank 1, which waits in a broadcast, at train.py:60 in train" in shown


def test_where_all_wait_in_one_place_that_is_one_line():
    shown = lines(waits(0, "a barrier"), waits(1, "a barrier"))
    assert shown[2] == "  ranks 0-1, each of which waits in a barrier, at train.py:50 in train"
    assert shown[3].startswith("  rank  worker")


def test_what_nccl_says_is_told_with_the_ranks_of_its_processes():
    said = ("Communicators: 1, ranks missing", "  Rank 1: process 101 on node 10.0.0.2", "  Rank 2: process 7")
    facts = [rank(0, nccl=said), rank(1), *(replace(rank(each), pid=7) for each in (2, 3))]
    text = lines(*facts)
    at = text.index(f"  NCCL says, as asked on {facts[0].host}:")
    assert text[at + 1 : at + 4] == [
        "    Communicators: 1, ranks missing",
        "      Rank 1: process 101 (rank 1) on node 10.0.0.2",
        "      Rank 2: process 7",  # two hosts have such a process
    ]
    many = rank(0, nccl=tuple(map(str, range(100))))
    assert "    and 40 more lines: see --report-dir" in lines(many)
    assert JobReport(1, "", [many], 0.0).data()["ranks"][0]["nccl"][99] == "99"
