"""Only the output of chosen ranks is shown; files have that of all."""

from __future__ import annotations

import os
from dataclasses import replace
from queue import SimpleQueue

import pytest
from hvdlite_launcher.cli.hvdlite_run import job_of, main, read_flags
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.hosts import plan_slots
from hvdlite_launcher.plan.job_spec import JobSpec
from hvdlite_launcher.protocol.messages import Output, ScreenDone
from hvdlite_launcher.screen.job_screen import shown_by_rank, shown_by_slots
from hvdlite_launcher.screen.output_records import OutputFiles
from screens import screen_on


def job(*flags: str) -> JobSpec:
    return job_of(read_flags([*flags, "-H", "a:2,b:2"]), ["true"])


def shown(spec: JobSpec) -> list[int]:
    shows = shown_by_slots(spec, plan_slots(spec.hosts, spec.size))
    return [worker for worker in range(4) if shows(worker, worker)]


def test_all_are_shown_unless_some_are_chosen_by_rank_or_by_rank_on_their_hosts():
    assert shown(job()) == [0, 1, 2, 3]
    assert shown(job("--show-ranks", "0,3")) == [0, 3]
    assert shown(job("--local-ranks-filter", "1")) == [1, 3]


def test_a_rank_that_is_not_there_is_an_error_unless_the_job_was_restarted_with_fewer():
    with pytest.raises(UsageError, match=r"^--show-ranks: there is no rank 4: they are 0 to 3$"):
        shown(job("--show-ranks", "0,4"))
    with pytest.raises(UsageError, match=r"^--local-ranks-filter: there is no rank 2: they are 0 to 1$"):
        shown(job("--local-ranks-filter=2"))
    assert shown(replace(job("--show-ranks", "0,4"), attempt=1)) == [0]


def test_in_an_elastic_job_it_goes_by_the_rank_of_now_and_who_has_none_is_shown():
    shows = shown_by_rank(job("--show-ranks", "0", "--min-np", "1"))
    assert [shows(7, rank) for rank in (None, 0, 1)] == [True, True, False]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--show-ranks", "0-3"], "--show-ranks: '0-3' is not a list of ranks, such as 0 or 0,1"),
        (["--show-ranks", ""], "--show-ranks: '' is not a list of ranks"),
        (["--show-ranks", "0", "--local-ranks-filter", "0"], "give one of them"),
        (["--local-ranks-filter", "0", "--min-np", "1"], "ranks change in an elastic job: give --show-ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, said, capsys):
    assert main(["-np", "1", *flags, "true"]) == 2
    assert said in capsys.readouterr().err


def test_what_is_not_shown_is_in_the_files_and_counts_as_shown(tmp_path):
    reads, writes = os.pipe()
    events, accounted = SimpleQueue(), []
    files = OutputFiles(str(tmp_path), {0: 0, 1: 1})
    screen = screen_on(writes, writes, events, accounted.append, records=[files], shows=lambda worker, _: worker == 0)
    outputs = [Output(worker, "stdout", b"from %d\n" % worker) for worker in (1, 0)]
    for output in outputs:
        screen.show(output)
    screen.close()
    assert events.get(timeout=60) == ScreenDone()
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        assert pipe.read() == b"[0]<stdout>:from 0\n"
    assert accounted == outputs
    assert [(tmp_path / f"rank.{rank}" / "stdout").read_bytes() for rank in (0, 1)] == [b"from 0\n", b"from 1\n"]
