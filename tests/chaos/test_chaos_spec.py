"""``--chaos``: the grammar of SPEC, its errors, and the faults that a seed gives each worker."""

from __future__ import annotations

import re

import pytest
from hvdlite_launcher.cli.hvdlite_run import job_of, read_flags
from hvdlite_launcher.elastic.job_faults import ChaosReport, Record
from hvdlite_launcher.errors import UsageError
from hvdlite_launcher.plan.chaos_spec import ChaosFault, parse_chaos
from hvdlite_wire.job_contract import POINTS, worker_faults, worker_form

ELASTIC = ("-np", "4", "--min-np", "2")


def test_a_fault_has_a_kind_a_point_a_worker_and_a_step():
    spec = parse_chaos(["kill@vote:worker=1:step=7", "segv@init:worker=4"])
    assert spec.faults == (ChaosFault("kill", "vote", 1, 7), ChaosFault("segv", "init", 4))
    own = [each.of_worker for each in spec.of_worker(1, ranks=4)]
    assert worker_form(own) == "kill@vote:7"
    assert worker_faults(worker_form(own * 2)) == own * 2
    assert spec.of_worker(0, ranks=4) == ()


@pytest.mark.parametrize("points", ["", ",points=init+vote"])
def test_a_seed_gives_each_worker_the_same_fault_each_time(points):
    text = f"seed=3,every=20{points}"
    drawn = [parse_chaos([text]).of_worker(worker, ranks=4) for worker in range(40)]
    assert drawn == [parse_chaos([text]).of_worker(worker, ranks=4) for worker in range(40)]
    assert drawn != [parse_chaos([text.replace("3", "4")]).of_worker(worker, ranks=4) for worker in range(40)]
    assert "init" not in {fault.point for own in drawn[:4] for fault in own}


def test_the_first_workers_have_turns_of_so_many_steps():
    seeded = parse_chaos(["seed=1,every=20"]).seeded
    steps = sorted(seeded.fault_of(worker, ranks=4).step for worker in range(4))
    assert [step // 20 for step in steps] == [0, 1, 2, 3]
    assert seeded.fault_of(9, ranks=4).step // 20 == 4


def test_faults_by_the_clock_come_in_order_one_in_each_period():
    seeded = parse_chaos(["seed=1,every=30s"]).seeded
    faults = [seeded.by_clock(number) for number in range(50)]
    assert [int(fault.at_s // 30) for fault in faults] == list(range(50))
    assert {fault.kind for fault in faults} == {"kill", "segv"}
    assert seeded.fault_of(0, ranks=4) is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("kil@vote:worker=1", "'kil' is not a kind of fault: choose from kill, segv"),
        ("kill@votes:worker=1", "'votes' is not a point: choose from begin, backward"),
        ("kill@vote", "which worker?"),
        ("kill@vote:worker=x", "worker=x is not a whole number"),
        ("kill@vote:worker=1:worker=2", "worker= is given twice"),
        ("kill@vote:rank=1", "'rank' is not known here: choose from worker, step"),
        ("kill@init:worker=1:step=2", "leave out step="),
        ("nonsense", "'nonsense' is not NAME=VALUE"),
        ("seed=1", "every= missing"),
        ("seed=1,every=0", "every=0 is neither"),
        ("seed=1,every=9,count=0", "leave --chaos out"),
        ("seed=1,every=9s,points=vote", "leave out points="),
        ("seed=1,every=9s,faults=exception", "exception happens within a worker"),
        ("agent@vote:worker=1", "the job has one host"),
    ],
)
def test_nonsense_is_one_error_that_names_it_and_what_is_allowed(spec, said):
    with pytest.raises(UsageError) as caught:
        job_of(read_flags([*ELASTIC, "--chaos", spec]), ["true"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-np", "2", "--chaos", "seed=1,every=9"], "--chaos has no meaning here"),
        ([*ELASTIC, "--chaos-report", "x"], "there is no --chaos to report on"),
        ([*ELASTIC, "--chaos", "seed=1,every=9", "--chaos-report", "/none/x"], "no file can be written there"),
        ([*ELASTIC, "--on-failure", "stop", "--chaos", "seed=1,every=9"], "the first fault ends the job"),
        (
            [*ELASTIC, "--on-failure", "shrink", "--chaos", "seed=1,every=9,count=3"],
            "and count=3 is more: say a smaller --min-np",
        ),
        ([*ELASTIC, "--chaos", "seed=1,every=9", "--chaos", "seed=2,every=9"], "seed= may be given once"),
    ],
)
def test_a_job_that_cannot_go_on_is_told(flags, said):
    with pytest.raises(UsageError) as caught:
        job_of(read_flags(flags), ["true"])
    assert said in str(caught.value)


def test_every_point_is_in_the_library_and_on_the_page():
    from pathlib import Path  # noqa: PLC0415

    root = Path(__file__).parents[2]
    sources = "".join(path.read_text() for path in (root / "hvdlite").rglob("*.py"))
    page = (root / "docs" / "chaos.md").read_text()
    assert set(re.findall(r'\bpoint\("(\w+)"\)', sources)) == POINTS.keys()
    for name in POINTS:
        assert f"| `{name}` |" in page, name


def test_the_report_has_a_line_for_each_fault_and_each_that_never_came():
    record = Record(1.25, "kill", "vote", 7, 1, 0, "node1", 1, False, "killed by SIGKILL")
    report = ChaosReport([record], ["segv@vote:worker=2:step=0 never came"])
    assert report.text().splitlines()[0] == "chaos: 1 fault"
    assert report.text().splitlines()[2].split() == [
        *("1.2", "s", "kill@vote", "7", "1", "0", "node1", "killed", "by", "SIGKILL"),
    ]
    assert report.data()["faults"][0]["end"] == "killed by SIGKILL"
    assert report.data()["never"] == report.never
