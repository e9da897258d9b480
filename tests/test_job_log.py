"""`hvd.log_to`: the job's numbers, from rank 0, in whatever takes numbers."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from worlds import run_worlds

import hvdlite as hvd
from hvdlite.runtime import world

MODEL = nn.Linear(3, 1)


def train(steps: int) -> None:
    model = copy.deepcopy(MODEL)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.close()


@pytest.fixture(autouse=True)
def _no_steps_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world._process, "steps", Counter())


def test_rank_0_logs_the_jobs_numbers_and_others_log_nothing():
    def rank(own: int) -> list[tuple[int, dict[str, float]]]:
        logged: list[tuple[int, dict[str, float]]] = []
        with hvd.log_to(lambda numbers, step: logged.append((step, numbers)), every_s=1000) as job_log:
            job_log.log_now()
            train(3)
            job_log.log_now()
        hvd.barrier()
        return logged

    of_rank_0, of_rank_1 = run_worlds(2, rank)
    assert of_rank_1 == []
    first, second, last = (numbers for _, numbers in of_rank_0)
    assert [step for step, _ in of_rank_0] == [0, 3, 3]
    assert first["hvdlite/ranks"] == 2
    assert first["hvdlite/memory_bytes"] > 1e6
    assert "hvdlite/steps_per_s" not in first, "there is nothing to compare with"
    assert second["hvdlite/steps_per_s"] > 0
    assert last["hvdlite/steps_per_s"] == 0
    assert all(isinstance(value, int | float) for value in last.values())


def test_samples_of_all_ranks_are_counted(monkeypatch):
    def rank(own: int) -> list[float]:
        sampler = hvd.elastic.ElasticSampler(range(40))
        found: list[float] = []
        job_log = hvd.log_to(lambda numbers, _: found.append(numbers.get("job samples_per_s", 0)), prefix="job ")
        job_log.log_now()
        sampler.record_batch(0, 10)
        job_log.log_now()
        job_log.close()
        return found

    found, _ = run_worlds(2, rank)
    assert found[1] > 0


class Writer:
    """As TensorBoard's ``SummaryWriter``."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, int]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found[name] = (value, step)


def test_each_kind_of_target_is_called_as_it_wants_to_be():
    writer, found = Writer(), {}
    mlflow = SimpleNamespace(log_metrics=lambda metrics, step: found.update(mlflow=(metrics, step)))
    run = SimpleNamespace(log=lambda numbers: found.update(wandb=numbers))
    hvd.init()
    train(2)
    for target in (writer, mlflow, run):
        hvd.log_to(target).close()
    steps = hvd.log_to(lambda numbers, step: found.update(function=(numbers, step)))
    steps.close()
    _, step = found["function"]
    assert writer.found["hvdlite/ranks"] == (1, step)
    assert found["mlflow"][0]["hvdlite/ranks"] == 1
    assert found["mlflow"][1] == step
    assert found["wandb"]["hvdlite/step"] == step


def test_it_logs_by_itself_at_its_interval_until_it_is_closed():
    hvd.init()
    twice, calls = threading.Event(), []

    def count(numbers: dict[str, float], step: int) -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            twice.set()

    job_log = hvd.log_to(count, every_s=0.01)
    assert twice.wait(30)
    job_log.close()
    known = len(calls)
    job_log.log_now()
    assert len(calls) == known
    assert "hvdlite log_to" in calls


def test_what_the_target_raises_is_told_once_and_ends_it(caplog):
    hvd.init()
    calls = []

    def fails(*_: Any) -> None:
        calls.append(1)
        raise OSError("disk full")

    job_log = hvd.log_to(fails, every_s=1000)
    for _ in range(3):
        job_log.log_now()
    job_log.close()
    assert len(calls) == 1
    assert [each.message for each in caplog.records if "log_to" in each.message] == [
        "log_to: nothing is logged any more, since this failed: OSError: disk full"
    ]


def test_nothing_is_logged_before_init_and_after_shutdown():
    calls = []
    job_log = hvd.log_to(lambda *_: calls.append(1), every_s=1000)
    job_log.log_now()
    hvd.init()
    hvd.shutdown()
    job_log.close()
    assert calls == []


@pytest.mark.parametrize(
    ("target", "every_s", "error", "said"),
    [
        (3, 1.0, TypeError, "3 has neither add_scalar, log_metrics nor log"),
        (print, 0, ValueError, "every_s=0 is not a positive number"),
        (print, "often", ValueError, "every_s='often' is not"),
    ],
)
def test_what_cannot_be_logged_to_is_refused(target, every_s, error, said):
    with pytest.raises(error, match=said):
        hvd.log_to(target, every_s=every_s)


def test_a_host_without_any_interface_has_no_bytes_to_tell(monkeypatch):
    monkeypatch.setattr("psutil.net_io_counters", lambda: None)
    hvd.init()
    found = []
    with hvd.log_to(lambda numbers, _: found.append(numbers), every_s=1000) as job_log:
        job_log.log_now()
        job_log.log_now()
    assert "hvdlite/steps_per_s" in found[1]
    assert not [name for name in found[1] if "bytes_per_s" in name]
