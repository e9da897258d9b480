"""Hangs drawn from seeds: the report names the rank that the others wait for, and the line of its program, in each."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import PATIENCE_S, Launch, wait_until
from hangs import HOLDS_THE_LOCK, KINDS, PROGRAM, STOP, Hang, as_argument, line_of, seeded_hangs
from hvdlite_launcher.report.console import ask_for_report
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
        seen = [(each["source"], each["place"], [wait["what"] for wait in each["waits"]]) for each in data["ranks"]]
        if others_wait and seen == before:
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
