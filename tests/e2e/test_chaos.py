"""``hvdlite-run --chaos --survive``: seeded faults at all points, and the others train as one process would.

The report has the step and the point of each fault, and the workers that are left write down their parameters. The test
computes the same in one process: a step's average is that of the workers whose gradients were in it when all had it.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers.long_run import trials
from hvdlite_launcher.plan.chaos_spec import parse_chaos

pytestmark = pytest.mark.slow

PATIENCE_S = 500
SIZE, EVERY = 7, 6
FAULTS_OF_A_JOB = SIZE - 1
STEPS = SIZE * EVERY + 4
# At these the worker's gradients are in the step's average.
IS_IN = {"voted", "stepped"}

PROGRAM = f"""
import os
import torch
import hvdlite as hvd

hvd.init()
worker = int(os.environ["HVDLITE_WORKER"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), bucket_cap_mb=0.0005)
for step in range({STEPS}):
    generator = torch.Generator().manual_seed(100 * step + worker)
    optimizer.zero_grad()
    model(torch.randn(4, 12, generator=generator, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
torch.save([param.detach() for param in model.parameters()], os.environ["RESULTS"] + f"/{{worker}}.pt")
"""


def by_one_process(gone: dict[int, tuple[int, str]]) -> list[torch.Tensor]:
    """The parameters after training in one process; ``gone`` has each lost worker's last step and its point."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        alive = [
            worker
            for worker in range(SIZE)
            if worker not in gone or step < gone[worker][0] or (step == gone[worker][0] and gone[worker][1] in IS_IN)
        ]
        optimizer.zero_grad()
        for worker in alive:
            generator = torch.Generator().manual_seed(100 * step + worker)
            batch = torch.randn(4, 12, generator=generator, dtype=torch.float64)
            (model(batch).square().mean() / len(alive)).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def run(launch, tmp_path, *specs: str, hang_timeout_s: int = 30):
    """Runs the program with these faults; returns the survivors' parameters by worker, and the report."""
    file, others = tmp_path / "report.json", tmp_path / "others"
    others.touch()
    file.symlink_to(others)
    flags = [f"--chaos={spec}" for spec in specs]
    job = launch(
        *("-np", str(SIZE), "--min-np", "1", "--on-failure", "shrink", "--survive"),
        *("--hang-timeout", str(hang_timeout_s)),
        *(*flags, "--chaos-report", str(file), sys.executable, "-c", PROGRAM),
        env={"RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    code, _, err = job.ended(PATIENCE_S)
    job.assert_gone()
    assert code == 0, err.decode()
    report = json.loads(file.read_text())
    assert report["never"] == []
    assert not others.read_text()  # a link is replaced, and not followed
    return {int(each.stem): torch.load(each) for each in tmp_path.glob("*.pt")}, report["faults"], err.decode()


def assert_one_process_trains_the_same(survivors, faults) -> None:
    expected = by_one_process({each["worker"]: (each["step"], each["point"]) for each in faults})
    assert survivors.keys() == set(range(SIZE)) - {each["worker"] for each in faults}
    for own in survivors.values():
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(own, expected, strict=True))
    first, *others = survivors.values()
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.night(but=2)
@pytest.mark.parametrize("seed", range(trials(10, 167)))
def test_the_others_train_as_one_process_would_through_seeded_faults(launch, tmp_path, seed):
    spec = f"seed={seed},every={EVERY},faults=kill+segv+exception,count={FAULTS_OF_A_JOB}"
    survivors, faults, err = run(launch, tmp_path, spec)
    assert len(faults) == FAULTS_OF_A_JOB
    assert_one_process_trains_the_same(survivors, faults)
    drawn = parse_chaos([spec])
    for each in faults:
        (fault,) = drawn.of_worker(each["worker"], SIZE)
        assert (fault.kind, fault.point) == (each["kind"], each["point"])
    assert f"chaos: {FAULTS_OF_A_JOB} faults" in err


@pytest.mark.night
def test_a_rank_that_is_killed_after_its_last_step_costs_nothing(launch, tmp_path):
    survivors, (fault,), err = run(launch, tmp_path, f"kill@stepped:worker=3:step={STEPS - 1}")
    expected = by_one_process({})
    assert fault["end"] == "killed by SIGKILL"
    assert survivors.keys() == set(range(SIZE)) - {3}
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-12)
        for own in survivors.values()
        for a, b in zip(own, expected, strict=True)
    )
    assert "worker 3 (rank 3 on localhost) was killed by SIGKILL, at its end: the others are done" in err


def test_rank_0_that_is_killed_before_it_could_save_fails_the_job(launch, tmp_path):
    job = launch(
        *("-np", "2", "--min-np", "1", "--on-failure", "shrink", "--survive"),
        *(f"--chaos=kill@stepped:worker=0:step={STEPS - 1}", sys.executable, "-c", PROGRAM),
        env={"RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    code, _, err = job.ended(PATIENCE_S)
    job.assert_gone()
    assert code == 1
    assert "rank 0 was lost at its end, when worker 1 on localhost was done" in err.decode()
    assert "was the last to fail, killed by SIGKILL" in err.decode()


# Of a fault within a settlement the worker's gradients are in the step, if all had the averages before.
@pytest.mark.night
@pytest.mark.parametrize("point", ["leave", "report", "settled"])
def test_a_worker_may_have_a_fault_while_the_others_settle_a_step(launch, tmp_path, point):
    specs = ("kill@synchronize:worker=2:step=5", f"kill@{point}:worker=0:step=5")
    survivors, faults, _ = run(launch, tmp_path, *specs)
    assert [each["step"] for each in faults] == [5, 5]
    assert_one_process_trains_the_same(survivors, faults)


@pytest.mark.night(but=1)
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("shm", "killed by SIGBUS"),
        ("exception", "exit code 1"),
        ("stop", "killed by SIGKILL"),
        ("hang", "killed by SIGKILL"),
    ],
)
def test_the_report_says_how_a_worker_ended(launch, tmp_path, kind, end):
    _, (fault,), _ = run(launch, tmp_path, f"{kind}@voted:worker=3:step=2", hang_timeout_s=10)
    assert (fault["end"], fault["step"], fault["point"]) == (end, 2, "voted")
