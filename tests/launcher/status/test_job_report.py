"""What a report shows of the ranks: the cause with its stack, and a line for those that wait."""

from __future__ import annotations

from hvdlite_launcher.status.job_report import JobReport
from hvdlite_launcher.status.rank_status import RankStatus
from hvdlite_wire.worker_status import Frame, Source, Thread, Wait

LIBRARY = "/lib/torch/wait.py"


def rank(number: int, line: int, *waits: str) -> RankStatus:
    frames = [Frame("train.py", 9, "main"), Frame("train.py", line, "train")]
    frames += [Frame(LIBRARY, 3, "wait")] if waits else []
    return RankStatus(
        worker=number,
        rank=number,
        host="a",
        pid=100 + number,
        threads=(Thread("MainThread", True, tuple(frames)),),
        waits=tuple(Wait(what, 61.0) for what in waits),
        libraries=("/lib/",),
        source=Source.ANSWER,
        can_answer=True,
    )


def lines(*facts: RankStatus) -> list[str]:
    return JobReport(1, "asked", facts, 0.1).text().splitlines()


def test_ranks_that_wait_are_one_line_and_only_the_cause_has_its_frames():
    report = JobReport(1, "asked", [rank(0, 50, "a barrier"), rank(1, 50, "a barrier"), rank(2, 41)], 0.1)
    assert report.text().splitlines()[1:8] == [
        "  cause: rank 2 (worker 2 on a, pid 102) is at train.py:41 in train",
        "  ranks 0-1 wait for others, for 61 s, in a barrier, at train.py:50 in train",
        "  first difference: rank 2 at train.py:41 in train, rank 0 at train.py:50 in train",
        "  main thread of rank 2:",
        "    > train.py:9 in main",
        "    > train.py:41 in train",
        "  rank  worker  host  pid  state  cpu s  MiB  step  buckets  waits for",
    ]
    assert LIBRARY not in report.text()
    assert report.data()["ranks"][0]["threads"][0]["frames"][-1]["file"] == LIBRARY


def test_those_that_wait_in_several_places_are_a_line_for_each():
    shown = lines(rank(0, 50, "a barrier"), rank(1, 60, "a broadcast"), rank(2, 41))
    assert "  ranks 0-1 wait for others, for 61 s, in a barrier" in shown
    assert "  rank 0, which waits in a barrier, at train.py:50 in train" in shown
    assert "  rank 1, which waits in a broadcast, at train.py:60 in train" in shown


def test_where_all_wait_in_one_place_that_is_one_line():
    shown = lines(rank(0, 50, "a barrier"), rank(1, 50, "a barrier"))
    assert shown[2] == "  ranks 0-1, each of which waits in a barrier, at train.py:50 in train"
    assert shown[3].startswith("  rank  worker")
