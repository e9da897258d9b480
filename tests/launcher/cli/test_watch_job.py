"""hvdlite-run --watch PID goes on while its job is restarted, and ends with the hvdlite-run that it shows."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from hvdlite_launcher.cli import watch_job as watching
from hvdlite_launcher.cli.watch_job import watch_job
from hvdlite_launcher.errors import JobEndsError, UsageError
from hvdlite_launcher.status.job_view import JobView

NOT_THERE = UsageError("--watch: no hvdlite-run with this process number runs here")
ENDING = JobEndsError("--watch: hvdlite-run does not answer: its job is ending")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(watching, "draws_in_place", lambda _: False)
    for pause in ("_SOON_S", "_LINE_EACH_S", "_AGAIN_EACH_S"):
        monkeypatch.setattr(watching, pause, 0.0)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def job(age_s: float) -> JobView:
    return JobView(age_s, "python train.py", None, 0, [], {})


def answers(monkeypatch: pytest.MonkeyPatch, end: Callable[[], object], *script: float | Exception) -> None:
    """Has a job be asked that answers with these ages and errors, and that then ends and answers with errors."""
    left = list(script)

    def ask(pid: str) -> object:
        if not left:
            end()
            raise ENDING
        if isinstance(said := left.pop(0), Exception):
            raise said
        return job(said).data()

    monkeypatch.setattr(watching, "ask_for_view", ask)


@pytest.mark.parametrize("error", [NOT_THERE, ENDING])
def test_a_job_that_restarts_is_watched_until_its_hvdlite_run_ends(launcher, monkeypatch, capsys, error):
    answers(monkeypatch, launcher.kill, 60.0, error, error, 70.0, error, 71.0, error)
    assert watch_job(str(launcher.pid)) == 0
    assert capsys.readouterr().out.splitlines() == [
        job(60.0).plain_line(), job(71.0).plain_line(), f"hvdlite-run {launcher.pid} has ended"
    ]  # fmt: skip


def test_a_job_that_was_never_there_is_an_error(launcher, monkeypatch):
    answers(monkeypatch, lambda: None, NOT_THERE)
    with pytest.raises(UsageError):
        watch_job(str(launcher.pid))
