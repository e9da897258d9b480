"""What there is to see of a job, as lines of any width and height, and as JSON."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import pytest
from hvdlite_launcher.status.job_view import JobView
from hvdlite_launcher.status.live_view import LiveView, make_view
from hvdlite_launcher.status.progress import HostProgress
from hvdlite_launcher.status.rank_status import RankStatus
from hvdlite_wire.worker_status import Source, Wait
from rich.cells import cell_len

RANKS = [
    RankStatus(
        worker=number, rank=number, host=f"node{number // 2}", pid=100 + number, steps={"optimizer 1": 1234}, rate=35.2,
        memory=1_100_000_000, cpu_use=0.98,
    )
    for number in range(4)
]  # fmt: skip
SILENT = {"can_answer": True, "source": Source.NONE}
JOB = JobView(
    723.4, "python train.py", None, 0, RANKS, {"node0": HostProgress(112e6, 98e6), "node1": HostProgress(1200, 0)}
)


def job(ranks=RANKS, **changes):
    return replace(JOB, ranks=ranks, **changes)


def one(number=0, **changes):
    return [*RANKS[:number], replace(RANKS[number], **changes), *RANKS[number + 1 :]]


def lines(view=JOB, columns=80, most=20):
    return [line.rstrip() for line in LiveView(environ={"NO_COLOR": "1"}).lines(view, columns, most)]


def test_hosts_and_ranks_are_a_tree_below_a_line_about_the_job():
    assert lines() == [
        "── 0:12:03  4 ranks on 2 hosts  step 1234  35.2 steps/s  python train.py",
        "           step  steps/s  memory   CPU",
        "node0                     2.2 GB  196%  out 112 MB/s, in 98 MB/s",
        "├─ rank 0  1234     35.2  1.1 GB   98%",
        "└─ rank 1  1234     35.2  1.1 GB   98%",
        "node1                     2.2 GB  196%  out 1.2 kB/s, in 0.0 kB/s",
        "├─ rank 2  1234     35.2  1.1 GB   98%",
        "└─ rank 3  1234     35.2  1.1 GB   98%",
    ]


def test_what_is_known_of_no_rank_has_no_column():
    bare = [RankStatus(worker=0, rank=0, host="node0")]
    assert lines(job(bare, hosts={"node0": HostProgress()})) == [
        "── 0:12:03  1 rank on 1 host  python train.py",
        "           memory",
        "node0      0.0 kB",
        "└─ rank 0",
    ]
    told = [replace(rank, sample_rate=100.0, gpu_use=0.5) for rank in RANKS]
    assert re.search(r"samples/s +memory +CPU +GPU", "\n".join(lines(job(told), columns=120)))
    assert "400 samples/s" in lines(job(told), columns=120)[0]


def test_samples_of_the_job_are_shown_once_every_rank_tells_of_its_own():
    assert "samples/s" not in lines(job(one(sample_rate=100.0)), columns=120)[0]


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"waits": (Wait("allreduce of 'loss'", 12.0),)}, "waits 12 s for allreduce of 'loss'"),
        ({"waits": (Wait("allreduce of 'loss'", 0.1),)}, ""),
        ({"cost": 0.23, "slow_phase": "data"}, "late in data: costs 23% of each step"),
        ({"cost": 0.02, "slow_phase": "data"}, ""),
        (SILENT, "silent: stopped, or an extension holds its interpreter's lock"),
    ],
)
def test_what_is_wrong_with_a_rank_stands_beside_it_and_in_the_plain_line(changes, remark):
    view = job(one(2, **changes))
    assert lines(view, columns=120)[6].partition("98%")[2].strip() == remark
    plain = view.plain_line()
    assert plain == "0:12:03: 4 ranks on 2 hosts, step 1234, 35.2 steps/s" + (remark and f"; rank 2 on node1 {remark}")


def test_a_rank_that_is_ending_is_said_to_be_and_is_no_trouble():
    view = job(one(2, is_ending=True))
    assert lines(view, columns=120)[6].endswith("is ending")
    assert view.plain_line().endswith("steps/s")


def test_an_elastic_job_has_a_generation_and_workers_without_a_rank():
    view = job([RANKS[0], replace(RANKS[1], worker=7, rank=None)], generation=3, faults=1)
    assert lines(view)[0].startswith("── 0:12:03  2 workers on 2 hosts  step 1234  35.2 steps/s  generation 3  1 fault")
    assert any(line.startswith("└─ worker 7") for line in lines(view))


def test_where_there_are_too_few_lines_those_that_are_worst_off_are_shown():
    view = job(one(3, **SILENT))
    assert lines(view, most=7)[2:] == [
        "node0                     2.2 GB  196%  out 112 MB/s, in 98 MB/s",
        "└─ rank 0  1234     35.2  1.1 GB   98%",
        "node1                     2.2 GB  196%  out 1.2 kB/s, in 0.0 kB/s",
        "└─ rank 3  1234     35.2  1.1 GB   98%  silent: stopped, or an extension holds …",
        "… 2 more",
    ]
    assert [line.split()[0] for line in lines(view, most=5)[2:]] == ["node1", "└─", "…"]
    assert len(lines(view, most=4)) == 1


def test_narrow_terminals_leave_columns_out_for_what_is_wrong():
    view = job(one(1, cost=0.5, slow_phase="data"))
    assert lines(view, columns=60)[4] == "└─ rank 1  1234     35.2  1.1 GB   98%  late in data: costs…"
    assert lines(view, columns=40)[4] == "└─ rank 1  1234  late in data: costs 50…"


@pytest.mark.parametrize("columns", [1, 2, 10, 13, 20, 40, 79, 200])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9, 50])
def test_no_line_is_wider_than_the_terminal_and_there_are_no_more_than_fit(columns, most):
    ranks = [replace(rank, host="日本語.example.org", waits=(Wait("日本", 9.0),), sample_rate=1e9) for rank in RANKS]
    view = job(ranks, hosts={"日本語.example.org": HostProgress(1e12, 1e15, [0.5])}, generation=3, faults=99)
    drawn = lines(view, columns, most)
    assert 1 <= len(drawn) <= most
    assert max(map(cell_len, drawn)) <= max(columns, 12)


def test_colours_are_left_out_where_the_user_wants_none():
    assert "\x1b[" in "".join(LiveView(environ={}).lines(JOB, 80, 20))
    assert "\x1b[" not in "".join(LiveView(environ={"NO_COLOR": "1"}).lines(JOB, 80, 20))


def test_it_comes_back_from_json_also_with_what_a_newer_version_knows():
    data = json.loads(json.dumps(job(generation=3).data()))
    data["ranks"][0]["mood"] = data["mood"] = "good"
    assert lines(JobView.from_data(data)) == lines(job(generation=3))
    for wrong in ({}, {**data, "ranks": [{}]}, {**data, "hosts": []}):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            JobView.from_data(wrong)


def test_without_rich_there_is_no_view_and_the_user_is_told_what_to_install(monkeypatch):
    said = []
    assert isinstance(make_view(said.append), LiveView)
    assert said == []
    monkeypatch.setitem(sys.modules, "rich.cells", None)
    assert make_view(said.append) is None
    assert said[0].startswith("--watch: a line every 10 s, as rich is not installed: pip install 'hvdlite[watch]'")
