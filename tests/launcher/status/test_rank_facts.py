"""What is read from an agent's JSON about a worker, and from what faulthandler writes on a signal."""

from __future__ import annotations

import json

from hvdlite_launcher.status.rank_facts import Frame, Optimizer, Process, RankFacts, Source, Thread, Wait, read_facts
from hypothesis import given
from hypothesis import strategies as st

PROCESS = {"pid": 7, "name": "python", "state": "sleeping", "cpu_s": 1.5, "memory": 1 << 20, "command": "python t.py"}


def read(facts) -> RankFacts:
    return read_facts(json.dumps(facts), worker=3, rank=2, host="a", pid=6)


def test_an_answer_has_the_threads_waits_and_optimizers_of_a_rank():
    optimizer = {"optimizer": "optimizer 1", "step": 4, "phase": "p", "buckets": 3, "sent": 1, "missing": ["w"]}
    thread = {"name": "MainThread", "is_main": True, "frames": [["t.py", 5, "main"], ["/lib/x.py", 1, "f"]]}
    answer = {"libraries": ["/lib/"], "threads": [thread], "waits": [["barrier", 61.5]], "optimizers": [optimizer]}
    facts = read({"pid": 7, "processes": [PROCESS], "answer": answer, "can_answer": True, "load": 2.5, "cores": 2})
    assert facts == RankFacts(
        worker=3, rank=2, host="a", pid=7,
        processes=(Process(7, "python", "sleeping", 1.5, 1 << 20, "python t.py"),),
        threads=(Thread("MainThread", True, (Frame("t.py", 5, "main"), Frame("/lib/x.py", 1, "f"))),),
        waits=(Wait("barrier", 61.5),),
        optimizers=(Optimizer("optimizer 1", 4, "p", 3, 1, ("w",)),),
        libraries=("/lib/",), source=Source.ANSWER, can_answer=True, load=2.5, cores=2,
    )  # fmt: skip
    assert facts.place() == Frame("t.py", 5, "main")
    assert facts.is_waiting()
    assert facts.state == "sleeping"


def test_stacks_that_were_written_on_a_signal_are_read_with_the_main_thread_last():
    stacks = (
        '{"libraries": ["/lib/"]}\n'
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/lib/threading.py", line 10 in wait\n'
        '  File "t.py", line 3 in work\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/lib/re.py", line 166 in match\n'
        '  File "t.py", line 10 in load\n'
        '  File "t.py", line 13 in <module>\n'
        "\nExtension modules: numpy.core (total: 1)\n"
    )
    facts = read({"pid": 7, "processes": [PROCESS], "answer": None, "stacks": stacks, "can_answer": True})
    assert facts.source is Source.SIGNAL
    assert [thread.is_main for thread in facts.threads] == [False, True]
    assert facts.place() == Frame("t.py", 10, "load")
    assert facts.main[0] == Frame("t.py", 13, "<module>")


def test_control_characters_of_a_program_do_not_reach_the_terminal():
    thread = {"name": "\x1b[31mred", "is_main": True, "frames": [["\x1b]0;x\x07.py", 1, "f"]]}
    facts = read({"answer": {"threads": [thread]}})
    assert "\x1b" not in facts.threads[0].name + facts.main[0].file


KEYS = ["pid", "processes", "answer", "stacks", "threads", "frames", "waits", "optimizers", "libraries"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=20,
)


@given(JSON)
def test_whatever_an_agent_sends_is_read_without_an_error(facts):
    read(facts).data()


def test_what_is_no_json_leaves_what_the_launcher_knows():
    assert read_facts("{", worker=3, rank=2, host="a", pid=6) == RankFacts(worker=3, rank=2, host="a", pid=6)
