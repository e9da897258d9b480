"""Hangs drawn from seeds: the report names the rank that the others wait for, and the line of its program, in each."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import PATIENCE_S, Launch, wait_until
from hangs import HOLDS_THE_LOCK, KINDS, PROGRAM, STOP, Hang, as_argument, line_of, seeded_cut, seeded_hangs
from hvdlite_launcher.status.console import ask_for_report
from long_run import chosen

pytestmark = pytest.mark.slow


def report_at_a_stand(job: Launch, hang: Hang, directory: Path) -> tuple[str, dict[str, Any]]:
    """Returns the second of two reports that say the same of each rank: the ranks take time to come there."""
    there, pid = directory / f"there.{hang.number}", str(job.launcher().pid)
    wait_until(lambda: there.exists() or job.process.poll() is not None, message=lambda: ask_for_report(pid)[0])
    assert job.process.poll() is None, f"the job ended before {hang}: {job.ended()}"
    give_up_at, before = time.monotonic() + PATIENCE_S, None
    while True:
        text, data = ask_for_report(pid)
        others_wait = all(each["waits"] for each in data["ranks"] if each["rank"] != hang.rank)
        odd, source = data["ranks"][hang.rank], "signal" if hang.kind in HOLDS_THE_LOCK else "answer"
        # It was about to hang when it was there; a busy machine may take a while until it does, or answers.
        stands = hang.kind == STOP or (odd["source"] == source and (odd["place"] or {}).get("line") == hang.lines()[-1])
        seen = [(each["source"], each["place"], [wait["what"] for wait in each["waits"]]) for each in data["ranks"]]
        if others_wait and stands and seen == before:
            return text, data
        before = seen
        assert time.monotonic() < give_up_at, f"the job does not come to a stand at {hang}:\n{text}"


def assert_names(hang: Hang, text: str, data: dict[str, Any]) -> None:
    """Asserts that the report names the hang's rank, as the only one, and its lines."""
    assert data["cause"]["ranks"] == [hang.rank], f"{hang}\n{text}"
    odd = data["ranks"][hang.rank]
    if hang.kind == STOP:  # a stopped process tells no line
        assert "is stopped: its process does not run" in text, f"{hang}\n{text}"
        return
    assert odd["source"] == ("signal" if hang.kind in HOLDS_THE_LOCK else "answer"), f"{hang}\n{text}"
    *_, innermost = lines = hang.lines()
    assert (odd["place"]["file"], odd["place"]["line"]) == (str(PROGRAM), innermost), f"{hang}\n{text}"
    for line in lines:
        assert f"    > {PROGRAM}:{line} in " in text, f"{hang}\n{text}"
    if hang.kind == "threads":
        assert f"{PROGRAM}:{line_of('the other thread')} in take_both" in text, text
    if hang.kind == "loader":
        assert len(odd["processes"]) > 1, odd


@pytest.mark.parametrize("seed", chosen(range(5), few=[0]))
def test_each_of_the_hangs_of_a_job_is_named_with_its_rank_and_line(launch, tmp_path, seed):
    size = 3 + seed % 2
    hangs = seeded_hangs(seed, size, len(KINDS))
    words = ("-np", str(size), sys.executable, str(PROGRAM), as_argument(hangs), str(tmp_path))
    job = launch(*words, env={"OMP_NUM_THREADS": "1"})
    for hang in hangs:
        text, data = report_at_a_stand(job, hang, tmp_path)
        assert_names(hang, text, data)
        hang.end(data["ranks"][hang.rank]["pid"], tmp_path)
    code, _, err = job.ended()
    assert code == 0, err.decode()


@pytest.mark.night(but=1)
@pytest.mark.parametrize("seed", chosen(range(5), few=[0]))
@pytest.mark.parametrize("is_whole", [True, False], ids=["from all", "between them"])
def test_a_cut_link_is_named_with_the_line_at_which_the_others_wait(launch, make_lan, tmp_path, is_whole, seed):
    """Of a host that hvdlite-run does not reach nothing is known but its ranks; else all ranks wait in one place."""
    lan = make_lan("a", "b")
    a, b = lan.hosts
    hang = seeded_cut(seed, 3)
    reports, there = tmp_path / "reports", tmp_path / "there.0"
    words = ("-H", f"{a.spec}:2,{b.spec}:1", "--grace", "0", "--report-dir", str(reports), sys.executable, str(PROGRAM))
    job = launch(*words, as_argument([hang]), str(tmp_path), on=lan.desk, env={"OMP_NUM_THREADS": "1"})
    wait_until(lambda: there.exists() or job.process.poll() is not None)
    assert there.exists(), job.ended()
    (line,) = launch("--ps", on=lan.desk).ended()[1].decode().splitlines()[1:]
    behind = ([0, 1] if hang.rank < 2 else [2]) if is_whole else []
    if is_whole:
        lan.cut(a if hang.rank < 2 else b)
    else:
        lan.cut_between(a, b)
    (tmp_path / "end.0").touch()
    give_up_at, number, data = time.monotonic() + PATIENCE_S, 0, {"ranks": [{"waits": []}], "cause": {"cut": None}}
    cut = [] if is_whole else [sorted([a.spec, b.spec])]
    while not all(each["waits"] for each in data["ranks"] if each.get("rank") not in behind) or (
        data["cause"]["cut"] != cut
    ):
        assert time.monotonic() < give_up_at, data
        number += 1
        code, text, err = launch("--report", line.split()[0], on=lan.desk).ended()
        assert code == 0, err
        data = json.loads((reports / f"report-{number}.json").read_text())
    assert data["cause"]["ranks"] == behind, text.decode()
    words = (
        "has no report: its host did not answer"
        if is_whole
        else f"cause: {a.spec} and {b.spec} do not reach each other"
    )
    assert words in text.decode(), text.decode()
    for each in data["ranks"]:
        if each["rank"] not in behind:
            assert (each["place"]["file"], each["place"]["line"]) == (str(PROGRAM), line_of("step")), text.decode()
    job.launcher().send_signal(signal.SIGTERM)
    job.ended()
