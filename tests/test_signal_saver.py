"""All ranks save after the same step, whichever of them got the signal, and whenever."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from worlds import attempt_worlds, run_worlds

import hvdlite as hvd
from hvdlite import signal_saver


def steps(own: int, *, asks: int, at: int, stop: bool = False, count: int = 8) -> list[int]:
    """Returns the steps after which this rank has saved, where rank ``asks`` asks for it in step ``at``."""
    saved: list[int] = []
    saver = hvd.save_on_signal(lambda: saved.append(step), signals=(), stop=stop)
    for step in range(count):
        if (own, step) == (asks, at):
            saver.request()
        hvd.allreduce(torch.ones(2), name=f"step {step}")
        saver.step()
    return saved


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_all_ranks_save_after_the_same_step_whichever_asks(size, at):
    for asks in range(size):
        assert run_worlds(size, lambda own, asks=asks: steps(own, asks=asks, at=at)) == [[at + 1]] * size


def test_training_goes_on_and_a_later_request_saves_again():
    def rank(own: int) -> list[int]:
        saved: list[int] = []
        saver = hvd.save_on_signal(lambda: saved.append(step), signals=(), stop=False)
        for step in range(10):
            if (own, step) in ((0, 1), (1, 6)):
                saver.request()
            assert saver.step() is (step in saved)
        return saved

    assert run_worlds(2, rank) == [[2, 7]] * 2


def test_no_rank_stops_before_all_have_saved():
    saved = []

    def rank(own: int) -> None:
        saver = hvd.save_on_signal(lambda: saved.append(own), signals=(), stop=True)
        saver.request()
        try:
            for _ in range(3):
                saver.step()
        finally:
            assert sorted(saved) == [0, 1, 2]

    assert [type(outcome) for outcome in attempt_worlds(3, rank)] == [SystemExit] * 3


def test_a_signal_asks_for_a_save_and_close_restores_its_handler():
    before = signal.getsignal(signal.SIGUSR1)
    hvd.init()
    try:
        saved = []
        saver = hvd.save_on_signal(lambda: saved.append(1), signals=(signal.SIGUSR1,), stop=False)
        saver.step()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [saver.step(), saver.step(), saver.step(), len(saved)] == [False, True, False, 1]
        saver.close()
    finally:
        hvd.shutdown()
    assert signal.getsignal(signal.SIGUSR1) == before


def save_and_requeue(monkeypatch, tmp_path, scontrol: str) -> None:
    """Saves on two ranks of Slurm's job 77, whose command scontrol is this script, and asserts that both end."""
    (tmp_path / "scontrol").write_text(scontrol)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")

    def rank(own: int) -> None:
        saver = hvd.save_on_signal(lambda: None, signals=(), requeue=True)
        saver.request()
        saver.step()
        saver.step()

    assert [type(outcome) for outcome in attempt_worlds(2, rank)] == [SystemExit] * 2


def test_rank_0_requeues_the_job_of_slurm_once_all_have_saved(tmp_path, monkeypatch):
    save_and_requeue(monkeypatch, tmp_path, f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    assert (tmp_path / "asked").read_text() == "requeue 77\n"


def test_the_signal_of_slurm_that_reaches_scontrol_too_does_not_end_it(tmp_path, monkeypatch, caplog):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\nkill -USR1 $$\necho "$@" > {tmp_path}/asked\nexit 3\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # Not in a rank, which is a thread here: only the main thread has signals.
    saver = signal_saver.SignalSaver(lambda: None, (signal.SIGUSR1,), stop=True, slurm_job="77")
    try:
        saver._requeue()
    finally:
        saver.close()
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert "scontrol requeue 77 failed: its exit code is 3" in caplog.text


def test_a_requeue_that_hangs_is_an_error_in_the_log_and_the_ranks_end_as_if_it_had_worked(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(signal_saver, "_REQUEUE_TIMEOUT_S", 0.1)
    save_and_requeue(monkeypatch, tmp_path, "#!/bin/sh\nexec sleep 1000\n")
    assert "all ranks have saved, but scontrol requeue 77 failed: " in caplog.text
    assert "timed out" in caplog.text


def test_requeue_outside_of_slurm_and_without_stop_is_refused(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def rank(own: int) -> None:
        with pytest.raises(ValueError, match="needs a job of Slurm, and SLURM_JOB_ID is not set"):
            hvd.save_on_signal(lambda: None, signals=(), requeue=True)
        with pytest.raises(ValueError, match="leave out stop=False"):
            hvd.save_on_signal(lambda: None, signals=(), requeue=True, stop=False)

    run_worlds(1, rank)


def test_before_init_it_is_refused():
    with pytest.raises(hvd.NotInitializedError):
        hvd.save_on_signal(lambda: None)
