"""What is known of a rank: what its agent tells, which nothing that a program has named may disturb."""

from __future__ import annotations

from hvdlite_launcher.status.rank_status import RankStatus
from hvdlite_launcher.workers.ending import Roster
from hvdlite_wire.worker_status import Frame, Process, StepStatus, Thread
from statuses import told


def read(**fields) -> RankStatus:
    roster = Roster()
    roster.add(3, "a", 2)
    roster[3].pid = 6
    return RankStatus.known(3, roster, told(3, in_full=True, **fields).status)


def test_an_answer_has_the_threads_waits_and_optimizers_of_a_rank():
    known = read(
        pid=7,
        processes=(Process(7, "python", "sleeping", 1.5, 1 << 20, "python t.py"),),
        threads=(Thread("MainThread", True, (Frame("t.py", 5, "main"), Frame("/lib/x.py", 1, "f"))),),
        libraries=("/lib/",),
        waits=[("barrier", 61.5)],
        optimizers=(StepStatus("optimizer 1", 4, "p", 3, 1, ("w",)),),
    )
    assert (known.worker, known.rank, known.host, known.pid, known.name) == (3, 2, "a", 7, "rank 2")
    assert known.place() == Frame("t.py", 5, "main")
    assert known.is_waiting()
    assert (known.waits_for, known.waited_s) == ("barrier", 61.5)
    assert known.state == "sleeping"
    assert list(known.report_data()) == [
        *("worker", "rank", "host", "pid", "processes", "threads", "waits", "optimizers", "libraries", "addresses"),
        *(
            "silent_s",
            "source",
            "can_answer",
            "is_ending",
            "has_come",
            "load",
            "cores",
            "nccl",
            "state",
            "place",
            "is_waiting",
        ),
    ]
    assert known.report_data()["optimizers"][0] == {
        "optimizer": "optimizer 1", "step": 4, "phase": "p", "buckets": 3, "sent": 1, "missing": ("w",)
    }  # fmt: skip


def test_control_characters_of_a_program_do_not_reach_the_terminal():
    thread = Thread("\x1b[31mred", True, (Frame("\x1b]0;x\x07.py", 1, "f"),))
    known = read(threads=(thread,), waits=[("\x1b[2J\ud800", 1)], steps={"a\x1b": 1})
    shown = known.threads[0].name + known.main[0].file + known.waits_for + next(iter(known.steps))
    assert shown == "?[31mred?]0;x?.py?[2J?a?"


def test_what_is_much_too_long_is_cut():
    threads = (Thread("x" * 5000, True, ()), *[Thread("", False, ())] * 1000)
    known = read(threads=threads, steps={str(number): 1 for number in range(101)})
    assert (len(known.threads), len(known.threads[0].name), len(known.steps)) == (1000, 1000, 100)
