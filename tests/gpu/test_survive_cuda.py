"""Elastic jobs with parameters on GPUs, over NCCL. Needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

PROGRAM = """
import os, signal, torch
import hvdlite as hvd

worker = int(os.environ["HVDLITE_WORKER"])
# NCCL refuses two ranks that are on one GPU of the same host: each calls itself a host of its own.
os.environ["NCCL_HOSTID"] = f"worker {worker}"
hvd.init()
device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)).double().to(device)
alone = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)).double().to(device)
alone.load_state_dict(model.state_dict())
of_alone = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), bucket_cap_mb=0.01)


def loss_of(model, worker, step):
    generator = torch.Generator().manual_seed(100 * step + worker)
    return model(torch.randn(4, 64, generator=generator, dtype=torch.float64).to(device)).square().mean()


for step in range(9):
    optimizer.zero_grad()
    loss_of(model, worker, step).backward()
    if (worker, step) == (1, 4):
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    alive = (0, 1, 2) if step < 4 else (0, 2)
    of_alone.zero_grad()
    for each in alive:
        (loss_of(alone, each, step) / len(alive)).backward()
    if step != 4:
        of_alone.step()
for own, right in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(own, right, rtol=0, atol=1e-10)
"""

ELASTIC = """
import os, signal, torch
import hvdlite as hvd

worker = int(os.environ["HVDLITE_WORKER"])
os.environ["NCCL_HOSTID"] = f"worker {worker}"
hvd.init()
device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())


def new(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 4).double().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def backward(model, step):
    model(torch.arange(32.0, dtype=torch.float64, device=device).view(4, 8).sub(step)).square().mean().backward()


model, optimizer = new(worker)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run
def train(state):
    while state.step < 12:
        optimizer.zero_grad()
        backward(model, state.step)
        if (worker, state.step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
alone, of_alone = new(0)
for step in range(12):
    of_alone.zero_grad()
    backward(alone, step)
    of_alone.step()
for own, right in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(own, right, rtol=0, atol=1e-10)
print("trained by", worker, "of", hvd.size())
"""


def run(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite_launcher", *flags, sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_over_nccl_a_killed_worker_is_replaced_and_no_committed_step_is_lost(tmp_path):
    # Worker 0 alone has the model of seed 0, and the replacement gets it from there.
    done = run(tmp_path, ELASTIC, "-np", "2", "--min-np", "2", "--max-restarts", "1")
    assert "trained by 0 of 2" in done.stdout
    assert "trained by 2 of 2" in done.stdout


def test_over_nccl_all_others_discard_the_step_in_which_a_rank_is_killed(tmp_path):
    done = run(tmp_path, PROGRAM, "-np", "3", "--min-np", "1", "--survive", "--on-failure", "shrink")
    assert "is discarded on all ranks, and changes no parameter: NCCL cannot average gradients again" in done.stderr
